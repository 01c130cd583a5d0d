// Products of 4-bit and 8-bit weights with VPDPBUSD. Included in the instruction set's namespace.
//
// Up to three rows walk one tile at a time, which is one sequential stream of memory, and both activation planes use a
// weight while it is in a register. More rows walk two tiles in blocks of up to eight rows: sixteen sums, through
// which the high plane runs first and then, where a row of the block has one, the low plane. Many rows unpack 4-bit
// tiles to bytes once. Each form sums whole numbers within a group and adds groups in ascending order by the same
// operations (`Group::add`), so that a row's result is the same bits in all of them.

// sum += four products of u8 weights and s8 activations in each lane; the 4 activation bytes go to all lanes.
// As inline assembly because gcc 12 spills such accumulators when it sees the intrinsic.
INLINE void dot(__m512i& sum, __m512i weights, const int8_t* activations) {
  typedef int32_t __attribute__((may_alias)) word;
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const word*>(activations)));
}
INLINE void dot(__m512i& sum, __m512i weights, __m512i activations) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(activations));
}
INLINE __m512i four_bytes(const int8_t* p) {
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_epi32(value);
}

constexpr bool has_bytes(int kind) { return kind == kInt8 || kind == kInt8Min; }
constexpr bool has_mins(int kind) { return kind == kW4Min || kind == kInt8Min; }

// What turns the whole-number sums of one group of one tile into weights times activations.
template <int KIND>
struct Group {
  Vec factor, least;
  __m512i zero;  // pairs (128 z, z) for the pairs in Activations::parts

  __attribute__((always_inline)) Group(const Matrix& w, int tile, int g) {
    const size_t entry = (static_cast<size_t>(tile) * w.groups + g) * kTile;
    factor = load_half(w.scales + entry);
    if (has_mins(KIND)) {
      least = load_half(w.mins + entry);
    } else if (KIND == kInt8) {
      zero = _mm512_set1_epi32(128 << 23 | 128);
    } else {
      const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + entry)));
      zero = _mm512_or_si512(_mm512_slli_epi32(z, 23), z);
    }
  }

  // whole: sum of code * (128 hi + lo)
  __attribute__((always_inline)) Vec add(Vec result, __m512i whole, const Activations& a, size_t at) const {
    if (!has_mins(KIND)) whole = _mm512_sub_epi32(whole, _mm512_madd_epi16(zero, _mm512_set1_epi32(a.parts[at])));
    result = fma(mul(_mm512_cvtepi32_ps(whole), splat(a.scale[at])), factor, result);
    return has_mins(KIND) ? fma(least, splat(a.sum[at]), result) : result;
  }
};

// Whether any of the m rows of the block that starts at `row` has a second plane in group g.
INLINE bool has_second(const Activations& a, int row, int m, int g) {
  if (a.lo == nullptr) return false;
  uint64_t flags;
  __builtin_memcpy(&flags, a.second + (static_cast<size_t>(row / kRowBlock) * a.groups + g) * kRowBlock, 8);
  return (flags & ~uint64_t{0} >> (64 - 8 * m)) != 0;
}

constexpr int kAhead = 4096;  // bytes: several streams (codes, scales, offsets) are too much for the hardware alone

// ---- few rows ----

// The products of one group with both planes, or with the high one alone, for one tile.
template <bool BYTES, int M, bool BOTH>
INLINE void narrow_group(const uint8_t* line, int lines, const int8_t* hi, const int8_t* lo, __m512i* total) {
  constexpr int kSets = M < 3 ? 2 : 1;  // the products of a few rows alone would wait for each other
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i high[M * kSets], low[M * kSets];
#pragma GCC unroll 16
  for (int m = 0; m < M * kSets; ++m) high[m] = low[m] = _mm512_setzero_si512();
  for (int i = 0; i < lines; i += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      __builtin_prefetch(line + kAhead, 0, 3);
      const __m512i v = _mm512_load_si512(line);
      const __m512i halves[2] = {BYTES ? v : _mm512_and_si512(v, nibble),
                                 _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble)};
#pragma GCC unroll 2
      for (int half = 0; half < (BYTES ? 1 : 2); ++half) {
        const int set = (BYTES ? j : half) % kSets * M;
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          dot(high[set + m], halves[half], hi + m * 4);
          if (BOTH) dot(low[set + m], halves[half], lo + m * 4);
        }
        hi += 4 * M;
        lo += 4 * M;
      }
      line += 64;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (kSets == 2) high[m] = _mm512_add_epi32(high[m], high[M + m]);
    total[m] = _mm512_slli_epi32(high[m], 7);
    if (BOTH) total[m] = _mm512_add_epi32(total[m], kSets == 2 ? _mm512_add_epi32(low[m], low[M + m]) : low[m]);
  }
}

