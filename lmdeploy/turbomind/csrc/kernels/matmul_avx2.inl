// Matrix products with VPMADDWD: one weight tile against up to four rows at a time.
//
// The two int8 planes of a block are first joined to int16, 128 * hi + lo, which one VPMADDWD multiplies exactly and
// sums into int32 without any overflow: as many instructions as VPMADDUBSW on each plane would take, but a third of
// the sums to keep. A 16-bit lane of a weight line holds inputs k and k + 1; masks and shifts leave one of them, so
// the pairs that meet in a product are (0, 2), (1, 3), (4, 6) and (5, 7).
//
// Measured on two cores of Zen 4, K = 2048, gcc 12, W4 group 32 / 128 (benchmarks/native_kernels.py):
//   one row                                        0.52 / 0.84 of a plain read
//   one row, codes 4 KiB ahead                     0.75 / 0.75: instructions, not memory, set the pace
//   eight rows, intrinsics                         215 / 246 GOP/s; gcc kept sums on the stack
//   eight rows, product and sum as one assembly    259 / 295 GOP/s

// A block's activations, in the caller's scratch. Entry i stands for inputs 4 * (i / m) + {0..3} of row i % m.
struct Block {
  int m;                // rows
  const int32_t* even;  // inputs 0 and 2 as int16
  const int32_t* odd;   // inputs 1 and 3
};

static void join_planes(const Activations& a, int row, int m, int32_t* even, int32_t* odd) {
  const int count = a.k_padded / 4 * m;
  const int8_t* hi = a.hi + static_cast<size_t>(row) * a.k_padded;
  const int8_t* lo = a.lo == nullptr ? nullptr : a.lo + static_cast<size_t>(row) * a.k_padded;
  for (int i = 0; i < count; i += 8) {
    const __m256i h = _mm256_loadu_si256((const __m256i*)(hi + 4 * i));
    const __m256i l = lo == nullptr ? _mm256_setzero_si256() : _mm256_loadu_si256((const __m256i*)(lo + 4 * i));
    const __m256i h0 = _mm256_srai_epi16(_mm256_slli_epi16(h, 8), 8), h1 = _mm256_srai_epi16(h, 8);
    const __m256i l0 = _mm256_srai_epi16(_mm256_slli_epi16(l, 8), 8), l1 = _mm256_srai_epi16(l, 8);
    _mm256_store_si256((__m256i*)(even + i), _mm256_add_epi16(_mm256_slli_epi16(h0, 7), l0));
    _mm256_store_si256((__m256i*)(odd + i), _mm256_add_epi16(_mm256_slli_epi16(h1, 7), l1));
  }
}

// What turns the whole-number sums of one group of one tile into weights times activations.
template <int KIND>
struct Group {
  static constexpr bool kMins = KIND == kW4Min || KIND == kInt8Min;
  Vec factor, least;
  IntVec zero;  // pairs (128 z, z) for the pairs in Activations::parts

  __attribute__((always_inline)) Group(const Matrix& w, size_t entry) {
    factor = mul(load_half(w.scales + entry), splat(1.0f / 128));
    if (kMins) {
      least = load_half(w.mins + entry);
    } else if (KIND == kInt8) {
      zero.a = zero.b = _mm256_set1_epi32(128 << 23 | 128);
    } else {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(w.zeros + entry));
      const __m256i a = _mm256_cvtepu8_epi32(bytes), b = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
      zero = {_mm256_or_si256(_mm256_slli_epi32(a, 23), a), _mm256_or_si256(_mm256_slli_epi32(b, 23), b)};
    }
  }

  // whole: sum of code * (128 hi + lo)
  // Without the scale of the activations, which the groups of a span share.
  __attribute__((always_inline)) Vec add(Vec part, IntVec whole, const Activations& a, size_t at) const {
    if (!kMins) {
      const __m256i parts = _mm256_set1_epi32(a.parts[at]);
      whole.a = _mm256_sub_epi32(whole.a, _mm256_madd_epi16(zero.a, parts));
      whole.b = _mm256_sub_epi32(whole.b, _mm256_madd_epi16(zero.b, parts));
    }
    const Vec value = {_mm256_cvtepi32_ps(whole.a), _mm256_cvtepi32_ps(whole.b)};
    part = fma(value, factor, part);
    return kMins ? fma(least, splat(a.sum[at]), part) : part;
  }
};

// sum += two products of int16 in each lane. As inline assembly because gcc 12 multiplies far ahead of adding, and
// then keeps sums on the stack.
INLINE void dot(__m256i& sum, __m256i weights, __m256i activations) {
  __m256i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(weights), "x"(activations));
}

// sums += products of one pair of inputs, for both halves of the tile and M rows.
template <int M>
INLINE void dot_pair(IntVec* sums, IntVec weights, const int32_t* activations) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const __m256i factor = _mm256_set1_epi32(activations[m]);
    dot(sums[m].a, weights.a, factor);
    dot(sums[m].b, weights.b, factor);
  }
}

INLINE IntVec masked(IntVec v, int shift, __m256i mask) {
  return {_mm256_and_si256(_mm256_srli_epi16(v.a, shift), mask), _mm256_and_si256(_mm256_srli_epi16(v.b, shift), mask)};
}

