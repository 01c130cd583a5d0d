// The weights of one model in packed form, in one region of memory, and what each layer sees of them.
//
// Knows layouts, not files: Python hands over rows of codes. Sizes are planned beforehand; running out is an error.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "memory.h"
#include "pack.h"
#include "sources.h"
#include "thread_pool.h"

namespace lmdeploy {

// Matrices that share an input and whose outputs follow each other.
struct Linear {
  static constexpr int kMaxParts = 3;
  int count = 0;
  Matrix parts[kMaxParts];
  const float* bias = nullptr;
  const int32_t* order = nullptr;  // input k of the parts is value order[k] of the row; null: as it is

  // The part that holds output channel `channel`, and the channel's number inside it.
  const Matrix& part_of(int& channel) const {
    int i = 0;
    while (i + 1 < count && channel >= parts[i].n) channel -= parts[i++].n;
    return parts[i];
  }
};

// gate_up holds runs of `run` gate channels followed by the up channels of the same numbers (one part), or gate and
// up as two parts when their kinds differ.
struct LayerWeights {
  Linear qkv, o, gate_up, down;
  const float *gate_bias = nullptr, *up_bias = nullptr;
  const float *attn_norm = nullptr, *ffn_norm = nullptr, *attn_post_norm = nullptr, *ffn_post_norm = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
};

class Weights {
 public:
  Weights(size_t bytes, int layers) : region_(bytes), arena_(region_.data(), region_.size()), layers_(layers) {}

  // A matrix of zero weights, filled by `pack`; returns its number.
  int add_matrix(WeightKind kind, int n, int k, int group);
  // Copies `count` source rows to channels from dst_row on, on all threads of the pool. `runs` > 0: into runs of
  // that many channels, every other one, as gate_up wants them; dst_row then is 0 (gate) or 1 (up).
  void pack(int matrix, const PackSource& source, int dst_row, int run, ThreadPool& pool);
  // The same from the bytes of a file, whose channels fill whole tiles from dst_row on; returns notes (sources.h).
  uint32_t pack_file(int matrix, const FileMatrix& source, int dst_row, int run, ThreadPool& pool);
  // values: null leaves the place as it is.
  int add_vector(const float* values, size_t count);
  // The order in which a linear's matrices take the values of a row: a permutation of 0..count - 1. Null: the order
  // that lies in the next place already.
  void set_order(int layer, const std::string& role, const int32_t* order, size_t count);

  void set_linear(int layer, const std::string& role, const std::vector<int>& matrices, int bias);
  void set_vector(int layer, const std::string& role, int vector);
  void set_embedding(int matrix) { embedding_ = matrices_.at(matrix); }

  const LayerWeights& layer(int i) const { return layers_[i]; }
  const Matrix& embedding() const { return embedding_; }
  const Linear& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  size_t used() const { return arena_.used(); }
  uint8_t* data() const { return region_.data(); }
  size_t size() const { return region_.size(); }

 private:
  Linear& linear(int layer, const std::string& role);
  const float*& vector(int layer, const std::string& role);

  Region region_;
  Arena arena_;
  std::vector<Matrix> matrices_;
  std::vector<const float*> vectors_;
  std::vector<LayerWeights> layers_;
  Matrix embedding_{};
  Linear head_;
  const float* final_norm_ = nullptr;
};

}  // namespace lmdeploy
