#include "sources.h"

#include <algorithm>
#include <cstring>

#include "source_blocks.h"

namespace lmdeploy {
namespace {

constexpr int kAtOnce = 128;  // inputs of a row: 16 rows of them fill lines that stay in the first cache

int inputs_per_line(WeightKind kind) {
  return kind == kW4Zero || kind == kW4Min ? 8 : kind == kBf16 || kind == kFp16 ? 2 : 4;
}

uint8_t* tile_lines(const Matrix& m, int tile) {
  return const_cast<uint8_t*>(m.lines) + size_t(tile) * (m.k_padded / inputs_per_line(m.kind)) * kLine;
}

const uint8_t* row_at(const FileMatrix& src, int row) {
  return src.data + src.stride * (src.rows != nullptr ? src.rows[row] : row);
}

// Parameters of one block's groups for one channel, from group `first` of the packed matrix on; `finer` of its groups
// share one of the source's.
void put_scales(const Matrix& dst, int tile, int lane, int first, int finer, int groups, const uint16_t* scales,
                const uint16_t* mins) {
  const size_t at = (size_t(tile) * dst.groups + first) * kTile + lane;
  auto* out = const_cast<uint16_t*>(dst.scales) + at;
  auto* low = dst.mins == nullptr ? nullptr : const_cast<uint16_t*>(dst.mins) + at;
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < finer; ++i, out += kTile) {
      *out = scales[g];
      if (low != nullptr) {
        *low = mins[g];
        low += kTile;
      }
    }
  }
}

// Of Q4_0, the only block kind with zeros.
void put_zeros(const Matrix& dst, int tile, int count) {
  auto* at = const_cast<uint8_t*>(dst.zeros) + size_t(tile) * dst.groups * kTile;
  for (int g = 0; g < dst.groups; ++g) std::memset(at + g * kTile, 8, count);
}

template <class Block>
uint32_t pack_blocks(const FileMatrix& src, int row, int count, const Matrix& dst, int tile) {
  const int per_line = inputs_per_line(dst.kind), finer = src.group / dst.group;
  const size_t block_lines = size_t(Block::kInputs / per_line) * kLine;
  uint8_t* const lines = tile_lines(dst, tile);
  uint32_t notes = 0;
  uint16_t scales[16] = {}, mins[16] = {};
  if (dst.zeros != nullptr) put_zeros(dst, tile, count);
  // 16 rows of a few blocks at a time: their lines stay in the first cache while lanes are filled one by one.
  const int blocks = src.k / Block::kInputs, step = 256 / Block::kInputs;
  for (int begin = 0; begin < blocks; begin += step) {
    const int end = std::min(begin + step, blocks);
    for (int lane = 0; lane < count; ++lane) {
      const uint8_t* at = row_at(src, row + lane) + size_t(begin) * Block::kBytes;
      uint8_t* out = lines + begin * block_lines + lane * 4;
      for (int block = begin; block < end; ++block, at += Block::kBytes, out += block_lines) {
        Block::codes(at, out);
        notes |= Block::scales(at, scales, mins);
        put_scales(dst, tile, lane, block * Block::kGroups * finer, finer, Block::kGroups, scales, mins);
      }
    }
  }
  return notes;
}

// Values as 16 bits of the packed kind; returns bits that it does not have. What is infinite or no number stays so.
struct FromBf16 {
  static constexpr int kBytes = 2, kLane = 4;
  static constexpr uint32_t kExponent = 0x7F80u;
  static uint32_t convert(const uint8_t* at, int count, uint16_t* out) {
    std::memcpy(out, at, size_t(count) * 2);
    return 0;
  }
};
struct FromF16 {  // kept as they are
  static constexpr int kBytes = 2, kLane = 2;
  static constexpr uint32_t kExponent = 0x7C00u;
  static uint32_t convert(const uint8_t* at, int count, uint16_t* out) { return FromBf16::convert(at, count, out); }
};
struct FromF32 {
  static constexpr int kBytes = 4, kLane = 4;
  static constexpr uint32_t kExponent = 0x7F80u;
  static uint32_t convert(const uint8_t* at, int count, uint16_t* out) {
    uint32_t values[kAtOnce], lost = 0;
    std::memcpy(values, at, size_t(count) * 4);
    for (int i = 0; i < count; ++i) {
      uint32_t bits = values[i], endless = (bits & 0x7F800000u) == 0x7F800000u ? 0x7F80u : 0u;
      lost |= bits;
      out[i] = static_cast<uint16_t>(float_to_bf16(bits) | endless);
    }
    return lost & 0xFFFFu;
  }
};

// `count` inputs, at most kAtOnce; notes.
template <class From>
uint32_t float_lanes(const uint8_t* at, int count, uint8_t* out) {
  uint16_t values[kAtOnce + 1] = {};
  uint32_t notes = From::convert(at, count, values) != 0 ? kRounded : 0u, endless = 0;
  for (int i = 0; i < count; ++i) endless |= (values[i] & From::kExponent) + (From::kExponent & (0u - From::kExponent));
  for (int i = 0; i < count; i += 2, out += kLine) {
    if (From::kLane == 4) {
      std::memcpy(out, values + i, 4);
    } else {  // a half line for each input
      std::memcpy(out, values + i, 2);
      std::memcpy(out + kLine / 2, values + i + 1, 2);
    }
  }
  return notes | ((endless & 0x8000u) != 0 ? kNotFinite : 0u);
}