constexpr int kAhead = 4096;  // bytes: several streams (codes, scales, offsets) are too much for the hardware alone

// Rows [first, first + M) of the block that starts at `row`.
template <int KIND, int M>
static void grouped_tile(const Matrix& w, const Activations& a, const Block& block, int row, int first, int tile,
                         float* out, ptrdiff_t ld_out) {
  constexpr bool kBytes = KIND == kInt8 || KIND == kInt8Min;
  constexpr int kPerLine = kBytes ? 4 : 8;
  const __m256i mask = _mm256_set1_epi16(kBytes ? 255 : 15);
  const int lines = w.group / kPerLine, m_all = block.m;
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * (w.k_padded / kPerLine) * 64;
  const int32_t *even = block.even + first, *odd = block.odd + first;
  Vec result[M], part[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) result[m] = part[m] = zero();
  for (int g = 0; g < w.groups; ++g) {
    IntVec sums[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sums[m] = zero_ints();
    for (int i = 0; i < lines; ++i) {
      __builtin_prefetch(line + kAhead, 0, 3);
      const IntVec v = {_mm256_load_si256((const __m256i*)line), _mm256_load_si256((const __m256i*)line + 1)};
      dot_pair<M>(sums, masked(v, 0, mask), even);
      dot_pair<M>(sums, masked(v, 8, mask), odd);
      if (!kBytes) {
        dot_pair<M>(sums, masked(v, 4, mask), even + m_all);
        dot_pair<M>(sums, masked(v, 12, mask), odd + m_all);
      }
      line += 64;
      even += kPerLine / 4 * m_all;
      odd += kPerLine / 4 * m_all;
    }
    const Group<KIND> group(w, (static_cast<size_t>(tile) * w.groups + g) * kTile);
    const size_t at = group_entry(a, row + first, g);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) part[m] = group.add(part[m], sums[m], a, at + m);
    if ((g + 1) * w.group % kScaled != 0 && g + 1 != w.groups) continue;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      result[m] = fma(part[m], splat(a.scale[at + m]), result[m]);
      part[m] = zero();
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

template <int M>
static void some_rows(const Matrix& w, const Activations& a, const Block& block, int row, int first, int tile,
                      float* out, ptrdiff_t ld_out) {
  switch (w.kind) {
    case kW4Zero:
      return grouped_tile<kW4Zero, M>(w, a, block, row, first, tile, out, ld_out);
    case kW4Min:
      return grouped_tile<kW4Min, M>(w, a, block, row, first, tile, out, ld_out);
    case kInt8:
      return grouped_tile<kInt8, M>(w, a, block, row, first, tile, out, ld_out);
    case kInt8Min:
      return grouped_tile<kInt8Min, M>(w, a, block, row, first, tile, out, ld_out);
    case kBf16:
    case kFp16:
      return;  // matmul_dense
  }
}

constexpr int kRowsAtOnce = 4;

static void block_tile(const Matrix& w, const Activations& a, const Block& block, int row, int tile, float* out,
                       ptrdiff_t ld_out) {
  using Kernel = void (*)(const Matrix&, const Activations&, const Block&, int, int, int, float*, ptrdiff_t);
  static constexpr Kernel kernels[kRowsAtOnce] = {some_rows<1>, some_rows<2>, some_rows<3>, some_rows<4>};
  for (int first = 0; first < block.m; first += kRowsAtOnce) {
    const int rows = block.m - first < kRowsAtOnce ? block.m - first : kRowsAtOnce;
    kernels[rows - 1](w, a, block, row, first, tile, out + first * ld_out, ld_out);
  }
}

static Block make_block(const Activations& a, int row, void* scratch) {
  const int m = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
  int32_t* even = static_cast<int32_t*>(scratch);
  int32_t* odd = even + a.k_padded / 4 * m;
  join_planes(a, row, m, even, odd);
  return {m, even, odd};
}

constexpr size_t kResident = size_t{256} << 10;  // bytes of tiles that stay in L2 while row blocks pass by

static void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                   void* scratch) {
  if (w.kind == kBf16) return matmul_dense<kBf16>(w, a, tile_begin, tile_end, out, ld_out, scratch);
  if (w.kind == kFp16) return matmul_dense<kFp16>(w, a, tile_begin, tile_end, out, ld_out, scratch);
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * (w.kind == kInt8 || w.kind == kInt8Min ? 16 : 8);
  int at_once = tile_bytes < kResident ? static_cast<int>(kResident / tile_bytes) : 1;
  if (a.rows <= kRowBlock) at_once = tile_end - tile_begin;
  for (int begin = tile_begin; begin < tile_end; begin += at_once) {
    const int end = begin + at_once < tile_end ? begin + at_once : tile_end;
    for (int row = 0; row < a.rows; row += kRowBlock) {
      const Block block = make_block(a, row, scratch);
      for (int tile = begin; tile < end; ++tile)
        block_tile(w, a, block, row, tile, out + row * ld_out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile,
                   ld_out);
    }
  }
}

static size_t matmul_scratch_bytes(int k_padded) { return static_cast<size_t>(k_padded) * kRowBlock * sizeof(float); }
