// Products of bfloat16 weights with VDPBF16PS: one weight tile against up to eight rows at a time.
//
// A tile is one sequential stream of lines, so a thread that walks its tiles in order reads memory at full speed. The
// sums of a row and a channel run in two chains, which any number of rows takes in the same order: with one plane of
// activations even and odd lines, with two planes the high and the low one.

INLINE void dot_bf16(Vec& sum, __m512i weights, const uint16_t* activations) {
  typedef int32_t __attribute__((may_alias)) word;
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const word*>(activations)));
}

constexpr bool near(int rows, int planes) { return rows * planes <= 4; }  // see kNearAhead

// Rows [row, row + M) of one block against one tile.
template <int M, int PLANES>
static void bf16_tile(const Matrix& w, const Activations& a, int row, int tile, Ahead ahead, float* out,
                      ptrdiff_t ld_out) {
  constexpr bool kNear = near(M, PLANES);
  const int lines = w.k_padded / 2;
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * lines * 64;
  const uint16_t* hi = a.bf_hi + static_cast<size_t>(row) * a.k_padded;
  const uint16_t* lo = PLANES == 2 ? a.bf_lo + static_cast<size_t>(row) * a.k_padded : nullptr;
  Vec first[M], second[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) first[m] = second[m] = zero();
  for (int i = 0; i + 2 <= lines; i += 2) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      if (kNear) __builtin_prefetch(ahead.at, 0, 3);
      if (!kNear) __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.step;
      const __m512i v = _mm512_load_si512(line);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        if (PLANES == 2) {
          dot_bf16(first[m], v, hi + m * 2);
          dot_bf16(second[m], v, lo + m * 2);
        } else {
          dot_bf16(j == 0 ? first[m] : second[m], v, hi + m * 2);
        }
      }
      line += 64;
      hi += 2 * M;
      if (PLANES == 2) lo += 2 * M;
    }
  }
  if (lines % 2 != 0) {
    const __m512i v = _mm512_load_si512(line);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      dot_bf16(first[m], v, hi + m * 2);
      if (PLANES == 2) dot_bf16(second[m], v, lo + m * 2);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) store(out + m * ld_out, add(first[m], second[m]));
}

template <int PLANES>
static void bf16_block(const Matrix& w, const Activations& a, int row, int tile, Ahead ahead, float* out,
                       ptrdiff_t ld_out) {
  using Kernel = void (*)(const Matrix&, const Activations&, int, int, Ahead, float*, ptrdiff_t);
  static constexpr Kernel kernels[kRowBlock] = {bf16_tile<1, PLANES>, bf16_tile<2, PLANES>, bf16_tile<3, PLANES>,
                                                bf16_tile<4, PLANES>, bf16_tile<5, PLANES>, bf16_tile<6, PLANES>,
                                                bf16_tile<7, PLANES>, bf16_tile<8, PLANES>};
  const int rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
  kernels[rows - 1](w, a, row, tile, ahead, out, ld_out);
}

// Each tile stays in L2 while all rows pass by. With several blocks of rows each pass fetches its share of the next
// tile, so that the first block does not wait for memory while the others leave it idle.
static void matmul_bf16(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out,
                        ptrdiff_t ld_out) {
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * 32;
  const int blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  const int planes = a.bf_lo != nullptr ? 2 : 1;
  const auto block = planes == 2 ? bf16_block<2> : bf16_block<1>;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    const uint8_t* lines = w.lines + tile * tile_bytes;
    float* to = out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile;
    for (int i = 0; i < blocks; ++i) {
      Ahead ahead = {lines + (near(a.rows, planes) ? kNearAhead : kFarAhead), 64};
      if (blocks > 1) ahead = {lines + tile_bytes + i * (tile_bytes / blocks), 64 / blocks};
      block(w, a, i * kRowBlock, tile, ahead, to + i * kRowBlock * ld_out, ld_out);
    }
  }
}
