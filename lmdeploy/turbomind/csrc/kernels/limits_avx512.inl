// Yardsticks with AVX-512; see limits.h. Included in the instruction set's namespace.

static int64_t read(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    a = _mm512_xor_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  return _mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
}

constexpr int kChains = 12;

static double dot_int8(int64_t rounds) {
  const __m512i x = _mm512_set1_epi8(1);
  __m512i sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(x));
  }
  return static_cast<double>(rounds) * kChains * 128;
}

static double dot_float(int64_t rounds) {
  const __m512i x = _mm512_set1_epi16(0x3f80);
  __m512 sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) __asm__ volatile("vdpbf16ps %1, %1, %0" : "+v"(sums[i]) : "v"(x));
  }
  return static_cast<double>(rounds) * kChains * 64;
}

static double fma_float(int64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.5f);
  __m512 sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[i]) : "v"(x));
  }
  return static_cast<double>(rounds) * kChains * 32;
}

static const Limits limits = {read, dot_int8, dot_float, fma_float};
