// Where the threads of one step spend their time, by operation.
//
// A thread's clock runs from one lap to the next, so every moment of the parallel region belongs to exactly one
// operation. Off unless asked for: then a lap is one comparison. Knows the names of operations, not what they do.
#pragma once
#include <chrono>
#include <cstdint>
#include <vector>

namespace lmdeploy {

enum Op : int {
  kOpEmbed,      // rows of the embedding, cosines and sines
  kOpPrepare,    // norms, activation planes
  kOpQkv,        // matrix products
  kOpRopeStore,  // bias, norms of heads, rotation, cache writes
  kOpAttention,
  kOpO,
  kOpGateUp,
  kOpActivation,  // gate times up, and its activation planes
  kOpDown,
  kOpResidual,  // bias, residual additions, norms after a block
  kOpHead,
  kOpFinish,  // scale, cap and check of logits
  kOpSample,
  kOpBarrier,  // waiting for other threads; laps count barriers
  kOps,
};
constexpr const char* kOpNames[kOps] = {"embed", "prepare", "qkv",        "rope_store", "attention",
                                        "o",     "gate_up", "activation", "down",       "residual",
                                        "head",  "finish",  "sample",     "barrier"};

struct OpTime {
  double seconds;
  int64_t laps;
};
using OpTimes = std::vector<OpTime>;  // [kOps] of one thread

class Stopwatch {
 public:
  // Starts at once; null: off.
  explicit Stopwatch(OpTime* times) : times_(times) {
    if (times_ != nullptr) last_ = Clock::now();
  }
  // What has passed since the last lap belonged to `op`.
  void lap(Op op) {
    if (times_ == nullptr) return;
    Clock::time_point now = Clock::now();
    times_[op].seconds += std::chrono::duration<double>(now - last_).count();
    ++times_[op].laps;
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  OpTime* times_;
  Clock::time_point last_{};
};

}  // namespace lmdeploy
