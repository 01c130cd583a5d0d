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

// A group of weights is (code - z) * scale or code * scale + min. The zeros start the sums of whole numbers: -z, in the
// upper or the lower half of each lane, meets the sums of the high or of the low plane (Activations::parts).
template <int KIND>
INLINE __m512i negative_zeros(const Matrix& w, int tile, int g) {
  if (has_mins(KIND)) return _mm512_setzero_si512();
  if (KIND == kInt8) return _mm512_set1_epi32(-128);
  const size_t entry = (static_cast<size_t>(tile) * w.groups + g) * kTile;
  const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + entry)));
  return _mm512_sub_epi32(_mm512_setzero_si512(), z);
}
INLINE __m512i upper_half(__m512i v) { return _mm512_slli_epi32(v, 16); }
INLINE __m512i lower_half(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }

// The end of a group. With one plane the sums are of code * hi and 128 is in the factor: powers of two change no digit,
// so the result is the same bits as with a low plane of zeros.
template <int KIND>
struct Group {
  Vec factor, least;

  __attribute__((always_inline)) Group(const Matrix& w, int tile, int g, bool second) {
    const size_t entry = (static_cast<size_t>(tile) * w.groups + g) * kTile;
    factor = mul(load_half(w.scales + entry), splat(second ? 1.0f : 128.0f));
    if (has_mins(KIND)) least = load_half(w.mins + entry);
  }
  __attribute__((always_inline)) Vec add(Vec result, __m512i whole, Vec scale, Vec sum) const {
    result = fma(mul(_mm512_cvtepi32_ps(whole), scale), factor, result);
    return has_mins(KIND) ? fma(least, sum, result) : result;
  }
};

// What is in memory stays there: the registers are for the sums.
#define FORGET() __asm__ volatile("" : : : "memory")

// Whether any of the m rows of the block that starts at `row` has a second plane in group g.
INLINE bool has_second(const Activations& a, int row, int m, int g) {
  if (a.lo == nullptr) return false;
  uint64_t flags;
  __builtin_memcpy(&flags, a.second + group_entry(a, row, g), 8);
  return (flags & ~uint64_t{0} >> (64 - 8 * m)) != 0;
}

constexpr int kAhead = 4096;  // bytes: several streams (codes, scales, offsets) are too much for the hardware alone

// ---- few rows ----

// How far ahead the parameters of groups are asked for: about as far as their codes, and never the next one only.
INLINE int groups_ahead(int lines) { return lines * 64 * 2 >= kAhead ? 2 : kAhead / (lines * 64); }

template <int KIND>
INLINE void fetch_parameters(const Matrix& w, size_t entry) {
  __builtin_prefetch(w.scales + entry, 0, 3);
  if (KIND == kW4Zero) __builtin_prefetch(w.zeros + entry, 0, 3);
  if (has_mins(KIND)) __builtin_prefetch(w.mins + entry, 0, 3);
}

// The products of one group with both planes, or with the high one alone, for one tile. Two sets of sums: of even and
// odd lines, or of low and high nibbles. High nibbles stay where they are, 16 times as large.
template <bool BYTES, int M, bool BOTH>
INLINE void narrow_group(const uint8_t* line, int lines, const int8_t* hi, const int8_t* lo, __m512i* total) {
  const __m512i low_nibble = _mm512_set1_epi8(15), high_nibble = _mm512_set1_epi8(-16);
  __m512i high[2 * M], low[2 * M];
#pragma GCC unroll 8
  for (int m = 0; m < 2 * M; ++m) high[m] = low[m] = _mm512_setzero_si512();
  for (int i = 0; i < lines; i += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      __builtin_prefetch(line + kAhead, 0, 3);
      const __m512i v = _mm512_load_si512(line);
#pragma GCC unroll 2
      for (int half = 0; half < (BYTES ? 1 : 2); ++half) {
        const __m512i codes = BYTES ? v : _mm512_and_si512(v, half ? high_nibble : low_nibble);
        const int set = (BYTES ? j : half) * M;
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          dot(high[set + m], codes, hi + m * 4);
          if (BOTH) dot(low[set + m], codes, lo + m * 4);
        }
        hi += 4 * M;
        lo += 4 * M;
      }
      line += 64;
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    total[m] = _mm512_add_epi32(high[m], BYTES ? high[M + m] : _mm512_srai_epi32(high[M + m], 4));
    if (!BOTH) continue;
    const __m512i rest = _mm512_add_epi32(low[m], BYTES ? low[M + m] : _mm512_srai_epi32(low[M + m], 4));
    total[m] = _mm512_add_epi32(_mm512_slli_epi32(total[m], 7), rest);
  }
}

