// Yardsticks with AVX2; see limits.h. Included in the instruction set's namespace.

static int64_t read(const void* data, size_t bytes) {
  const __m256i* p = static_cast<const __m256i*>(data);
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i + 4 <= bytes / 32; i += 4) {
    a = _mm256_xor_si256(a, _mm256_loadu_si256(p + i));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(p + i + 1));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(p + i + 2));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(p + i + 3));
  }
  return _mm256_extract_epi64(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}

constexpr int kChains = 6;

// VPMADDWD and an addition multiply 16 joined planes, which stand for 32 products of single ones.
static double dot_int8(int64_t rounds) {
  const __m256i x = _mm256_set1_epi16(1);
  __m256i sums[kChains];
#pragma GCC unroll 6
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_setzero_si256();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 6
    for (int i = 0; i < kChains; ++i) {
      __m256i t;
      __asm__ volatile("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums[i]), "=&x"(t) : "x"(x));
    }
  }
  return static_cast<double>(rounds) * kChains * 64;
}

static double dot_float(int64_t rounds) {
  constexpr int kFloatChains = 12;
  const __m256 x = _mm256_set1_ps(0.5f);
  __m256 sums[kFloatChains];
#pragma GCC unroll 12
  for (int i = 0; i < kFloatChains; ++i) sums[i] = _mm256_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kFloatChains; ++i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(sums[i]) : "x"(x));
  }
  return static_cast<double>(rounds) * kFloatChains * 16;
}

static const Limits limits = {read, dot_int8, dot_float, dot_float};