// Rows [row, row + M), which are a whole block, against one tile.
template <int KIND, int M>
static void narrow_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  constexpr bool kBytes = has_bytes(KIND);
  const int lines = w.group / (kBytes ? 4 : 8);
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * w.groups * lines * 64;
  const int8_t* hi = a.hi + static_cast<size_t>(row) * a.k_padded;
  const int8_t* lo = a.lo == nullptr ? hi : a.lo + static_cast<size_t>(row) * a.k_padded;  // never read if absent
  Vec result[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) result[m] = zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512i total[M];
    if (has_second(a, row, M, g))
      narrow_group<kBytes, M, true>(line, lines, hi, lo, total);
    else
      narrow_group<kBytes, M, false>(line, lines, hi, lo, total);
    const Group<KIND> group(w, tile, g);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      result[m] = group.add(result[m], total[m], a, static_cast<size_t>(row + m) * a.groups + g);
    line += static_cast<size_t>(lines) * 64;
    hi += w.group * M;
    lo += w.group * M;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

// ---- more rows ----

// sums[m * T + t] += the products of one group and one plane. Nibbles: 4-bit codes, else bytes.
template <bool NIBBLES, int M, int T>
INLINE void add_plane(__m512i* sums, const uint8_t* line, size_t tile_stride, int step, int lines, const int8_t* plane,
                      const uint8_t* ahead) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < lines; i += 2) {
#pragma GCC unroll 4
    for (int j = 0; j < 2 * T; ++j) __builtin_prefetch(ahead + j * 64, 0, 2);
    ahead += 2 * T * 64;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      __m512i v[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) v[t] = _mm512_load_si512(line + t * tile_stride);
      line += step;
#pragma GCC unroll 2
      for (int half = 0; half < (NIBBLES ? 2 : 1); ++half) {
        __m512i codes[T];
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t)
          codes[t] = NIBBLES ? _mm512_and_si512(half ? _mm512_srli_epi16(v[t], 4) : v[t], nibble) : v[t];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const __m512i value = four_bytes(plane + m * 4);
#pragma GCC unroll 2
          for (int t = 0; t < T; ++t) dot(sums[m * T + t], codes[t], value);
        }
        plane += 4 * M;
      }
    }
  }
}

// Rows [row, row + M), a whole block, against tiles [tile, tile + T). panel: their codes as bytes, lines of the tiles
// alternating; null: as the matrix holds them. ahead: what to fetch meanwhile, as many lines as are read.
template <int KIND, int M, int T, bool PANEL>
static void wide_tiles(const Matrix& w, const Activations& a, int row, int tile, const uint8_t* panel,
                       const uint8_t* ahead, bool fetch, float* out, ptrdiff_t ld_out) {
  constexpr bool kNibbles = !has_bytes(KIND) && !PANEL;
  const int lines = w.group / (kNibbles ? 8 : 4);
  const size_t tile_bytes = static_cast<size_t>(w.groups) * lines * 64;
  const uint8_t* line = PANEL ? panel : w.lines + static_cast<size_t>(tile) * tile_bytes;
  const size_t tile_stride = PANEL ? 64 : tile_bytes;
  const int step = PANEL ? 64 * T : 64;
  const int8_t* hi = a.hi + static_cast<size_t>(row) * a.k_padded;
  const int8_t* lo = a.lo == nullptr ? hi : a.lo + static_cast<size_t>(row) * a.k_padded;  // never read if absent
  alignas(64) float results[M * T * kTile];
  for (int g = 0; g < w.groups; ++g) {
    __m512i sums[M * T];
#pragma GCC unroll 16
    for (int i = 0; i < M * T; ++i) sums[i] = _mm512_setzero_si512();
    add_plane<kNibbles, M, T>(sums, line, tile_stride, step, lines, hi, fetch ? ahead : line);
#pragma GCC unroll 16
    for (int i = 0; i < M * T; ++i) sums[i] = _mm512_slli_epi32(sums[i], 7);
    if (has_second(a, row, M, g)) add_plane<kNibbles, M, T>(sums, line, tile_stride, step, lines, lo, line);
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const Group<KIND> group(w, tile + t, g);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float* result = results + (m * T + t) * kTile;
        const Vec before = g == 0 ? zero() : _mm512_load_ps(result);
        _mm512_store_ps(result, group.add(before, sums[m * T + t], a, static_cast<size_t>(row + m) * a.groups + g));
      }
    }
    __asm__ volatile("" : : "r"(results) : "memory");  // the results stay in memory: the sums need the registers
    line += static_cast<size_t>(lines) * step;
    ahead += static_cast<size_t>(lines) * T * 64;
    hi += w.group * M;
    lo += w.group * M;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M * T; ++i) store(out + i / T * ld_out + i % T * kTile, _mm512_load_ps(results + i * kTile));
}

