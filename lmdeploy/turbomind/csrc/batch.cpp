#include "batch.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace lmdeploy {

namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// Offsets start at 0, do not fall and end at `length`.
void check_offsets(const int32_t* start, int count, size_t length, const char* what) {
  bool good = start[0] == 0 && static_cast<size_t>(start[count]) == length;
  for (int i = 0; i < count; ++i) good = good && start[i] <= start[i + 1];
  require(good, what);
}

void check_range(const int32_t* ids, size_t count, int limit, const char* what) {
  for (size_t i = 0; i < count; ++i) require(ids[i] >= 0 && ids[i] < limit, what);
}

void check_rows(const Batch& b, const Limits& limits) {
  for (int row = 0; row < b.rows; ++row) {
    require(b.row_start[row] < b.row_start[row + 1], "a row has no token");
    int64_t tokens = int64_t{b.context_len[row]} + b.row_start[row + 1] - b.row_start[row];
    int64_t blocks = b.block_start[row + 1] - b.block_start[row];
    require(b.context_len[row] >= 0 && tokens <= INT32_MAX, "a row's context is no length");
    require(blocks * limits.block_size >= tokens, "a row has too few blocks for its tokens");
  }
}

void check_samples(const SampleColumns& s, const BatchLengths& lengths, int tokens, int vocab) {
  check_offsets(s.bias_start, s.count, lengths.bias_ids, "bias_start is no list of offsets into bias_ids");
  check_offsets(s.history_start, s.count, lengths.history_ids, "history_start is no list of offsets into history_ids");
  check_range(s.bias_ids, lengths.bias_ids, vocab, "a bias names a token outside the vocabulary");
  check_range(s.history_ids, lengths.history_ids, vocab, "a history names a token outside the vocabulary");
  for (size_t i = 0; i < lengths.bias_ids; ++i) {
    require(s.bias_values[i] < INFINITY, "a bias is NaN or positive infinity");
  }
  for (int i = 0; i < s.count; ++i) {
    require(s.token_index[i] >= 0 && s.token_index[i] < tokens, "a sample names a token outside the batch");
    require(s.mask_index == nullptr || (s.mask_index[i] >= -1 && s.mask_index[i] < int64_t(lengths.mask_rows)),
            "a sample names a mask that is not there");
    require(s.target_ids[i] < vocab, "a target lies outside the vocabulary");
    require(s.temperature[i] >= 0 && std::isfinite(s.temperature[i]), "a temperature is negative or not finite");
    require(s.top_p[i] > 0, "a top_p is not positive");
    require(s.min_p[i] >= 0 && s.min_p[i] <= 1, "a min_p is outside 0..1");
    require(s.repetition_penalty[i] > 0, "a repetition_penalty is not positive");
    require(std::isfinite(s.presence_penalty[i]) && std::isfinite(s.frequency_penalty[i]), "a penalty is not finite");
  }
}

}  // namespace

void check_batch(const Batch& b, const BatchLengths& lengths, const ModelShape& shape, const Limits& limits) {
  require(b.rows >= 1 && b.rows <= limits.max_rows, "the batch has no row or more than max_rows");
  require(b.tokens >= 1 && b.tokens <= limits.max_step_tokens, "the batch has no token or more than max_step_tokens");
  require(lengths.row_start == size_t(b.rows) + 1 && lengths.block_start == size_t(b.rows) + 1,
          "row_start and block_start need one entry more than there are rows");
  check_offsets(b.row_start, b.rows, lengths.token_ids, "row_start is no list of offsets into token_ids");
  check_offsets(b.block_start, b.rows, lengths.block_ids, "block_start is no list of offsets into block_ids");
  check_range(b.token_ids, lengths.token_ids, shape.vocab, "a token lies outside the vocabulary");
  check_range(b.block_ids, lengths.block_ids, limits.num_blocks, "a block lies outside the cache");
  check_rows(b, limits);
  check_samples(b.samples, lengths, b.tokens, shape.vocab);
}

}  // namespace lmdeploy
