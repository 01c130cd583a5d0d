// A decoder-only transformer on the CPU: computes one ragged batch at a time.
//
// Owns weights, cache blocks, workspace and threads; remembers nothing else between steps. One parallel region per
// step; inside it threads meet at barriers only. Nothing is allocated in a step. A row's result never depends on the
// other rows, on the number of threads or on how its tokens are cut into steps.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.h"
#include "kernels/table.h"
#include "memory.h"
#include "profile.h"
#include "shape.h"
#include "thread_pool.h"
#include "weights.h"
#include "workspace.h"

namespace lmdeploy {

class Model {
 public:
  // Takes all memory: `weight_bytes`, the cache (touched) and the workspace. `cpus`: see ThreadPool.
  Model(const ModelShape& shape, const Limits& limits, const std::vector<int>& cpus, size_t weight_bytes,
        const KernelTable& kernels);

  Weights& weights() { return weights_; }
  ThreadPool& pool() { return pool_; }
  const Limits& limits() const { return limits_; }
  const ModelShape& shape() const { return shape_; }
  size_t workspace_size() const { return workspace_memory_.size(); }
  size_t cache_size() const { return cache_memory_.size(); }
  // Sets every 16-bit value of the cache, so that tests can show that stale values never matter.
  void fill_cache(uint16_t bits);

  void step(const Batch& batch, const StepOutput& output);
  // From the next step on, each step measures its operations.
  void set_profile(bool on);
  // Of the last step, for each thread; empty while off.
  const std::vector<OpTimes>& profile() const { return profile_; }

 private:
  // A thread inside the step. `turn` counts the work lists it has gone through.
  struct Worker {
    int id;
    int turn;
    const ThreadSpace& space;
    Stopwatch watch;
  };

  // model.cpp: the step as a sequence of operations
  void work(int thread);
  void barrier(Worker& w);
  void embed(Worker& w);
  void attention_block(Worker& w, int layer);
  void ffn_block(Worker& w, int layer);
  void output_head(Worker& w);
  void head_logits(Worker& w, const Input& input, int rows);
  void finish_logits(float* out, int rows, int begin, int count);
  void sample_rows(Worker& w, int first, int rows);

  // operations.cpp: what the blocks consist of
  Input prepared(Worker& w, const float* rows, const int32_t* index, int count, const float* norm,
                 const InputFormat& format, const int32_t* order);
  void add_normed(Worker& w, const float* norm, float scale);
  void qkv(Worker& w, const Input& input, int layer);
  void query_head(Worker& w, const Input& input, int layer, int head, int begin, int rows);
  void key_value_head(Worker& w, const Input& input, int layer, int head, int begin, int rows);
  void position_head(const LayerShape& shape, const float* norm, int token, float* head) const;
  void rotate_head(const LayerShape& shape, int token, float* head) const;
  void norm_across_heads(Worker& w, int layer);
  void store_kv(int layer, int head, int token, const float* key, const float* value);
  void project(Worker& w, const Linear& linear, const Input& input, bool add, float scale, Op op);
  void gate_up(Worker& w, const Input& input, int layer);
  void gate_up_unit(Worker& w, const Input& input, int layer, int begin, int end, int first_row, int rows);

  // attention.cpp
  void plan_attention();
  bool shares_sequences(const LayerShape& shape) const;
  void attention(Worker& w, int layer);
  void attend_tile(Worker& w, int layer, const QueryTile& tile, int kv_head);
  void attend_part(int layer, const QueryTile& tile, int kv_head, int split, int slot);
  // One range; `ahead`: the calling thread goes on with the next one.
  void attend(int layer, const QueryTile& tile, int kv_head, int split, bool ahead, const Partial& result);
  void finish_tile(int layer, const QueryTile& tile, int kv_head, const Partial& total);

  // Distributes [0, total): when few rows, a fixed share for each thread (the same weights every step), else pieces
  // from a counter. Calls f(begin, end) with at most `piece` items.
  template <class F>
  void distribute(Worker& w, int total, int piece, bool fixed, F f);
  // The next number of the current work list, and the step to the next list (once per list, on every thread).
  int take(Worker& w) { return counters_[w.turn % kCounters].value.fetch_add(1, std::memory_order_relaxed); }
  void next_list(Worker& w);

  ModelShape shape_;
  Limits limits_;
  const KernelTable& kernels_;
  ThreadPool pool_;
  Weights weights_;
  Region cache_memory_;
  Region workspace_memory_;
  Arena arena_;
  Workspace space_;
  std::vector<KvLayer> cache_;
  std::vector<int> rope_offset_;  // of each rope kind in a token's cosines
  std::mutex mutex_;
  std::vector<OpTimes> profile_;

  // The step in progress.
  Batch batch_{};
  StepOutput output_{};
  int tiles_ = 0;

  static constexpr int kCounters = 3;  // a list's counter is cleared two lists ahead
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };
  Counter counters_[kCounters];
};

size_t cache_block_bytes(const ModelShape& shape, int block_size, int kv_bits);

template <class F>
void Model::distribute(Worker& w, int total, int piece, bool fixed, F f) {
  next_list(w);
  if (fixed) {
    int begin = static_cast<int>(int64_t{total} * w.id / pool_.size());
    int end = static_cast<int>(int64_t{total} * (w.id + 1) / pool_.size());
    for (; begin < end; begin += piece) f(begin, begin + piece < end ? begin + piece : end);
    return;
  }
  for (int begin; (begin = take(w) * piece) < total;) f(begin, begin + piece < total ? begin + piece : total);
}

inline void Model::next_list(Worker& w) {
  ++w.turn;
  if (w.id == 0) counters_[(w.turn + 1) % kCounters].value.store(0, std::memory_order_relaxed);
}

}  // namespace lmdeploy
