// Matrix products with VPDPBUSD: one weight tile against up to eight rows at a time.
//
// A tile is one sequential stream of lines, so a thread that walks its tiles in order reads memory at full speed. Both
// activation planes use a weight while it is in a register: with eight rows that makes sixteen products for each one
// unpacked, so weights are never unpacked to memory, however many rows there are.
//
// Measured on two cores of Zen 4, K = 2048, gcc 12 (benchmarks/native_kernels.py; "read" is a plain read of the same
// bytes, "peak" half the rate of VPDPBUSD from registers, since there are two planes):
//                                        W4 group 32        W4 group 128       Int8 group 32      Bf16
//   one row, no prefetch                 0.70 of read       0.97 of read       0.98 of read       1.0 of read
//   one row, codes 4 KiB ahead           0.87 - 0.96        0.82 - 0.95        0.86 - 0.93        1.0
//   eight rows and more                  0.79 of peak       0.92 of peak       0.79 of peak       0.97 of peak
// Prefetching scales as well lost a fifth at group 32. What is missing at group 32 is the end of each group: multiply
// and add share their ports with the dot product.

// sum += four products of u8 weights and s8 activations in each lane; the 4 activation bytes go to all lanes.
// As inline assembly because gcc 12 spills such accumulators when it sees the intrinsic.
INLINE void dot(__m512i& sum, __m512i weights, const int8_t* activations) {
  typedef int32_t __attribute__((may_alias)) word;
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const word*>(activations)));
}

template <int KIND>
INLINE Vec group_offset(const Matrix& w, size_t entry, Vec scale) {
  if (KIND == kW4Min || KIND == kInt8Min) return load_half(w.mins + entry);
  if (KIND == kInt8) return mul(splat(-128.0f), scale);
  const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + entry)));
  return sub(zero(), mul(_mm512_cvtepi32_ps(zeros), scale));
}

constexpr int kAhead = 4096;  // bytes: several streams (codes, scales, offsets) are too much for the hardware alone

// Rows [row, row + M) of one block against one tile.
template <int KIND, int M>
static void grouped_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  constexpr bool kBytes = KIND == kInt8 || KIND == kInt8Min;
  constexpr int kPerLine = kBytes ? 4 : 8;
  constexpr int kSets = M == 1 ? 2 : 1;  // a single row needs more sums in flight than it has planes
  const __m512i nibble = _mm512_set1_epi8(15);
  const int lines = w.group / kPerLine;
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * (w.k_padded / kPerLine) * 64;
  const int8_t* hi = a.hi + static_cast<size_t>(row) * a.k_padded;
  const int8_t* lo = a.lo + static_cast<size_t>(row) * a.k_padded;
  const float* scale = a.scale + static_cast<size_t>(row) * a.groups;
  const float* sum = a.sum + static_cast<size_t>(row) * a.groups;
  Vec result[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) result[m] = zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512i high[M * kSets], low[M * kSets];
#pragma GCC unroll 16
    for (int m = 0; m < M * kSets; ++m) high[m] = low[m] = _mm512_setzero_si512();
    for (int i = 0; i < lines; i += 2) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        __builtin_prefetch(line + kAhead, 0, 3);
        const __m512i v = _mm512_load_si512(line);
        const int set = kBytes ? j % kSets : 0;
        const __m512i first_half = kBytes ? v : _mm512_and_si512(v, nibble);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          dot(high[m + set], first_half, hi + m * 4);
          dot(low[m + set], first_half, lo + m * 4);
        }
        if (!kBytes) {
          const __m512i second_half = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            dot(high[m + kSets - 1], second_half, hi + (M + m) * 4);
            dot(low[m + kSets - 1], second_half, lo + (M + m) * 4);
          }
        }
        line += 64;
        hi += kPerLine * M;
        lo += kPerLine * M;
      }
    }
    const size_t entry = (static_cast<size_t>(tile) * w.groups + g) * kTile;
    const Vec factor = load_half(w.scales + entry);
    const Vec offset = group_offset<KIND>(w, entry, factor);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      if (kSets == 2) {
        high[m] = _mm512_add_epi32(high[m], high[m + 1]);
        low[m] = _mm512_add_epi32(low[m], low[m + 1]);
      }
      const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[m], 7), low[m]);
      const size_t at = static_cast<size_t>(m) * a.groups + g;
      result[m] = fma(mul(_mm512_cvtepi32_ps(whole), splat(scale[at])), factor, result[m]);
      result[m] = fma(offset, splat(sum[at]), result[m]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

template <int M>
static void block_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  switch (w.kind) {
    case kW4Zero:
      return grouped_tile<kW4Zero, M>(w, a, row, tile, out, ld_out);
    case kW4Min:
      return grouped_tile<kW4Min, M>(w, a, row, tile, out, ld_out);
    case kInt8:
      return grouped_tile<kInt8, M>(w, a, row, tile, out, ld_out);
    case kInt8Min:
      return grouped_tile<kInt8Min, M>(w, a, row, tile, out, ld_out);
    case kBf16:
      return;  // matmul_bf16
  }
}

static void any_block_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  using Kernel = void (*)(const Matrix&, const Activations&, int, int, float*, ptrdiff_t);
  static constexpr Kernel kernels[kRowBlock] = {block_tile<1>, block_tile<2>, block_tile<3>, block_tile<4>,
                                                block_tile<5>, block_tile<6>, block_tile<7>, block_tile<8>};
  const int rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
  kernels[rows - 1](w, a, row, tile, out, ld_out);
}

constexpr size_t kResident = size_t{256} << 10;  // bytes of tiles that stay in L2 while row blocks pass by

static void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                   void*) {
  if (w.kind == kBf16) return matmul_bf16(w, a, tile_begin, tile_end, out, ld_out);
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * (w.kind == kInt8 || w.kind == kInt8Min ? 16 : 8);
  const int at_once = tile_bytes < kResident ? static_cast<int>(kResident / tile_bytes) : 1;
  for (int begin = tile_begin; begin < tile_end; begin += at_once) {
    const int end = begin + at_once < tile_end ? begin + at_once : tile_end;
    for (int row = 0; row < a.rows; row += kRowBlock)
      for (int tile = begin; tile < end; ++tile)
        any_block_tile(w, a, row, tile, out + row * ld_out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile, ld_out);
  }
}

static size_t matmul_scratch_bytes(int) { return 64; }
