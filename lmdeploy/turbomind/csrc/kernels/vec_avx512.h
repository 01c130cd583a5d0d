// Sixteen floats in one AVX-512 register, and what the shared kernels do with them. Included inside the instruction
// set's own namespace; vec_avx2.h offers the same names, so that the shared kernels are written once.
#pragma once

#define INLINE static inline __attribute__((always_inline))

using Vec = __m512;
using IntVec = __m512i;

// How many query rows x heads, and key tiles for so many of them, fit the registers.
constexpr int kPairs = 8;
constexpr int key_tiles(int pairs, int) { return pairs <= 4 ? 4 : 2; }
constexpr int value_vectors(int pairs) { return pairs <= 4 ? 4 : 2; }

INLINE Vec zero() { return _mm512_setzero_ps(); }
INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
// The first n < 16 values; the others are 0.
INLINE Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void store_n(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
INLINE Vec load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE float half_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
INLINE Vec load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// The second operand when either is not a number.
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a, 8); }
// a * 2^n for whole n; infinity when too large.
INLINE Vec scale2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
// value where x >= limit or x is not a number, else 0.
INLINE Vec zero_below(Vec x, float limit, Vec value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), value);
}
// x in lanes [begin, end), `other` elsewhere.
INLINE Vec keep(Vec x, int begin, int end, Vec other) {
  const uint32_t below_end = end >= 16 ? 0xffffu : end <= 0 ? 0 : (1u << end) - 1;
  const uint32_t below_begin = begin >= 16 ? 0xffffu : begin <= 0 ? 0 : (1u << begin) - 1;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below_end & ~below_begin), x);
}
INLINE uint32_t mask_ge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t mask_not_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
INLINE uint32_t mask_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

// Lanes are combined with the lane 8, then 4, 2 and 1 further on.
INLINE float reduce_add(Vec v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float reduce_max(Vec v) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float first_lane(Vec v) { return _mm512_cvtss_f32(v); }

struct Doubles {
  __m512d low, high;
};
INLINE Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
INLINE Doubles add_doubles(Doubles sum, Vec v) {
  return {_mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(v))),
          _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)))};
}
INLINE double reduce_doubles(Doubles sum) {
  double lanes[8], total = 0;
  _mm512_storeu_pd(lanes, _mm512_add_pd(sum.low, sum.high));
  for (int i = 0; i < 8; ++i) total += lanes[i];
  return total;
}

INLINE IntVec zero_ints() { return _mm512_setzero_si512(); }
INLINE IntVec to_int(Vec v) { return _mm512_cvtps_epi32(v); }
INLINE IntVec add_ints(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
INLINE int32_t reduce_ints(IntVec v) { return _mm512_reduce_add_epi32(v); }

INLINE Vec to_float(IntVec v) { return _mm512_cvtepi32_ps(v); }

// Lines of the cache: 32 words of 16 bits, from codes of 16, 8 or 4 bits. Nibbles come in bytes.
INLINE IntVec load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE IntVec load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
INLINE IntVec low_nibbles(IntVec bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi16(15)); }
INLINE IntVec high_nibbles(IntVec bytes) { return _mm512_srli_epi16(bytes, 4); }
INLINE IntVec splat_int(int32_t x) { return _mm512_set1_epi32(x); }
// sum + the products of both words of each lane.
INLINE IntVec dot_words(IntVec sum, IntVec line, IntVec pair) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(line), "v"(pair));
  return sum;
}
INLINE IntVec dot_words(IntVec sum, IntVec line, const int32_t* pair) {
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(line), "m"(*pair));
  return sum;
}
INLINE void store_shorts(int16_t* p, IntVec v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(v)); }
// Lane i of the result is lane i ^ S.
template <int S>
INLINE Vec swap_lanes(Vec v) {
  if (S == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);
  if (S == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  return _mm512_permute_ps(v, S == 2 ? 0x4e : 0xb1);
}

// Sixteen int32 within int8 as four pieces of 4 bytes, `stride` bytes apart.
INLINE void store_dwords(IntVec v, int8_t* out, int stride) {
  const __m128i bytes = _mm512_cvtepi32_epi8(v);
  const int32_t words[4] = {_mm_extract_epi32(bytes, 0), _mm_extract_epi32(bytes, 1), _mm_extract_epi32(bytes, 2),
                            _mm_extract_epi32(bytes, 3)};
  for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * stride, &words[i], 4);
}
// Planes of v = 128 * high + low.
INLINE IntVec high_plane(IntVec v) { return _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(64)), 7); }
INLINE IntVec low_plane(IntVec v, IntVec high) { return _mm512_sub_epi32(v, _mm512_slli_epi32(high, 7)); }

// The nearest bfloat16 of 16 values, two in each of the 8 words.
INLINE void round_bf16(Vec v, uint32_t* words) { _mm256_storeu_si256((__m256i*)words, (__m256i)_mm512_cvtneps_pbh(v)); }
// Splits 16 values into bfloat16 planes hi + lo, two values in each of the 8 words.
INLINE void split_bf16(Vec v, uint32_t* hi, uint32_t* lo) {
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(v);
  const Vec rest = sub(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
  _mm256_storeu_si256((__m256i*)hi, high);
  _mm256_storeu_si256((__m256i*)lo, (__m256i)_mm512_cvtneps_pbh(rest));
}

// Rows that share a weight in float products, and chains of sums for each.
constexpr int kDenseRows = 8, kDenseChains = 2;

// A line of bfloat16 weights, 16 channels x 2 inputs, as floats.
INLINE void load_bf16_pair(const uint8_t* line, Vec& even, Vec& odd) {
  const __m512i v = _mm512_loadu_si512(line);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