template <class From>
uint32_t pack_floats(const FileMatrix& src, int row, int count, const Matrix& dst, int tile) {
  uint32_t notes = 0;
  uint8_t* out = tile_lines(dst, tile);
  for (int begin = 0; begin < src.k; begin += kAtOnce) {
    const int some = std::min(kAtOnce, src.k - begin);
    for (int lane = 0; lane < count; ++lane) {
      const uint8_t* at = row_at(src, row + lane) + size_t(begin) * From::kBytes;
      notes |= float_lanes<From>(at, some, out + begin / 2 * kLine + lane * From::kLane);
    }
  }
  return notes;
}

// Words along the inputs of a row; the codes of 8 bits are kept as they are (q + 128).
template <int Bits, uint32_t Flip = 0>
void pack_words(const FileMatrix& src, int row, int count, const Matrix& dst, int tile) {
  constexpr int kStep = 64;
  const int lines = src.k * Bits / 32;
  uint8_t* out = tile_lines(dst, tile);
  for (int begin = 0; begin < lines; begin += kStep) {
    const int end = std::min(begin + kStep, lines);
    for (int lane = 0; lane < count; ++lane) {
      const uint8_t* at = row_at(src, row + lane) + size_t(begin) * 4;
      for (int line = begin; line < end; ++line, at += 4) {
        store32(out + line * kLine + lane * 4, Bits == 4 ? lane_of_word(load32(at)) : load32(at) ^ Flip);
      }
    }
  }
}

// One word of 4-bit codes per channel and 8 inputs (or of 8 bits and 4 inputs): a tile's words are a line but for the
// order of the codes.
template <int Bits>
void pack_gptq(const FileMatrix& src, int tile, int count, const Matrix& dst, const int32_t* to) {
  const int lines = src.k * Bits / 32;
  for (int line = 0; line < lines; ++line) {
    for (int i = 0; i < count; ++i) {
      const int channels = std::min(kTile, src.n - (tile + i) * kTile);
      const uint8_t* at = src.data + src.stride * line + size_t(tile + i) * kTile * 4;
      uint8_t* out = tile_lines(dst, to[i]) + size_t(line) * kLine;
      for (int c = 0; c < channels; ++c) {
        store32(out + 4 * c, Bits == 4 ? lane_of_word(load32(at + 4 * c)) : load32(at + 4 * c));
      }
    }
  }
}

// Bytes b of four words -> word b.
void turn4(const uint32_t* in, uint32_t* out) {
  uint32_t low01 = (in[0] & 0x00FF00FFu) | (in[1] & 0x00FF00FFu) << 8;
  uint32_t high01 = (in[0] >> 8 & 0x00FF00FFu) | (in[1] & 0xFF00FF00u);
  uint32_t low23 = (in[2] & 0x00FF00FFu) | (in[3] & 0x00FF00FFu) << 8;
  uint32_t high23 = (in[2] >> 8 & 0x00FF00FFu) | (in[3] & 0xFF00FF00u);
  out[0] = (low01 & 0xFFFFu) | low23 << 16;
  out[1] = (high01 & 0xFFFFu) | high23 << 16;
  out[2] = low01 >> 16 | (low23 & 0xFFFF0000u);
  out[3] = high01 >> 16 | (high23 & 0xFFFF0000u);
}

// A word holds channels 0 2 4 6 1 3 5 7 of one input; eight of them, below each other, become eight lanes.
void awq_lanes(const uint8_t* at, size_t stride, uint8_t* out) {
  uint32_t even[4], odd[4], lanes[4];
  for (int b = 0; b < 4; ++b) {
    uint32_t near = load32(at + stride * b), far = load32(at + stride * (b + 4));
    even[b] = (near & kLow) | (far & kLow) << 4;  // channels 0 4 1 5
    odd[b] = (near >> 4 & kLow) | (far & ~kLow);  // channels 2 6 3 7
  }
  turn4(even, lanes);
  store32(out, lanes[0]);
  store32(out + 16, lanes[1]);
  store32(out + 4, lanes[2]);
  store32(out + 20, lanes[3]);
  turn4(odd, lanes);
  store32(out + 8, lanes[0]);
  store32(out + 24, lanes[1]);
  store32(out + 12, lanes[2]);
  store32(out + 28, lanes[3]);
}

void pack_awq(const FileMatrix& src, int tile, int count, const Matrix& dst, const int32_t* to) {
  for (int line = 0; line < src.k / 8; ++line) {
    const uint8_t* row = src.data + src.stride * line * 8;
    for (int i = 0; i < count; ++i) {
      uint8_t* out = tile_lines(dst, to[i]) + size_t(line) * kLine;
      const int words = std::min(2, src.n / 8 - (tile + i) * 2);
      for (int w = 0; w < words; ++w) awq_lanes(row + size_t((tile + i) * 2 + w) * 4, src.stride, out + 32 * w);
    }
  }
}

