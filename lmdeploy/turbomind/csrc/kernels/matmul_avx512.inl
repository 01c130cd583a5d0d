// Matrix products with VPDPBUSD and VDPBF16PS: one weight tile against up to eight rows at a time.
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

INLINE void dot_bf16(Vec& sum, __m512i weights, const uint16_t* activations) {
  typedef int32_t __attribute__((may_alias)) word;
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const word*>(activations)));
}

template <int M>
static void bf16_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  const int lines = w.k_padded / 2;
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * lines * 64;
  const uint16_t* hi = a.bf_hi + static_cast<size_t>(row) * a.k_padded;
  const uint16_t* lo = a.bf_lo + static_cast<size_t>(row) * a.k_padded;
  Vec high[M], low[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) high[m] = low[m] = zero();
#pragma GCC unroll 2
  for (int i = 0; i < lines; ++i) {
    __builtin_prefetch(line + kAhead, 0, 3);
    const __m512i v = _mm512_load_si512(line);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      dot_bf16(high[m], v, hi + m * 2);
      dot_bf16(low[m], v, lo + m * 2);
    }
    line += 64;
    hi += 2 * M;
    lo += 2 * M;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) store(out + m * ld_out, add(high[m], low[m]));
}

static void bf16_block(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  using Kernel = void (*)(const Matrix&, const Activations&, int, int, float*, ptrdiff_t);
  static constexpr Kernel kernels[kRowBlock] = {bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>,
                                                bf16_tile<5>, bf16_tile<6>, bf16_tile<7>, bf16_tile<8>};
  const int rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
  kernels[rows - 1](w, a, row, tile, out, ld_out);
}

constexpr size_t kResident = size_t{256} << 10;  // bytes of tiles that stay in L2 while row blocks pass by

static void bf16_matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out,
                        ptrdiff_t ld_out) {
  const size_t tile_bytes = static_cast<size_t>(w.k_padded) * 32;
  const int at_once = tile_bytes < kResident ? static_cast<int>(kResident / tile_bytes) : 1;
  for (int begin = tile_begin; begin < tile_end; begin += at_once) {
    const int end = begin + at_once < tile_end ? begin + at_once : tile_end;
    for (int row = 0; row < a.rows; row += kRowBlock)
      for (int tile = begin; tile < end; ++tile)
        bf16_block(w, a, row, tile, out + row * ld_out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile, ld_out);
  }
}

static void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                   void* scratch) {
  if (w.kind == kBf16) return bf16_matmul(w, a, tile_begin, tile_end, out, ld_out);
  grouped_matmul(w, a, tile_begin, tile_end, out, ld_out, scratch);
}

// Two tiles of bytes (grouped_avx512.inl).
static size_t matmul_scratch_bytes(int k_padded) { return static_cast<size_t>(k_padded) * 2 * kTile + 64; }
