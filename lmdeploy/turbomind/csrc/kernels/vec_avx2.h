// Sixteen floats in two AVX2 registers, with the names of vec_avx512.h. Included inside the instruction set's own
// namespace.
#pragma once

#define INLINE static inline __attribute__((always_inline))

struct Vec {
  __m256 a, b;
};
struct IntVec {
  __m256i a, b;
};

constexpr int kPairs = 4;
constexpr int key_tiles(int pairs, int bits) { return pairs <= 2 && bits > 4 ? 2 : 1; }
constexpr int value_vectors(int pairs) { return pairs <= 2 ? 2 : 1; }

INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
INLINE __m256i lanes_from(int at) {
  return _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(at));
}
INLINE __m256i below(__m256i lanes, int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes); }
INLINE Vec load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, below(lanes_from(0), n)), _mm256_maskload_ps(p + 8, below(lanes_from(8), n))};
}
INLINE void store_n(float* p, Vec v, int n) {
  _mm256_maskstore_ps(p, below(lanes_from(0), n), v.a);
  _mm256_maskstore_ps(p + 8, below(lanes_from(8), n), v.b);
}
INLINE Vec load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE __m256 bf16_half(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE float half_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
INLINE Vec load_bf16(const uint16_t* p) {
  return {bf16_half(_mm_loadu_si128((const __m128i*)p)), bf16_half(_mm_loadu_si128((const __m128i*)p + 1))};
}

INLINE Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE Vec fnma(Vec x, Vec y, Vec z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
INLINE Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE Vec abs(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE Vec round(Vec x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// In two steps, since 2^n itself may lie outside the range of float.
INLINE __m256 scale2_half(__m256 x, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), part = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power2(part)), power2(_mm256_sub_epi32(whole, part)));
}
INLINE Vec scale2(Vec x, Vec n) { return {scale2_half(x.a, n.a), scale2_half(x.b, n.b)}; }
INLINE Vec zero_below(Vec x, float limit, Vec value) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, bound, _CMP_NLT_UQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, bound, _CMP_NLT_UQ), value.b)};
}
INLINE __m256 keep_half(__m256 x, int at, int begin, int end, __m256 other) {
  const __m256i lanes = lanes_from(at);
  const __m256i inside = _mm256_andnot_si256(below(lanes, begin), below(lanes, end));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}
INLINE Vec keep(Vec x, int begin, int end, Vec other) {
  return {keep_half(x.a, 0, begin, end, other.a), keep_half(x.b, 8, begin, end, other.b)};
}
INLINE uint32_t join(__m256 a, __m256 b) { return _mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8; }
INLINE uint32_t mask_ge(Vec x, Vec y) {
  return join(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
INLINE uint32_t mask_not_less(Vec x, Vec y) {
  return join(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), _mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ));
}
INLINE uint32_t mask_nan(Vec x) {
  return join(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
}

INLINE float reduce_add(Vec v) {
  __m256 a = _mm256_add_ps(v.a, v.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float reduce_max(Vec v) {
  __m256 a = _mm256_max_ps(v.a, v.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float first_lane(Vec v) { return _mm256_cvtss_f32(v.a); }

struct Doubles {
  __m256d v[4];
};
INLINE Doubles zero_doubles() {
  const __m256d z = _mm256_setzero_pd();
  return {{z, z, z, z}};
}
INLINE Doubles add_doubles(Doubles sum, Vec x) {
  return {{_mm256_add_pd(sum.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a))),
           _mm256_add_pd(sum.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1))),
           _mm256_add_pd(sum.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b))),
           _mm256_add_pd(sum.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)))}};
}
INLINE double reduce_doubles(Doubles sum) {
  double low[4], high[4], total = 0;
  _mm256_storeu_pd(low, _mm256_add_pd(sum.v[0], sum.v[2]));
  _mm256_storeu_pd(high, _mm256_add_pd(sum.v[1], sum.v[3]));
  for (int i = 0; i < 4; ++i) total += low[i];
  for (int i = 0; i < 4; ++i) total += high[i];
  return total;
}

