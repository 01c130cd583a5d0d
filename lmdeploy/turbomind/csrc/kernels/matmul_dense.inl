// Products of 16-bit weights with float multiply-adds, written once on Vec: float16 on every instruction set, bfloat16
// where there is no product of it. Included after small.inl.
//
// The weights of a line become floats in registers, exactly; activations are floats, [k][rows of the block]. The sums
// of a row and a channel run in one chain, or two for even and odd inputs where there are registers for them; any
// number of rows takes them in the same order.

// What a pass over a tile asks memory for: `step` bytes further with each line.
struct Ahead {
  const uint8_t* at;
  int step;
};

// Few products keep up with memory, and lines are best asked for a little ahead and straight into L1; with more of them
// the requests have to be far ahead, because memory must never wait for the products.
constexpr int kNearAhead = 4096, kFarAhead = 16384;  // bytes

// The weights of 16 channels for inputs 2 i and 2 i + 1.
template <int KIND>
INLINE void load_pair(const uint8_t* line, Vec& even, Vec& odd) {
  if (KIND == kFp16) {
    even = load_half(reinterpret_cast<const uint16_t*>(line));
    odd = load_half(reinterpret_cast<const uint16_t*>(line) + kTile);
  } else {
    load_bf16_pair(line, even, odd);
  }
}

// Sums of M rows of a block of `rows` go on over `lines` lines of a tile; `values` and `sums` ([M][2]) begin at the
// first of these rows.
template <int KIND, int M>
static void dense_span(const uint8_t* line, int lines, const float* values, int rows, Ahead ahead, Vec* sums) {
  const int stride = kDenseRows >= kRowBlock ? M : rows;
  Vec first[M], second[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    first[m] = sums[2 * m];
    second[m] = sums[2 * m + 1];
  }
  for (int i = 0; i < lines; ++i) {
    if (M <= 2) __builtin_prefetch(ahead.at, 0, 3);
    if (M > 2) __builtin_prefetch(ahead.at, 0, 2);
    ahead.at += ahead.step;
    Vec even, odd;
    load_pair<KIND>(line, even, odd);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) first[m] = fma(even, splat(values[m]), first[m]);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Vec& sum = kDenseChains == 2 ? second[m] : first[m];
      sum = fma(odd, splat(values[stride + m]), sum);
    }
    line += 64;
    values += 2 * stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    sums[2 * m] = first[m];
    if (kDenseChains == 2) sums[2 * m + 1] = second[m];
  }
}

// The same for rows [begin, rows), kDenseRows at a time.
template <int KIND, int M>
static void dense_rows(const uint8_t* line, int lines, const float* values, int rows, int begin, Ahead ahead,
                       Vec* sums) {
  if constexpr (M > 0) {
    if (rows - begin < M) return dense_rows<KIND, M - 1>(line, lines, values, rows, begin, ahead, sums);
    for (; begin + M <= rows; begin += M)
      dense_span<KIND, M>(line, lines, values + begin, rows, ahead, sums + 2 * begin);
    dense_rows<KIND, M - 1>(line, lines, values, rows, begin, ahead, sums);
  }
}

// Where the rows of a block take several passes, a span of lines and their activations stays in L1 for all of them.
constexpr int kSpanLines = 128;

template <int KIND>
static void dense_tile(const uint8_t* line, int lines, const float* values, int rows, int ahead, float* out,
                       ptrdiff_t ld_out) {
  Vec sums[2 * kRowBlock];
  for (int i = 0; i < 2 * rows; ++i) sums[i] = zero();
  const int span = rows <= kDenseRows ? lines : kSpanLines;
  for (int i = 0; i < lines; i += span) {
    const uint8_t* at = line + static_cast<size_t>(i) * 64;
    dense_rows<KIND, kDenseRows>(at, lines - i < span ? lines - i : span, values + static_cast<size_t>(i) * 2 * rows,
                                 rows, 0, {at + ahead, 64}, sums);
  }
  for (int m = 0; m < rows; ++m) store(out + m * ld_out, add(sums[2 * m], sums[2 * m + 1]));
}

// One pair of inputs of m rows: [m][2] bfloat16 planes become [2][m] floats.
INLINE void widen_pairs(const uint16_t* hi, const uint16_t* lo, int m, float* values) {
  for (int r = 0; r < m; ++r) {
    uint32_t high, low = 0;
    __builtin_memcpy(&high, hi + 2 * r, 4);
    if (lo) __builtin_memcpy(&low, lo + 2 * r, 4);
    values[r] = float_of(high << 16) + float_of(low << 16);
    values[m + r] = float_of(high & 0xffff0000u) + float_of(low & 0xffff0000u);
  }
}

// bfloat16 activations of a block of m rows as floats: [k / 2][m][2] becomes [k][m].
static const float* widened(const Activations& a, int row, int m, float* values) {
  const size_t at = static_cast<size_t>(row) * a.k_padded;
  for (int k = 0; k < a.k_padded; k += 2) {
    const uint16_t *hi = a.bf_hi + at + k * m, *lo = a.bf_lo ? a.bf_lo + at + k * m : nullptr;
    if (m == kRowBlock)
      widen_pairs(hi, lo, kRowBlock, values + k * m);
    else
      widen_pairs(hi, lo, m, values + k * m);
  }
  return values;
}

// The tiles stay in L2 while all rows pass by.
template <int KIND>
static void matmul_dense(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out,
                         ptrdiff_t ld_out, void* scratch) {
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * 32;
  const int ahead = a.rows <= 2 ? kNearAhead : kFarAhead;
  for (int row = 0; row < a.rows; row += kRowBlock) {
    const int rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
    const float* values = KIND == kFp16 ? a.f32 + static_cast<size_t>(row) * a.k_padded
                                        : widened(a, row, rows, static_cast<float*>(scratch));
    for (int tile = tile_begin; tile < tile_end; ++tile)
      dense_tile<KIND>(w.lines + tile * tile_bytes, w.k_padded / 2, values, rows, ahead,
                       out + row * ld_out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile, ld_out);
  }
}
