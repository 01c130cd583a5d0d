// Sixteen floats in four NEON registers, with the names of vec_avx512.h. Included inside the instruction set's own
// namespace.
#pragma once

#define INLINE static inline __attribute__((always_inline))

struct Vec {
  float32x4_t v[4];
};
struct IntVec {
  int32x4_t v[4];
};

constexpr int kPairs = 4;
constexpr int key_tiles(int, int) { return 1; }
constexpr int value_vectors(int) { return 1; }

template <typename F>
INLINE Vec each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <typename F>
INLINE IntVec each_int(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

INLINE Vec splat(float x) {
  return each([=](int) { return vdupq_n_f32(x); });
}
INLINE Vec zero() { return splat(0.0f); }
INLINE Vec load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
INLINE void store(float* p, Vec x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
INLINE Vec load_n(const float* p, int n) {
  float values[16] = {};
  __builtin_memcpy(values, p, static_cast<size_t>(n) * 4);
  return load(values);
}
INLINE void store_n(float* p, Vec x, int n) {
  float values[16];
  store(values, x);
  __builtin_memcpy(p, values, static_cast<size_t>(n) * 4);
}
INLINE Vec load_half(const uint16_t* p) {
  return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
INLINE Vec load_bf16(const uint16_t* p) {
  return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
INLINE float half_to_float(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }

INLINE Vec add(Vec x, Vec y) {
  return each([=](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
INLINE Vec sub(Vec x, Vec y) {
  return each([=](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
INLINE Vec mul(Vec x, Vec y) {
  return each([=](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
INLINE Vec div(Vec x, Vec y) {
  return each([=](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
INLINE Vec fma(Vec x, Vec y, Vec z) {
  return each([=](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
INLINE Vec fnma(Vec x, Vec y, Vec z) {
  return each([=](int i) { return vfmsq_f32(z.v[i], x.v[i], y.v[i]); });
}
// As on x86, and unlike VMAX and VMIN: the second operand when either is not a number.
INLINE Vec max(Vec x, Vec y) {
  return each([=](int i) { return vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
INLINE Vec min(Vec x, Vec y) {
  return each([=](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
INLINE Vec abs(Vec x) {
  return each([=](int i) { return vabsq_f32(x.v[i]); });
}
INLINE Vec round(Vec x) {
  return each([=](int i) { return vrndnq_f32(x.v[i]); });
}
INLINE float32x4_t power2(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
// In two steps, since 2^n itself may lie outside the range of float.
INLINE Vec scale2(Vec x, Vec n) {
  return each([=](int i) {
    const int32x4_t whole = vcvtnq_s32_f32(n.v[i]), part = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(x.v[i], power2(part)), power2(vsubq_s32(whole, part)));
  });
}
INLINE Vec zero_below(Vec x, float limit, Vec value) {
  return each([=](int i) {
    const uint32x4_t below = vcltq_f32(x.v[i], vdupq_n_f32(limit));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value.v[i]), below));
  });
}
INLINE Vec keep(Vec x, int begin, int end, Vec other) {
  const int32_t steps[4] = {0, 1, 2, 3};
  return each([=](int i) {
    const int32x4_t lanes = vaddq_s32(vld1q_s32(steps), vdupq_n_s32(4 * i));
    const uint32x4_t inside = vandq_u32(vcgeq_s32(lanes, vdupq_n_s32(begin)), vcltq_s32(lanes, vdupq_n_s32(end)));
    return vbslq_f32(inside, x.v[i], other.v[i]);
  });
}
INLINE uint32_t bits(uint32x4_t mask, int at) {
  const uint32_t ones[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, vld1q_u32(ones))) << at;
}
template <typename F>
INLINE uint32_t join(F f) {
  return bits(f(0), 0) | bits(f(1), 4) | bits(f(2), 8) | bits(f(3), 12);
}
INLINE uint32_t mask_ge(Vec x, Vec y) {
  return join([=](int i) { return vcgeq_f32(x.v[i], y.v[i]); });
}
INLINE uint32_t mask_not_less(Vec x, Vec y) {
  return join([=](int i) { return vmvnq_u32(vcltq_f32(x.v[i], y.v[i])); });
}
INLINE uint32_t mask_nan(Vec x) {
  return join([=](int i) { return vmvnq_u32(vceqq_f32(x.v[i], x.v[i])); });
}

INLINE float reduce_add(Vec x) {
  const float32x4_t a = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
INLINE float reduce_max(Vec x) {
  const Vec half = max({{x.v[0], x.v[1], x.v[0], x.v[1]}}, {{x.v[2], x.v[3], x.v[2], x.v[3]}});
  float lanes[8];
  vst1q_f32(lanes, half.v[0]);
  vst1q_f32(lanes + 4, half.v[1]);
  float largest = lanes[0];
  for (int i = 1; i < 8; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}
INLINE float first_lane(Vec x) { return vgetq_lane_f32(x.v[0], 0); }

struct Doubles {
  float64x2_t v[8];
};
INLINE Doubles zero_doubles() {
  const float64x2_t z = vdupq_n_f64(0);
  return {{z, z, z, z, z, z, z, z}};
}
INLINE Doubles add_doubles(Doubles sum, Vec x) {
  for (int i = 0; i < 4; ++i) {
    sum.v[2 * i] = vaddq_f64(sum.v[2 * i], vcvt_f64_f32(vget_low_f32(x.v[i])));
    sum.v[2 * i + 1] = vaddq_f64(sum.v[2 * i + 1], vcvt_high_f64_f32(x.v[i]));
  }
  return sum;
}
INLINE double reduce_doubles(Doubles sum) {
  double lanes[8], total = 0;
  for (int i = 0; i < 4; ++i) vst1q_f64(lanes + 2 * i, vaddq_f64(sum.v[i], sum.v[i + 4]));
  for (int i = 0; i < 8; ++i) total += lanes[i];
  return total;
}

INLINE IntVec zero_ints() {
  return each_int([](int) { return vdupq_n_s32(0); });
}
INLINE IntVec to_int(Vec x) {
  return each_int([=](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
INLINE IntVec add_ints(IntVec x, IntVec y) {
  return each_int([=](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
INLINE int32_t reduce_ints(IntVec x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}

INLINE Vec to_float(IntVec x) {
  return each([=](int i) { return vcvtq_f32_s32(x.v[i]); });
}

// Lines of the cache: 32 words of 16 bits, from codes of 16, 8 or 4 bits. Nibbles come in bytes.
template <typename F>
INLINE IntVec each_words(F f) {
  return each_int([=](int i) { return vreinterpretq_s32_u16(f(i)); });
}
INLINE uint16x8_t words(int32x4_t x) { return vreinterpretq_u16_s32(x); }
INLINE IntVec load_words(const uint8_t* p) {
  return each_words([=](int i) { return vreinterpretq_u16_u8(vld1q_u8(p + 16 * i)); });
}
INLINE IntVec load_bytes(const uint8_t* p) {
  return each_words([=](int i) { return vmovl_u8(vld1_u8(p + 8 * i)); });
}
INLINE IntVec low_nibbles(IntVec bytes) {
  return each_words([=](int i) { return vandq_u16(words(bytes.v[i]), vdupq_n_u16(15)); });
}
INLINE IntVec high_nibbles(IntVec bytes) {
  return each_words([=](int i) { return vshrq_n_u16(words(bytes.v[i]), 4); });
}
INLINE IntVec splat_int(int32_t x) {
  return each_int([=](int) { return vdupq_n_s32(x); });
}
// sum + the products of both words of each lane.
INLINE IntVec dot_words(IntVec sum, IntVec line, IntVec pair) {
  return each_int([=](int i) {
    const int16x8_t x = vreinterpretq_s16_s32(line.v[i]), y = vreinterpretq_s16_s32(pair.v[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return vaddq_s32(sum.v[i], vpaddq_s32(low, vmull_high_s16(x, y)));
  });
}
INLINE IntVec dot_words(IntVec sum, IntVec line, const int32_t* pair) { return dot_words(sum, line, splat_int(*pair)); }
INLINE void store_shorts(int16_t* p, IntVec x) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vqmovn_s32(x.v[i]));
}
// Lane i of the result is lane i ^ S.
template <int S>
INLINE Vec swap_lanes(Vec x) {
  if (S == 8) return {{x.v[2], x.v[3], x.v[0], x.v[1]}};
  if (S == 4) return {{x.v[1], x.v[0], x.v[3], x.v[2]}};
  return each([=](int i) { return S == 2 ? vextq_f32(x.v[i], x.v[i], 2) : vrev64q_f32(x.v[i]); });
}

// Sixteen int32 within int8 as four pieces of 4 bytes, `stride` bytes apart.
INLINE void store_dwords(IntVec x, int8_t* out, int stride) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  int8_t bytes[16];
  vst1q_s8(bytes, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * stride, bytes + 4 * i, 4);
}
// Planes of x = 128 * high + low.
INLINE IntVec high_plane(IntVec x) {
  return each_int([=](int i) { return vshrq_n_s32(vaddq_s32(x.v[i], vdupq_n_s32(64)), 7); });
}
INLINE IntVec low_plane(IntVec x, IntVec high) {
  return each_int([=](int i) { return vsubq_s32(x.v[i], vshlq_n_s32(high.v[i], 7)); });
}

// The nearest bfloat16 of each lane, still as float.
INLINE float32x4_t to_bf16(float32x4_t x) {
  const uint32x4_t raw = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(raw, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(raw, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(raw, vdupq_n_u32(0x400000));
  const uint32x4_t any = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
  return vreinterpretq_f32_u32(vandq_u32(any, vdupq_n_u32(0xffff0000)));
}
INLINE void store_upper(Vec x, uint32_t* out) {
  for (int i = 0; i < 4; ++i)
    vst1_u16(reinterpret_cast<uint16_t*>(out) + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(x.v[i]), 16));
}
INLINE void round_bf16(Vec x, uint32_t* words) {
  store_upper(each([=](int i) { return to_bf16(x.v[i]); }), words);
}
INLINE void split_bf16(Vec x, uint32_t* hi, uint32_t* lo) {
  const Vec high = each([=](int i) { return to_bf16(x.v[i]); }), rest = sub(x, high);
  store_upper(high, hi);
  store_upper(each([=](int i) { return to_bf16(rest.v[i]); }), lo);
}
