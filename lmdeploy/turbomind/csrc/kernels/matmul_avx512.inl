// Products of 4-bit and 8-bit weights with VPDPBUSD. Included in the instruction set's namespace.
//
// Up to three rows walk one tile at a time, which is one sequential stream of memory, and both activation planes use a
// weight while it is in a register. More rows walk two tiles, up to four rows at a time: eight sums, through which the
// high plane runs first and then, where one of the rows has one, the low plane. Many rows unpack 4-bit tiles to bytes
// once. Each form sums whole numbers within a group, adds groups of a span in ascending order by the same operations
// (`Group::add`), then spans, so that a row's result is the same bits in all of them.
//
// Zen 4 starts one VPDPBUSD of 64 bytes a cycle, and multiplications (also VPMADDWD and multiply-adds) take its place;
// additions, conversions and loads that go to all lanes do not. A group of 32 inputs is eight products for each sum, so
// each multiplication at its end costs an eighth of them: one is left, and an eighth of the peak with it.

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

// The end of a group: what its weights and activations give, but for the scale of the activations, which all groups of
// a span share. With two planes the sums are 128 times as large; powers of two change no digit, so the result is the
// same bits as with one plane where the low one is zeros.
template <int KIND>
struct Group {
  Vec factor, least;

  __attribute__((always_inline)) Group(const Matrix& w, int tile, int g) {
    const size_t entry = (static_cast<size_t>(tile) * w.groups + g) * kTile;
    factor = load_half(w.scales + entry);
    if (has_mins(KIND)) least = load_half(w.mins + entry);
  }
  __attribute__((always_inline)) Vec add(Vec part, __m512i whole, Vec sum) const {
    part = fma(_mm512_cvtepi32_ps(whole), factor, part);
    return has_mins(KIND) ? fma(least, sum, part) : part;
  }
};

// What is in memory stays there: the registers are for the sums.
#define FORGET() __asm__ volatile("" : : : "memory")

// Whether any of the M rows whose entries start at `at` has a second plane.
INLINE bool has_second(const Activations& a, size_t at, int m) {
  if (a.lo == nullptr) return false;
  uint32_t flags = 0;
  __builtin_memcpy(&flags, a.second + at, m);
  return flags != 0;
}

// Groups that share a scale of the activations, and whether group g is the last of them.
INLINE int span_groups(const Matrix& w) { return kScaled / w.group; }
INLINE bool ends_span(const Matrix& w, int g) { return (g + 1) % span_groups(w) == 0 || g + 1 == w.groups; }

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
  Vec result[M], part[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) result[m] = part[m] = zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512i total[M];
    const size_t at = group_entry(a, row, g);
    const bool second = M == 1 ? a.lo != nullptr : has_second(a, at, M);
    fetch_parameters<KIND>(w, (static_cast<size_t>(tile) * w.groups + g + ahead) * kTile);
    if (second)
      narrow_group<kBytes, M, true>(line, lines, hi, lo, total);
    else
      narrow_group<kBytes, M, false>(line, lines, hi, lo, total);
    const __m512i zeros = negative_zeros<KIND>(w, tile, g);
    Group<KIND> group(w, tile, g);
    if (second) group.factor = mul(group.factor, splat(1.0f / 128));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      if (!has_mins(KIND)) {
        const int32_t parts = a.parts[at + m], high = parts >> 16;
        const int32_t sum = second ? high * 128 + static_cast<int16_t>(parts) : high;
        total[m] = _mm512_add_epi32(total[m], _mm512_mullo_epi32(zeros, _mm512_set1_epi32(sum)));
      }
      part[m] = group.add(part[m], total[m], splat(a.sum[at + m]));
    }
    if (ends_span(w, g)) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        result[m] = fma(part[m], splat(a.scale[at + m]), result[m]);
        part[m] = zero();
      }
    }
    line += static_cast<size_t>(lines) * 64;
    hi += w.group * M;
    lo += w.group * M;
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

// ---- more rows ----

