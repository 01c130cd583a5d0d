// The blocks of GGUF kinds and other small forms, as lanes of the packed layout. Included by sources.cpp alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sources.h"

namespace lmdeploy {
namespace {

constexpr size_t kLine = 64;
constexpr uint32_t kLow = 0x0F0F0F0Fu;

inline uint32_t load32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return value;
}
inline uint16_t load16(const uint8_t* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}
inline void store32(uint8_t* at, uint32_t value) { std::memcpy(at, &value, 4); }
inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Exact for finite numbers; infinity and NaN become large numbers, so they are looked for before. Without branches and
// without subnormal operands, which are slow.
inline float half_to_float(uint32_t half) {
  constexpr uint32_t kLeast = 0x38800000u;  // 2^-14, the least normal float16
  uint32_t size = (half & 0x7FFFu) << 13;
  uint32_t normal = size + 0x38000000u, small = as_bits(as_float(size | kLeast) - as_float(kLeast));
  uint32_t is_small = 0u - static_cast<uint32_t>(size < 0x00800000u);
  return as_float((small & is_small) | (normal & ~is_small) | (half & 0x8000u) << 16);
}
inline bool half_is_finite(uint16_t half) { return (half & 0x7C00u) != 0x7C00u; }

// Rounded to nearest even. Without branches, so that loops over it become vector code.
inline uint32_t float_to_half(float value) {
  constexpr uint32_t kMagic = 0x3F000000u;
  uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  uint32_t usual = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1)) >> 13;
  uint32_t small = as_bits(as_float(size) + as_float(kMagic)) - kMagic;  // the sum drops what a float16 cannot hold
  uint32_t half = size < 0x38800000u ? small : usual;                    // below 2^-14
  return sign | (size >= 0x47800000u ? 0x7C00u : half);                  // 65536 and above, and what is no number
}

// Returns notes.
template <int N>
uint32_t floats_to_halves(const float* values, uint16_t* halves) {
  uint32_t endless = 0, rounded = 0, bits[N];
  for (int i = 0; i < N; ++i) bits[i] = float_to_half(values[i]);
  for (int i = 0; i < N; ++i) endless |= (bits[i] & 0x7C00u) + 0x0400u;
  for (int i = 0; i < N; ++i) rounded |= as_bits(half_to_float(bits[i])) ^ as_bits(values[i]);
  for (int i = 0; i < N; ++i) halves[i] = static_cast<uint16_t>(bits[i]);
  return ((endless & 0x8000u) != 0 ? kNotFinite : 0u) | (rounded != 0 ? kRoundedScales : 0u);
}

// bfloat16 bits, rounded to nearest even.
inline uint32_t float_to_bf16(uint32_t bits) { return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16; }

// Eight codes of 4 bits in a word, inputs from the lowest bits on -> a lane: input b in the low, 4 + b in the high half
// of byte b.
uint32_t lane_of_word(uint32_t word) {
  uint32_t low = word & 0xFFFFu, high = word >> 16;
  low = (low | low << 8) & 0x00FF00FFu;
  high = (high | high << 8) & 0x00FF00FFu;
  return ((low | low << 4) & kLow) | ((high | high << 4) & kLow) << 4;
}

// Bits 0..3 -> bit 4 of bytes 0..3.
uint32_t fifth_bits(uint32_t bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// Sixteen bytes with inputs i in the low and 16 + i in the high halves -> four W4 lanes.
void nibbles16(const uint8_t* codes, uint8_t* out) {
  for (int half = 0; half < 2; ++half) {
    uint32_t first = load32(codes + 8 * half), second = load32(codes + 8 * half + 4);
    store32(out + half * kLine, (first & kLow) | (second & kLow) << 4);
    store32(out + (2 + half) * kLine, (first >> 4 & kLow) | (second & ~kLow));
  }
}

// What a block of a GGUF kind holds: `codes` writes one lane of each line, `scales` the groups' parameters as float16
// bits. Each returns notes.
struct Q4_0 {
  static constexpr int kInputs = 32, kBytes = 18, kGroups = 1;
  static void codes(const uint8_t* block, uint8_t* out) { nibbles16(block + 2, out); }
  static uint32_t scales(const uint8_t* block, uint16_t* scale, uint16_t*) {
    *scale = load16(block);
    return half_is_finite(*scale) ? 0u : kNotFinite;
  }
};

uint32_t scale_and_min(const uint8_t* block, uint16_t* scale, uint16_t* min) {
  *scale = load16(block);
  *min = load16(block + 2);
  return half_is_finite(*scale) && half_is_finite(*min) ? 0u : kNotFinite;
}

struct Q4_1 {
  static constexpr int kInputs = 32, kBytes = 20, kGroups = 1;
  static void codes(const uint8_t* block, uint8_t* out) { nibbles16(block + 4, out); }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return scale_and_min(block, s, m); }
};

// `offset` is added to each code (no byte overflows).
void five_bits(const uint8_t* high, const uint8_t* low, uint32_t offset, uint8_t* out) {
  uint32_t fifth = load32(high);
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs = load32(low + 4 * i);
    store32(out + i * kLine, ((pairs & kLow) | fifth_bits(fifth >> 4 * i)) + offset);
    store32(out + (4 + i) * kLine, ((pairs >> 4 & kLow) | fifth_bits(fifth >> (16 + 4 * i))) + offset);
  }
}

