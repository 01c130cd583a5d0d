// All memory that a step writes apart from the cache: one arena, laid out once.
//
// The same code counts the bytes (for the memory plan) and hands them out.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "memory.h"
#include "sampling.h"
#include "shape.h"

namespace lmdeploy {

constexpr int kFewRows = 4;      // up to here every thread prepares all rows for itself and saves a barrier
constexpr int kRowChunk = 128;   // rows of one unit of a matmul
constexpr int kUnitTiles = 8;    // most tiles of one unit of a matmul
constexpr int kHeadTiles = 64;   // of the output head
constexpr int kTileRows = 16;    // most rows x heads of one attention unit, in whole rows
constexpr int kStaticRows = 32;  // below, each thread takes a fixed share of every matrix
constexpr size_t kLogitBytes = size_t{16} << 20;

// Prepared rows for the matrices that share an input: for groups of integers, for 16-bit floats, or both.
struct Input {
  Activations int8{}, dense{};

  const Activations& of(const Matrix& w) const { return w.group == 0 ? dense : int8; }
};

Input make_input(const InputFormat& format, int rows, uint8_t* memory);
size_t input_bytes(const InputFormat& format, int rows);
// Channels of the runs in which gate and up alternate: a group of the matrix that follows.
inline int run_channels(const InputFormat& down) { return down.group > 0 ? down.group : 2 * kTile; }
// Rows [begin, begin + rows) of prepared rows; begin is a multiple of kRowBlock.
Activations rows_of(const Activations& a, int begin, int rows);

inline int splits_of(int tokens) { return (tokens + kSplit - 1) / kSplit; }
inline int tile_rows(int heads) { return std::max(1, kTileRows / heads); }

// A run of consecutive rows (tokens) of one sequence that one attention unit serves.
struct QueryTile {
  int row;       // row of the batch
  int token;     // index of its first token in the batch
  int position;  // of that token in its sequence
  int rows;
};

// Attention of some query vectors over a part of the context: sum of exp(s - max) * v, the largest s, sum of exp.
struct Partial {
  float *out, *max, *sum;
};

struct ThreadSpace {
  uint8_t* input;       // prepared rows, kFewRows
  float* row;           // one normed row
  float* reordered;     // the same values in the order that a matrix takes them
  float* out;           // results of one matmul unit
  void* matmul;         // scratch of the kernel
  Partial total, part;  // of one attention unit
  SampleScratch sample;
};

class Workspace {
 public:
  Workspace(const ModelShape& shape, const Limits& limits, const KernelTable& kernels, Arena& arena);

  int logit_rows;    // rows of `logits`
  int vocab_stride;  // floats between them
  int shared_parts;  // parts that `shared` holds

  float *x, *branch;     // [tokens][hidden] residual stream; output of a block that is normed before it is added
  float *q, *attention;  // [tokens][max q_dim]
  float* kv;             // [tokens][2 * max kv_dim] keys, then values, while keys wait for a norm across heads
  float *cosine, *sine;  // [tokens][rope_stride] all rope kinds one after the other
  int rope_stride;
  uint8_t *input, *down_input;  // prepared rows
  float* logits;
  std::atomic<uint8_t>* bad_row;  // [logit_rows] a logit was not finite
  // Attention of few long sequences: partial results of all units.
  Partial shared;
  std::atomic<int>* splits_done;
  QueryTile* tiles;    // [tokens]
  int32_t* token_row;  // [tokens] row of the batch
  std::vector<ThreadSpace> threads;

 private:
  void take_shared(const ModelShape& shape, const Limits& limits, Arena& arena);
  void take_thread(const ModelShape& shape, const Limits& limits, const KernelTable& kernels, Arena& arena);
};

size_t workspace_bytes(const ModelShape& shape, const Limits& limits, const KernelTable& kernels);

}  // namespace lmdeploy