// The 4-bit codes of T tiles as bytes: for every four inputs a line of each tile.
template <int T>
static void unpack_panel(const Matrix& w, int tile, uint8_t* panel) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const size_t lines = w.k_padded / 8;
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * lines * 64;
  for (size_t i = 0; i < lines; ++i, panel += 2 * T * 64)
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const __m512i v = _mm512_load_si512(line + (t * lines + i) * 64);
      _mm512_store_si512(panel + t * 64, _mm512_and_si512(v, nibble));
      _mm512_store_si512(panel + (T + t) * 64, _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    }
}

constexpr int kNarrowRows = 3;
constexpr int kPanelRows = 48;

// All rows against tiles [tile, tile + T); `ahead` are the codes that will be wanted next.
template <int KIND, int T>
static void all_rows(const Matrix& w, const Activations& a, int tile, const uint8_t* ahead, uint8_t* scratch,
                     float* out, ptrdiff_t ld_out) {
  using Wide =
      void (*)(const Matrix&, const Activations&, int, int, const uint8_t*, const uint8_t*, bool, float*, ptrdiff_t);
  using Narrow = void (*)(const Matrix&, const Activations&, int, int, float*, ptrdiff_t);
  static constexpr Narrow narrow[] = {narrow_tile<KIND, 1>, narrow_tile<KIND, 2>, narrow_tile<KIND, 3>};
  static constexpr Wide wide[] = {wide_tiles<KIND, 4, T, false>, wide_tiles<KIND, 5, T, false>,
                                  wide_tiles<KIND, 6, T, false>, wide_tiles<KIND, 7, T, false>,
                                  wide_tiles<KIND, 8, T, false>};
  const bool panel = !has_bytes(KIND) && a.rows > kPanelRows;
  if (panel) unpack_panel<T>(w, tile, scratch);
  for (int row = 0; row < a.rows; row += kRowBlock) {
    const int m = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
    float* to = out + row * ld_out;
    if (m <= kNarrowRows) {
      for (int t = 0; t < T; ++t) narrow[m - 1](w, a, row, tile + t, to + t * kTile, ld_out);
    } else if (panel && m == kRowBlock) {
      wide_tiles<KIND, kRowBlock, T, true>(w, a, row, tile, scratch, ahead, row == 0, to, ld_out);
    } else {
      wide[m - kNarrowRows - 1](w, a, row, tile, nullptr, ahead, row == 0, to, ld_out);
    }
  }
}

template <int KIND>
static void grouped_matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out,
                           ptrdiff_t ld_out, void* scratch) {
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * (has_bytes(KIND) ? 16 : 8);
  int tile = tile_begin;
  for (; a.rows > kNarrowRows && tile + 2 <= tile_end; tile += 2) {
    const int next = tile + 4 <= w.tiles ? tile + 2 : tile;
    all_rows<KIND, 2>(w, a, tile, w.lines + next * tile_bytes, static_cast<uint8_t*>(scratch),
                      out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile, ld_out);
  }
  for (; tile < tile_end; ++tile) {
    const int next = tile + 2 <= w.tiles ? tile + 1 : tile;
    all_rows<KIND, 1>(w, a, tile, w.lines + next * tile_bytes, static_cast<uint8_t*>(scratch),
                      out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile, ld_out);
  }
}

static void grouped_matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out,
                           ptrdiff_t ld_out, void* scratch) {
  switch (w.kind) {
    case kW4Zero:
      return grouped_matmul<kW4Zero>(w, a, tile_begin, tile_end, out, ld_out, scratch);
    case kW4Min:
      return grouped_matmul<kW4Min>(w, a, tile_begin, tile_end, out, ld_out, scratch);
    case kInt8:
      return grouped_matmul<kInt8>(w, a, tile_begin, tile_end, out, ld_out, scratch);
    default:
      return grouped_matmul<kInt8Min>(w, a, tile_begin, tile_end, out, ld_out, scratch);
  }
}

static void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                   void* scratch) {
  if (w.kind == kBf16) return matmul_bf16(w, a, tile_begin, tile_end, out, ld_out);
  if (w.kind == kFp16) return matmul_dense<kFp16>(w, a, tile_begin, tile_end, out, ld_out, scratch);
  grouped_matmul(w, a, tile_begin, tile_end, out, ld_out, scratch);
}

// Two tiles of bytes.
static size_t matmul_scratch_bytes(int k_padded) { return static_cast<size_t>(k_padded) * 2 * kTile + 64; }
