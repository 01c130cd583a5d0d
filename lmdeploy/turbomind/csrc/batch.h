// One step's input and output as plain arrays. Shapes and meaning are those of lmdeploy/engine/batch.py.
//
// Nothing here owns memory. `check_batch` is the edge: behind it, sizes and ranges are taken for granted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "shape.h"

namespace lmdeploy {

struct SampleColumns {
  int count;
  const int32_t* token_index;
  const int32_t* target_ids;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const uint64_t* seed;
  const int64_t* position;
  const int32_t* logprobs;
  const int32_t* bias_start;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* history_start;
  const int32_t* history_ids;
  const int32_t* history_counts;
  const int32_t* mask_index;  // [count] row of mask_bits, -1: any token; null: no sample has a mask
  const uint32_t* mask_bits;  // [rows][mask_words(vocab)]
};

inline size_t mask_words(int vocab) { return (static_cast<size_t>(vocab) + 31) / 32; }

struct Batch {
  int tokens, rows;
  const int32_t* token_ids;
  const int32_t* row_start;
  const int32_t* context_len;
  const int32_t* block_start;
  const int32_t* block_ids;
  SampleColumns samples;
  const std::function<void()>* wait_for_masks;  // returns when mask_bits may be read; null: they may be at once
};

struct StepOutput {
  int32_t* token_ids;
  bool* finite;
  float* logprob;
  int top;  // columns of the two arrays below
  int32_t* top_ids;
  float* top_logprobs;
  float* const* logits;  // [S] where to copy the raw row, or null
};

// Lengths of the arrays as they came in.
struct BatchLengths {
  size_t token_ids, row_start, context_len, block_start, block_ids;
  size_t bias_ids, history_ids, mask_rows;
};

// Throws std::invalid_argument, saying what is wrong, when the batch would read or write outside its arrays, the
// cache or the vocabulary, or exceeds the limits.
void check_batch(const Batch& batch, const BatchLengths& lengths, const ModelShape& shape, const Limits& limits);

}  // namespace lmdeploy