// sums[m * T + t] += the products of one group and one plane, whose rows lie `stride` bytes for four inputs. NIBBLES:
// 4-bit codes, else bytes. FETCH: asks memory for as many lines at `ahead`.
template <bool NIBBLES, int M, int T, bool FETCH>
INLINE void add_plane(__m512i* sums, const uint8_t* line, size_t tile_stride, int step, int lines, const int8_t* plane,
                      int stride, const uint8_t* ahead) {
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
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const __m512i value = four_bytes(plane + m * 4);
#pragma GCC unroll 2
          for (int t = 0; t < T; ++t) dot(sums[m * T + t], codes[t], value);
        }
        plane += stride;
      }
    }
  }
}

// What T tiles and groups [group, end) of them are. lines: their codes; those of a tile follow each other, or
// alternate as bytes with those of the other tile (PANEL below).
struct Piece {
  int tile, group, end;
  bool symmetric;  // the zero of all weights is 8
  const uint8_t* lines;
  const uint8_t* ahead;  // what to fetch meanwhile, as many lines as are read; null: nothing
};

constexpr int kPieceInputs = 512;  // as bytes, two tiles of them are half of L1

// z times the sum of a row's planes, where z is the zero that symmetric codes have.
template <int KIND>
INLINE __m512i shifted(int32_t parts, bool second) {
  const __m512i both = _mm512_set1_epi32(parts);
  __m512i sum = _mm512_srai_epi32(both, 16);
  if (second) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 7), _mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16));
  return _mm512_slli_epi32(sum, KIND == kInt8 ? 7 : 3);
}

// Takes from the sums what the zeros of the weights add to them.
template <int KIND, int M, int T>
INLINE void subtract_zeros(const Matrix& w, const Piece& piece, int g, const int32_t* parts, bool second,
                           __m512i* sums) {
  if (has_mins(KIND)) return;
  if (KIND == kInt8 || piece.symmetric) {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512i much = shifted<KIND>(parts[m], second);
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) sums[m * T + t] = _mm512_sub_epi32(sums[m * T + t], much);
    }
    return;
  }
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t) {
    const __m512i zeros = negative_zeros<KIND>(w, piece.tile + t, g);
    const __m512i high = _mm512_slli_epi32(zeros, second ? 23 : 16), pair = _mm512_or_si512(high, lower_half(zeros));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512i both = _mm512_set1_epi32(parts[m]);
      sums[m * T + t] = _mm512_add_epi32(sums[m * T + t], _mm512_madd_epi16(second ? pair : high, both));
    }
  }
}

// results[m * T + t] += rows [first, first + M) of the block that starts at `row` times a piece that starts with a
// span. They stay in memory: the registers are for the sums and for what the groups of a span add up to.
template <int KIND, int M, int T, bool PANEL>
INLINE void wide_piece(const Matrix& w, const Activations& a, int row, int first, const Piece& piece, float* results) {
  constexpr bool kNibbles = !has_bytes(KIND) && !PANEL;
  const int lines = w.group / (kNibbles ? 8 : 4), m_all = PANEL ? kRowBlock : rows_of_block(a, row);
  const int stride = 4 * m_all, per_span = span_groups(w);
  const size_t tile_stride = PANEL ? 64 : static_cast<size_t>(w.groups) * lines * 64;
  const int step = PANEL ? 64 * T : 64;
  const uint8_t *line = piece.lines, *ahead = piece.ahead;
  const size_t plane =
      static_cast<size_t>(row) * a.k_padded + static_cast<size_t>(piece.group) * w.group * m_all + first * 4;
  const int8_t *hi = a.hi + plane, *lo = a.lo == nullptr ? hi : a.lo + plane;  // never read if absent
  size_t at = group_entry(a, row, piece.group) + first;
  for (int g = piece.group; g < piece.end;) {
    const int stop = g + per_span < piece.end ? g + per_span : piece.end;
    const bool second = has_second(a, at, M);
    const float* scale = a.scale + at;
    Vec part[M * T];
#pragma GCC unroll 8
    for (int i = 0; i < M * T; ++i) part[i] = zero();
    for (; g < stop; ++g) {
      __m512i sums[M * T];
#pragma GCC unroll 8
      for (int i = 0; i < M * T; ++i) sums[i] = _mm512_setzero_si512();
      FORGET();
      if (!PANEL && ahead != nullptr) {
        add_plane<kNibbles, M, T, true>(sums, line, tile_stride, step, lines, hi, stride, ahead);
        ahead += static_cast<size_t>(lines) * T * 64;
      } else {
        add_plane<kNibbles, M, T, false>(sums, line, tile_stride, step, lines, hi, stride, line);
      }
      if (second) {
#pragma GCC unroll 8
        for (int i = 0; i < M * T; ++i) sums[i] = _mm512_slli_epi32(sums[i], 7);
        add_plane<kNibbles, M, T, false>(sums, line, tile_stride, step, lines, lo, stride, line);
      }
      FORGET();
      subtract_zeros<KIND, M, T>(w, piece, g, a.parts + at, second, sums);
      const float* sum = a.sum + at;
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        Group<KIND> group(w, piece.tile + t, g);
        if (has_mins(KIND) && second) group.least = mul(group.least, splat(128.0f));
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
          part[m * T + t] = group.add(part[m * T + t], sums[m * T + t], has_mins(KIND) ? splat(sum[m]) : zero());
        FORGET();
      }
      line += static_cast<size_t>(lines) * step;
      hi += w.group / 4 * stride;
      lo += w.group / 4 * stride;
      at += m_all;
    }
    if (second) {
#pragma GCC unroll 8
      for (int i = 0; i < M * T; ++i) part[i] = mul(part[i], splat(1.0f / 128));
    }
    __asm__ volatile("" : : "r"(results) : "memory");
#pragma GCC unroll 8
    for (int i = 0; i < M * T; ++i) {
      float* result = results + i * kTile;
      _mm512_store_ps(result, fma(part[i], splat(scale[i / T]), _mm512_load_ps(result)));
    }
  }
}

