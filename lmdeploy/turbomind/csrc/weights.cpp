#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace lmdeploy {

namespace {

// Where gate (half 0) or up (half 1) channel `channel` of `n` lies among runs of `run` gate and `run` up channels;
// the last run is as wide as what remains, in whole tiles.
int interleaved(int channel, int n, int run, int half) {
  int begin = channel / run * run;
  int width = std::min(run, static_cast<int>(align_up(n - begin, kTile)));
  return 2 * begin + half * width + channel % run;
}

}  // namespace

int Weights::add_matrix(WeightKind kind, int n, int k, int group) {
  size_t bytes = packed_bytes(kind, n, k, group);
  matrices_.push_back(layout_matrix(kind, n, k, group, arena_.take_bytes(bytes)));
  return static_cast<int>(matrices_.size()) - 1;
}

void Weights::pack(int matrix, const PackSource& source, int dst_row, int run, ThreadPool& pool) {
  const Matrix& dst = matrices_.at(matrix);
  // Checked here, because nothing may be thrown on the threads of the pool.
  int last = run > 0 ? static_cast<int>(align_up(source.n, kTile)) * 2 : dst_row + source.n;
  bool fits = source.kind == dst.kind && source.k == dst.k && last <= dst.n && dst_row >= 0;
  if (!fits || (!is_dense(dst.kind) && (source.group <= 0 || source.group % dst.group != 0))) {
    throw std::invalid_argument("rows that do not fit the packed matrix");
  }
  int tiles = (source.n + kTile - 1) / kTile;
  auto share = [&](int thread) {
    int begin = static_cast<int>(int64_t{tiles} * thread / pool.size());
    int end = static_cast<int>(int64_t{tiles} * (thread + 1) / pool.size());
    for (int tile = begin; tile < end; ++tile) {
      int row = tile * kTile;
      int to = run > 0 ? interleaved(row, source.n, run, dst_row) : dst_row + row;
      pack_rows(source, row, std::min(kTile, source.n - row), dst, to);
    }
  };
  pool.run(share);
}

uint32_t Weights::pack_file(int matrix, const FileMatrix& source, int dst_row, int run, ThreadPool& pool) {
  const Matrix& dst = matrices_.at(matrix);
  int tiles = (source.n + kTile - 1) / kTile;
  int last = run > 0 ? tiles * kTile * 2 : dst_row + source.n;
  bool fits = packed_kind(source.form) == dst.kind && source.k == dst.k && last <= dst.n && dst_row >= 0;
  if (!fits || (run == 0 && dst_row % kTile != 0) || (dst.groups > 0 && source.group % dst.group != 0)) {
    throw std::invalid_argument("a file's matrix that does not fit the packed one");
  }
  std::atomic<uint32_t> notes{0};
  auto share = [&](int thread) {
    int end = static_cast<int>(int64_t{tiles} * (thread + 1) / pool.size());
    for (int tile = static_cast<int>(int64_t{tiles} * thread / pool.size()); tile < end; tile += kTilesAtOnce) {
      int count = std::min(kTilesAtOnce, end - tile);
      int32_t to[kTilesAtOnce];
      for (int i = 0; i < count; ++i) {
        int row = (tile + i) * kTile;
        to[i] = (run > 0 ? interleaved(row, source.n, run, dst_row) : dst_row + row) / kTile;
      }
      notes.fetch_or(pack_file_tiles(source, tile, count, dst, to));
    }
  };
  pool.run(share);
  return notes.load();
}

int Weights::add_vector(const float* values, size_t count) {
  float* copy = arena_.take<float>(count);
  if (values != nullptr) std::memcpy(copy, values, count * sizeof(float));
  vectors_.push_back(copy);
  return static_cast<int>(vectors_.size()) - 1;
}

void Weights::set_order(int layer, const std::string& role, const int32_t* order, size_t count) {
  Linear& target = linear(layer, role);
  if (target.count == 0 || count != size_t(target.parts[0].k)) throw std::invalid_argument("order of another length");
  int32_t* copy = arena_.take<int32_t>(count);
  if (order != nullptr) std::memcpy(copy, order, count * sizeof(int32_t));
  for (size_t i = 0; i < count; ++i) {
    if (copy[i] < 0 || size_t(copy[i]) >= count) throw std::invalid_argument("order points outside the row");
  }
  target.order = copy;
}

Linear& Weights::linear(int layer, const std::string& role) {
  if (role == "head") return head_;
  LayerWeights& w = layers_.at(layer);
  if (role == "qkv") return w.qkv;
  if (role == "o") return w.o;
  if (role == "gate_up") return w.gate_up;
  if (role == "down") return w.down;
  throw std::invalid_argument("no linear is called " + role);
}

const float*& Weights::vector(int layer, const std::string& role) {
  if (role == "final_norm") return final_norm_;
  LayerWeights& w = layers_.at(layer);
  if (role == "gate_bias") return w.gate_bias;
  if (role == "up_bias") return w.up_bias;
  if (role == "attn_norm") return w.attn_norm;
  if (role == "ffn_norm") return w.ffn_norm;
  if (role == "attn_post_norm") return w.attn_post_norm;
  if (role == "ffn_post_norm") return w.ffn_post_norm;
  if (role == "q_norm") return w.q_norm;
  if (role == "k_norm") return w.k_norm;
  throw std::invalid_argument("no vector is called " + role);
}

void Weights::set_linear(int layer, const std::string& role, const std::vector<int>& matrices, int bias) {
  if (matrices.size() > Linear::kMaxParts) throw std::invalid_argument("too many parts in " + role);
  Linear& target = linear(layer, role);
  target.count = static_cast<int>(matrices.size());
  for (int i = 0; i < target.count; ++i) target.parts[i] = matrices_.at(matrices[i]);
  target.bias = bias < 0 ? nullptr : vectors_.at(bias);
}

void Weights::set_vector(int layer, const std::string& role, int index) { vector(layer, role) = vectors_.at(index); }

}  // namespace lmdeploy
