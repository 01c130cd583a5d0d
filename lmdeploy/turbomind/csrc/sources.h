// Weights straight from the bytes of a file into the packed layout, without codes in between.
//
// Knows the public layouts of GGUF blocks, AWQ, GPTQ and compressed-tensors words and plain floats; knows no file.
// Plain C++ on 32-bit words: 2 to 8 GB/s of source a core where memory gives that much.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace lmdeploy {

// How a file holds a matrix. Rows: one output channel after the other. Words: int32 with small integers from the lowest
// bits on. Inputs: [inputs / inputs of a word, channels] (gptq) or [inputs, channels / 8] (awq).
enum SourceForm : int32_t {
  kRowsQ4_0,
  kRowsQ4_1,
  kRowsQ5_0,
  kRowsQ5_1,
  kRowsQ8_0,
  kRowsQ4K,
  kRowsQ5K,
  kRowsQ6K,
  kRowsWords4,
  kRowsWords8,
  kRowsInt8,
  kRowsBf16,
  kRowsF16,
  kRowsF32,
  kInputsAwq,
  kInputsGptq4,
  kInputsGptq8,
  kSourceForms,
};

// A view of n channels. stride: bytes from a row (of inputs or channels) to the next. rows: null, or which row of the
// file is channel i (rows only). scales and zeros: [n, ceil(k / group)] where the form has none of its own.
struct FileMatrix {
  SourceForm form;
  int32_t n, k, group;
  const uint8_t* data;
  size_t stride;
  const int32_t* rows;
  const uint16_t* scales;
  const uint8_t* zeros;
};

// What became of the values.
constexpr uint32_t kNotFinite = 1, kRounded = 2, kRoundedScales = 4;

WeightKind packed_kind(SourceForm form);
// Bytes that a row of k inputs takes (rows only).
size_t row_bytes(SourceForm form, int32_t k);
bool by_inputs(SourceForm form);

// Packs channels 16 tile .. of the source, for `count` tiles, to tiles to[0 .. count) of `dst`; the matrix must have
// been zero-filled. Returns notes. At most kTilesAtOnce tiles; any number of threads may pack different tiles.
constexpr int kTilesAtOnce = 8;
uint32_t pack_file_tiles(const FileMatrix& src, int32_t tile, int32_t count, const Matrix& dst, const int32_t* to);

}  // namespace lmdeploy