constexpr int kNarrowRows = 3;
constexpr int kWideRows = 4;  // that a pass takes
constexpr int kPanelRows = 48;
constexpr int kMostRows = 128;  // that share a panel

// One block of m rows; the piece is read once for each pass.
template <int KIND, int T>
static void wide_block(const Matrix& w, const Activations& a, int row, int m, Piece piece, float* results) {
  const int passes = (m + kWideRows - 1) / kWideRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int first = m * pass / passes, end = m * (pass + 1) / passes;
    float* to = results + first * T * kTile;
    switch (end - first) {
      case 2:
        wide_piece<KIND, 2, T, false>(w, a, row, first, piece, to);
        break;
      case 3:
        wide_piece<KIND, 3, T, false>(w, a, row, first, piece, to);
        break;
      case 4:
        wide_piece<KIND, 4, T, false>(w, a, row, first, piece, to);
        break;
    }
    piece.ahead = nullptr;
  }
}

template <int T>
INLINE void store_results(const float* results, int rows, float* out, ptrdiff_t ld_out) {
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) store(out + m * ld_out + t * kTile, load(results + (m * T + t) * kTile));
}

// The same for all groups, a piece after the other.
template <int KIND, int T>
static void wide_row_block(const Matrix& w, const Activations& a, int row, int m, const Piece& all, float* out,
                           ptrdiff_t ld_out) {
  alignas(64) float results[kRowBlock * T * kTile];
  for (int i = 0; i < m * T; ++i) store(results + i * kTile, zero());
  const int groups = kPieceInputs / w.group, bytes = w.group * (has_bytes(KIND) ? 16 : 8);
  for (int g = 0; g < w.groups; g += groups) {
    const size_t from = static_cast<size_t>(g) * bytes;
    Piece piece = {all.tile,         g,      g + groups < w.groups ? g + groups : w.groups, all.symmetric,
                   all.lines + from, nullptr};
    if (all.ahead != nullptr) piece.ahead = all.ahead + T * from;
    wide_block<KIND, T>(w, a, row, m, piece, results);
  }
  store_results<T>(results, m, out, ld_out);
}

template <int KIND, int T>
static bool symmetric(const Matrix& w, int tile) {
  if (KIND != kW4Zero) return false;
  const size_t count = static_cast<size_t>(w.groups) * kTile * T;
  const uint8_t* zeros = w.zeros + static_cast<size_t>(tile) * w.groups * kTile;
  const __m128i eight = _mm_set1_epi8(8);
  for (size_t i = 0; i < count; i += kTile)
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)(zeros + i)), eight)) != 0xffff) return false;
  return true;
}