// Scales and zeros that come beside the codes.
void pack_groups(const FileMatrix& src, int row, int count, const Matrix& dst, int tile) {
  const int src_groups = (src.k + src.group - 1) / src.group;
  for (int g = 0; g < dst.groups; ++g) {
    const size_t out = (size_t(tile) * dst.groups + g) * kTile;
    for (int lane = 0; lane < count; ++lane) {
      const size_t in = size_t(row + lane) * src_groups + g * dst.group / src.group;
      const_cast<uint16_t*>(dst.scales)[out + lane] = src.scales[in];
      if (dst.zeros != nullptr) const_cast<uint8_t*>(dst.zeros)[out + lane] = src.zeros[in];
    }
  }
}

uint32_t pack_row_tile(const FileMatrix& src, int row, int count, const Matrix& dst, int tile) {
  switch (src.form) {
    case kRowsQ4_0:
      return pack_blocks<Q4_0>(src, row, count, dst, tile);
    case kRowsQ4_1:
      return pack_blocks<Q4_1>(src, row, count, dst, tile);
    case kRowsQ5_0:
      return pack_blocks<Q5_0>(src, row, count, dst, tile);
    case kRowsQ5_1:
      return pack_blocks<Q5_1>(src, row, count, dst, tile);
    case kRowsQ8_0:
      return pack_blocks<Q8_0>(src, row, count, dst, tile);
    case kRowsQ4K:
      return pack_blocks<Q4K>(src, row, count, dst, tile);
    case kRowsQ5K:
      return pack_blocks<Q5K>(src, row, count, dst, tile);
    case kRowsQ6K:
      return pack_blocks<Q6K>(src, row, count, dst, tile);
    case kRowsBf16:
      return pack_floats<FromBf16>(src, row, count, dst, tile);
    case kRowsF16:
      return pack_floats<FromF16>(src, row, count, dst, tile);
    case kRowsF32:
      return pack_floats<FromF32>(src, row, count, dst, tile);
    case kRowsWords4:
      pack_words<4>(src, row, count, dst, tile);
      return 0;
    case kRowsInt8:
      pack_words<8, 0x80808080u>(src, row, count, dst, tile);
      return 0;
    default:
      pack_words<8>(src, row, count, dst, tile);
      return 0;
  }
}

}  // namespace

bool by_inputs(SourceForm form) { return form >= kInputsAwq; }

WeightKind packed_kind(SourceForm form) {
  switch (form) {
    case kRowsQ4_1:
    case kRowsQ4K:
      return kW4Min;
    case kRowsQ5_1:
    case kRowsQ5K:
      return kInt8Min;
    case kRowsQ5_0:
    case kRowsQ8_0:
    case kRowsQ6K:
    case kRowsWords8:
    case kRowsInt8:
    case kInputsGptq8:
      return kInt8;
    case kRowsF16:
      return kFp16;
    case kRowsBf16:
    case kRowsF32:
      return kBf16;
    default:
      return kW4Zero;
  }
}

size_t row_bytes(SourceForm form, int32_t k) {
  size_t inputs = static_cast<size_t>(k);
  switch (form) {
    case kRowsQ4_0:
      return inputs / 32 * Q4_0::kBytes;
    case kRowsQ4_1:
      return inputs / 32 * Q4_1::kBytes;
    case kRowsQ5_0:
      return inputs / 32 * Q5_0::kBytes;
    case kRowsQ5_1:
      return inputs / 32 * Q5_1::kBytes;
    case kRowsQ8_0:
      return inputs / 32 * Q8_0::kBytes;
    case kRowsQ4K:
      return inputs / 256 * Q4K::kBytes;
    case kRowsQ5K:
      return inputs / 256 * Q5K::kBytes;
    case kRowsQ6K:
      return inputs / 256 * Q6K::kBytes;
    case kRowsWords4:
      return inputs / 2;
    case kRowsWords8:
    case kRowsInt8:
      return inputs;
    case kRowsF32:
      return inputs * 4;
    default:
      return inputs * 2;
  }
}

uint32_t pack_file_tiles(const FileMatrix& src, int32_t tile, int32_t count, const Matrix& dst, const int32_t* to) {
  uint32_t notes = 0;
  if (src.form == kInputsAwq) pack_awq(src, tile, count, dst, to);
  if (src.form == kInputsGptq4) pack_gptq<4>(src, tile, count, dst, to);
  if (src.form == kInputsGptq8) pack_gptq<8>(src, tile, count, dst, to);
  for (int i = 0; i < count; ++i) {
    const int row = (tile + i) * kTile, rows = std::min(kTile, src.n - row);
    if (!by_inputs(src.form)) notes |= pack_row_tile(src, row, rows, dst, to[i]);
    if (src.scales != nullptr) pack_groups(src, row, rows, dst, to[i]);
  }
  return notes;
}

}  // namespace lmdeploy