struct Q5_0 {
  static constexpr int kInputs = 32, kBytes = 22, kGroups = 1;
  // q - 16 as int8 is kept as q - 16 + 128.
  static void codes(const uint8_t* block, uint8_t* out) { five_bits(block + 2, block + 6, 0x70707070u, out); }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return Q4_0::scales(block, s, m); }
};

struct Q5_1 {
  static constexpr int kInputs = 32, kBytes = 24, kGroups = 1;
  static void codes(const uint8_t* block, uint8_t* out) { five_bits(block + 4, block + 8, 0, out); }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return scale_and_min(block, s, m); }
};

struct Q8_0 {
  static constexpr int kInputs = 32, kBytes = 34, kGroups = 1;
  static void codes(const uint8_t* block, uint8_t* out) {
    for (int i = 0; i < 8; ++i) store32(out + i * kLine, load32(block + 2 + 4 * i) ^ 0x80808080u);
  }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return Q4_0::scales(block, s, m); }
};

// Scales and minima of Q4_K and Q5_K: two float16 factors, then eight 6-bit scales and eight 6-bit minima in 12 bytes.
uint32_t k_scales(const uint8_t* block, uint16_t* scales, uint16_t* mins) {
  uint16_t factor = load16(block), min_factor = load16(block + 2);
  if (!half_is_finite(factor) || !half_is_finite(min_factor)) return kNotFinite;
  float d = half_to_float(factor), m = half_to_float(min_factor), s[8], t[8];
  const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
  for (int i = 0; i < 4; ++i) {
    s[i] = d * static_cast<float>(first[i] & 63);
    s[4 + i] = d * static_cast<float>((third[i] & 15) | first[i] >> 6 << 4);
    t[i] = -(m * static_cast<float>(second[i] & 63));
    t[4 + i] = -(m * static_cast<float>(third[i] >> 4 | second[i] >> 6 << 4));
  }
  return floats_to_halves<8>(s, scales) | floats_to_halves<8>(t, mins);
}

struct Q4K {
  static constexpr int kInputs = 256, kBytes = 144, kGroups = 8;
  static void codes(const uint8_t* block, uint8_t* out) {
    for (int pair = 0; pair < 4; ++pair) {  // 32 bytes: one group in the low, the next in the high halves
      const uint8_t* bytes = block + 16 + 32 * pair;
      uint8_t* lanes = out + 8 * pair * kLine;
      for (int i = 0; i < 4; ++i) {
        uint32_t first = load32(bytes + 8 * i), second = load32(bytes + 8 * i + 4);
        store32(lanes + i * kLine, (first & kLow) | (second & kLow) << 4);
        store32(lanes + (4 + i) * kLine, (first >> 4 & kLow) | (second & ~kLow));
      }
    }
  }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return k_scales(block, s, m); }
};

struct Q5K {
  static constexpr int kInputs = 256, kBytes = 176, kGroups = 8;
  static void codes(const uint8_t* block, uint8_t* out) {
    for (int i = 0; i < 8; ++i) {
      uint32_t high = load32(block + 16 + 4 * i);  // bit j of a byte belongs to group j
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t codes = load32(block + 48 + 32 * pair + 4 * i);
        uint8_t* lane = out + (16 * pair + i) * kLine;
        store32(lane, (codes & kLow) | (high >> 2 * pair & 0x01010101u) << 4);
        store32(lane + 8 * kLine, (codes >> 4 & kLow) | (high >> (2 * pair + 1) & 0x01010101u) << 4);
      }
    }
  }
  static uint32_t scales(const uint8_t* block, uint16_t* s, uint16_t* m) { return k_scales(block, s, m); }
};

struct Q6K {
  static constexpr int kInputs = 256, kBytes = 210, kGroups = 16;
  // Halves of 128: 64 bytes with codes i and 64 + i, 32 bytes with two more bits of i, i + 32, i + 64, i + 96.
  static void codes(const uint8_t* block, uint8_t* out) {
    constexpr uint32_t kOffset = 0x60606060u;  // q - 32 + 128
    for (int i = 0; i < 16; ++i) {
      int half = i / 8, at = i % 8 * 4;
      uint32_t high = load32(block + 128 + 32 * half + at);
      uint32_t first = load32(block + 64 * half + at), second = load32(block + 64 * half + 32 + at);
      uint8_t* lane = out + (32 * half + i % 8) * kLine;
      store32(lane, ((first & kLow) | (high & 0x03030303u) << 4) + kOffset);
      store32(lane + 8 * kLine, ((second & kLow) | (high >> 2 & 0x03030303u) << 4) + kOffset);
      store32(lane + 16 * kLine, ((first >> 4 & kLow) | (high >> 4 & 0x03030303u) << 4) + kOffset);
      store32(lane + 24 * kLine, ((second >> 4 & kLow) | (high >> 6 & 0x03030303u) << 4) + kOffset);
    }
  }
  static uint32_t scales(const uint8_t* block, uint16_t* scale, uint16_t*) {
    uint16_t factor = load16(block + 208);
    if (!half_is_finite(factor)) return kNotFinite;
    float d = half_to_float(factor), s[16];
    for (int i = 0; i < 16; ++i) s[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
    return floats_to_halves<16>(s, scale);
  }
};

}  // namespace
}  // namespace lmdeploy
