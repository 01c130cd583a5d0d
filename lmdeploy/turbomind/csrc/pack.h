// Moves weights from rows of codes into the tile layout of kernels/table.h, and back.
//
// Knows layouts; knows nothing of files, models or who owns the memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace lmdeploy {

// 16-bit floats: no groups, no scales.
inline bool is_dense(WeightKind kind) { return kind == kBf16 || kind == kFp16; }

// Rows of a weight as files hold them. codes: u8 0..15 (W4), int8 (Int8), u8 (Int8Min) or the bits of 16-bit floats
// (Bf16, Fp16), [n, k] contiguous; scales, zeros and mins: [n, ceil(k / group)], fp16 bits and u8.
struct PackSource {
  WeightKind kind;
  int32_t n, k, group;
  const void* codes;
  const uint16_t* scales;
  const uint8_t* zeros;
  const uint16_t* mins;
};

// Bytes that a packed [n, k] matrix needs (a multiple of 64). Throws std::invalid_argument for an unknown group.
size_t packed_bytes(WeightKind kind, int32_t n, int32_t k, int32_t group);

// A matrix whose parts lie in `memory` (64-byte aligned, packed_bytes long).
Matrix layout_matrix(WeightKind kind, int32_t n, int32_t k, int32_t group, void* memory);

// Copies source rows [src_row, src_row + count) to channels dst_row... of `dst`, whose memory was zero-filled before
// its first rows arrive; channels never written stay zero weights. dst.group divides src.group: finer groups repeat
// the scales, which changes no weight. Channels of different tiles may be packed by different threads at once.
void pack_rows(const PackSource& src, int32_t src_row, int32_t count, const Matrix& dst, int32_t dst_row);

// The codes of one channel, [k]: u8 (W4, Int8Min), int8 (Int8) or the bits of 16-bit floats.
void unpack_codes(const Matrix& src, int32_t channel, void* codes);

}  // namespace lmdeploy