INLINE IntVec zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE IntVec to_int(Vec v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
INLINE IntVec add_ints(IntVec x, IntVec y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE int32_t reduce_ints(IntVec v) {
  const __m256i a = _mm256_add_epi32(v.a, v.b);
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_unpackhi_epi64(b, b));
  return _mm_cvtsi128_si32(b) + _mm_extract_epi32(b, 1);
}

INLINE Vec to_float(IntVec v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }

// Lines of the cache: 32 words of 16 bits, from codes of 16, 8 or 4 bits. Nibbles come in bytes.
INLINE IntVec load_words(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE IntVec load_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE IntVec low_nibbles(IntVec bytes) {
  const __m256i mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(bytes.a, mask), _mm256_and_si256(bytes.b, mask)};
}
INLINE IntVec high_nibbles(IntVec bytes) { return {_mm256_srli_epi16(bytes.a, 4), _mm256_srli_epi16(bytes.b, 4)}; }
INLINE IntVec splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
// sum + the products of both words of each lane.
INLINE __m256i dot_half(__m256i sum, __m256i line, __m256i pair) {
  __m256i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(line), "x"(pair));
  return sum;
}
INLINE IntVec dot_words(IntVec sum, IntVec line, IntVec pair) {
  return {dot_half(sum.a, line.a, pair.a), dot_half(sum.b, line.b, pair.a)};
}
INLINE IntVec dot_words(IntVec sum, IntVec line, const int32_t* pair) { return dot_words(sum, line, splat_int(*pair)); }
INLINE void store_shorts(int16_t* p, IntVec v) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8));
}
// Lane i of the result is lane i ^ S.
template <int S>
INLINE Vec swap_lanes(Vec v) {
  if (S == 8) return {v.b, v.a};
  if (S == 4) return {_mm256_permute2f128_ps(v.a, v.a, 1), _mm256_permute2f128_ps(v.b, v.b, 1)};
  constexpr int order = S == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(v.a, order), _mm256_permute_ps(v.b, order)};
}

// Sixteen int32 within int8 as four pieces of 4 bytes, `stride` bytes apart.
INLINE void store_dwords(IntVec v, int8_t* out, int stride) {
  const __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(v.a), _mm256_extracti128_si256(v.a, 1));
  const __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(v.b), _mm256_extracti128_si256(v.b, 1));
  const __m128i bytes = _mm_packs_epi16(low, high);
  const int32_t words[4] = {_mm_extract_epi32(bytes, 0), _mm_extract_epi32(bytes, 1), _mm_extract_epi32(bytes, 2),
                            _mm_extract_epi32(bytes, 3)};
  for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * stride, &words[i], 4);
}
INLINE __m256i high_half(__m256i v) { return _mm256_srai_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(64)), 7); }
// Planes of v = 128 * high + low.
INLINE IntVec high_plane(IntVec v) { return {high_half(v.a), high_half(v.b)}; }
INLINE IntVec low_plane(IntVec v, IntVec high) {
  return {_mm256_sub_epi32(v.a, _mm256_slli_epi32(high.a, 7)), _mm256_sub_epi32(v.b, _mm256_slli_epi32(high.b, 7))};
}

// The nearest bfloat16 of each lane, still as float.
INLINE __m256 to_bf16_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 any =
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_and_ps(any, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
INLINE void store_upper(__m256 a, __m256 b, uint32_t* out) {
  const __m256i x = _mm256_srli_epi32(_mm256_castps_si256(a), 16), y = _mm256_srli_epi32(_mm256_castps_si256(b), 16);
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8));
}
INLINE void round_bf16(Vec v, uint32_t* words) { store_upper(to_bf16_half(v.a), to_bf16_half(v.b), words); }
INLINE void split_bf16(Vec v, uint32_t* hi, uint32_t* lo) {
  const Vec high = {to_bf16_half(v.a), to_bf16_half(v.b)}, rest = sub(v, high);
  store_upper(high.a, high.b, hi);
  store_upper(to_bf16_half(rest.a), to_bf16_half(rest.b), lo);
}

constexpr int kDenseRows = 4, kDenseChains = 1;

INLINE void load_bf16_pair(const uint8_t* line, Vec& even, Vec& odd) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)line), b = _mm256_loadu_si256((const __m256i*)line + 1);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}