// The 4-bit codes of T tiles as bytes, `count` lines from `line` on, where those of the next tile are tile_bytes
// further: for every four inputs a line of each tile.
template <int T>
static void unpack_panel(const uint8_t* line, size_t tile_bytes, int count, uint8_t* panel) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int i = 0; i < count; ++i, line += 64, panel += 2 * T * 64)
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const __m512i v = _mm512_load_si512(line + t * tile_bytes);
      _mm512_store_si512(panel + t * 64, _mm512_and_si512(v, nibble));
      _mm512_store_si512(panel + (T + t) * 64, _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    }
}

// Whole blocks of rows [row, end) against T tiles of 4-bit codes. Of the tiles, kPieceInputs inputs at a time become
// bytes that stay in L1 while all rows pass by.
template <int KIND, int T>
static void panel_rows(const Matrix& w, const Activations& a, int row, int end, const Piece& piece, uint8_t* scratch,
                       float* out, ptrdiff_t ld_out) {
  float* results = reinterpret_cast<float*>(scratch + static_cast<size_t>(kPieceInputs) * kTile * T);
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * 8;
  const int blocks = (end - row) / kRowBlock, slice = kPieceInputs / w.group;
  for (int i = 0; i < (end - row) * T; ++i) store(results + i * kTile, zero());
  for (int g = 0; g < w.groups; g += slice) {
    const int stop = g + slice < w.groups ? g + slice : w.groups, lines = (stop - g) * w.group / 8;
    const size_t from = static_cast<size_t>(g) * w.group * 8;
    unpack_panel<T>(piece.lines + from, tile_bytes, lines, scratch);
    const int share = (lines * T + blocks - 1) / blocks;
    for (int block = 0; block < blocks; ++block) {
      for (int i = block * share; i < (block + 1) * share; ++i)
        __builtin_prefetch(piece.ahead + i % T * tile_bytes + from + i / T * 64, 0, 2);
      const Piece bytes = {piece.tile, g, stop, piece.symmetric, scratch, nullptr};
      for (int pass = 0; pass < kRowBlock; pass += kWideRows)
        wide_piece<KIND, kWideRows, T, true>(w, a, row + block * kRowBlock, pass, bytes,
                                             results + (block * kRowBlock + pass) * T * kTile);
    }
  }
  store_results<T>(results, end - row, out, ld_out);
}

// All rows against tiles [tile, tile + T); `ahead` are the codes that will be wanted next.
template <int KIND, int T>
static void all_rows(const Matrix& w, const Activations& a, int tile, const uint8_t* ahead, uint8_t* scratch,
                     float* out, ptrdiff_t ld_out) {
  using Narrow = void (*)(const Matrix&, const Activations&, int, int, float*, ptrdiff_t);
  static constexpr Narrow narrow[] = {narrow_tile<KIND, 1>, narrow_tile<KIND, 2>, narrow_tile<KIND, 3>};
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * (has_bytes(KIND) ? 16 : 8);
  Piece piece = {tile, 0, w.groups, false, w.lines + tile * tile_bytes, ahead};
  if (a.rows > kNarrowRows) piece.symmetric = symmetric<KIND, T>(w, tile);
  int row = 0;
  if (!has_bytes(KIND) && a.rows > kPanelRows) {
    const int whole = a.rows / kRowBlock * kRowBlock;
    for (int end; row < whole; row = end) {
      end = row + kMostRows < whole ? row + kMostRows : whole;
      panel_rows<KIND, T>(w, a, row, end, piece, scratch, out + row * ld_out, ld_out);
    }
  }
  for (; row < a.rows; row += kRowBlock) {
    const int m = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
    float* to = out + row * ld_out;
    if (m <= kNarrowRows) {
      for (int t = 0; t < T; ++t) narrow[m - 1](w, a, row, tile + t, to + t * kTile, ld_out);
      continue;
    }
    wide_row_block<KIND, T>(w, a, row, m, piece, to, ld_out);
    piece.ahead = nullptr;
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

// A panel of two tiles, and results of the rows that share it.
static size_t matmul_scratch_bytes(int) {
  return static_cast<size_t>(kPieceInputs) * 2 * kTile + sizeof(float) * kMostRows * 2 * kTile;
}