// Rows [row, row + M), which are a whole block, against one tile. One row alone waits for memory, and would wait longer
// after each wrong guess of which groups have a second plane: it runs with both wherever there are two.
template <int KIND, int M>
static void narrow_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  constexpr bool kBytes = has_bytes(KIND);
  const int lines = w.group / (kBytes ? 4 : 8), ahead = groups_ahead(lines);
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * w.groups * lines * 64;
  const int8_t* hi = a.hi + static_cast<size_t>(row) * a.k_padded;
  const int8_t* lo = a.lo == nullptr ? hi : a.lo + static_cast<size_t>(row) * a.k_padded;  // never read if absent
  Vec result[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) result[m] = zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512i total[M];
    const size_t at = group_entry(a, row, g);
    const bool second = M == 1 ? a.lo != nullptr : has_second(a, row, M, g);
    fetch_parameters<KIND>(w, (static_cast<size_t>(tile) * w.groups + g + ahead) * kTile);
    if (second)
      narrow_group<kBytes, M, true>(line, lines, hi, lo, total);
    else
      narrow_group<kBytes, M, false>(line, lines, hi, lo, total);
    const __m512i zeros = negative_zeros<KIND>(w, tile, g);
    const Group<KIND> group(w, tile, g, second);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      if (!has_mins(KIND)) {
        const int32_t parts = a.parts[at + m], high = parts >> 16;
        const int32_t sum = second ? high * 128 + static_cast<int16_t>(parts) : high;
        total[m] = _mm512_add_epi32(total[m], _mm512_mullo_epi32(zeros, _mm512_set1_epi32(sum)));
      }
      result[m] = group.add(result[m], total[m], splat(a.scale[at + m]), splat(a.sum[at + m]));
    }
    line += static_cast<size_t>(lines) * 64;
    hi += w.group * M;
    lo += w.group * M;
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

// ---- more rows ----

// sums[m * T + t] += the products of one group and one plane. NIBBLES: 4-bit codes, else bytes. FETCH: asks memory for
// as many lines at `ahead`.
template <bool NIBBLES, int M, int T, bool FETCH>
INLINE void add_plane(__m512i* sums, const uint8_t* line, size_t tile_stride, int step, int lines, const int8_t* plane,
                      const uint8_t* ahead) {
  constexpr int kOnce = NIBBLES ? 2 : 4;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < lines; i += kOnce) {
    if (FETCH) {
#pragma GCC unroll 8
      for (int j = 0; j < kOnce * T; ++j) __builtin_prefetch(ahead + j * 64, 0, 2);
      ahead += kOnce * T * 64;
    }
#pragma GCC unroll 4
    for (int j = 0; j < kOnce; ++j) {
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
#pragma GCC unroll 16
  for (int i = 0; i < M * T; ++i) _mm512_store_ps(results + i * kTile, zero());
  for (int g = 0; g < w.groups; ++g) {
    const size_t at = group_entry(a, row, g);
    const int32_t* parts = a.parts + at;
    const float *scale = a.scale + at, *sum = a.sum + at;
    __m512i sums[M * T], zeros[T];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) zeros[t] = upper_half(negative_zeros<KIND>(w, tile + t, g));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t)
        sums[m * T + t] =
            has_mins(KIND) ? _mm512_setzero_si512() : _mm512_madd_epi16(zeros[t], _mm512_set1_epi32(parts[m]));
    FORGET();
    add_plane<kNibbles, M, T, !PANEL>(sums, line, tile_stride, step, lines, hi, fetch ? ahead : line);
    const bool second = has_second(a, row, M, g);
    if (second) {
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) zeros[t] = lower_half(negative_zeros<KIND>(w, tile + t, g));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
          __m512i& s = sums[m * T + t];
          s = _mm512_slli_epi32(s, 7);
          if (!has_mins(KIND)) s = _mm512_add_epi32(s, _mm512_madd_epi16(zeros[t], _mm512_set1_epi32(parts[m])));
        }
      FORGET();
      add_plane<kNibbles, M, T, false>(sums, line, tile_stride, step, lines, lo, line);
    }
    FORGET();
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const Group<KIND> group(w, tile + t, g, second);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        float* result = results + (m * T + t) * kTile;
        _mm512_store_ps(result, group.add(_mm512_load_ps(result), sums[m * T + t], splat(scale[m]), splat(sum[m])));
      }
      FORGET();
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
      const size_t share = static_cast<size_t>(w.k_padded) * 8 * T * kRowBlock / a.rows;
      for (size_t i = 0; i < share; i += 64) __builtin_prefetch(ahead + row / kRowBlock * share + i, 0, 2);
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
