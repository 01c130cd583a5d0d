// Matrix products with SDOT: one weight tile against up to two rows at a time.
//
// A quarter of a weight line, four channels of four inputs, is one operand of SDOT; four inputs of a row, broadcast,
// the other. Bytes of eight bits are read as signed, code - 128.

constexpr int kQuarters = 4;
constexpr int kRowsAtOnce = 2;

// What turns the whole-number sums of one group of one tile into weights times activations.
template <int KIND>
struct Group {
  static constexpr bool kMins = KIND == kW4Min || KIND == kInt8Min;
  Vec factor, least;
  IntVec zero;  // code of weight 0, below what the sums were made of

  __attribute__((always_inline)) Group(const Matrix& w, size_t entry) {
    factor = mul(load_half(w.scales + entry), splat(1.0f / 128));
    if (kMins) least = load_half(w.mins + entry);
    zero = splat_int(KIND == kInt8Min ? -128 : 0);
    if (KIND == kW4Zero)
      for (int i = 0; i < kQuarters; ++i) {
        uint8_t bytes[8] = {};
        __builtin_memcpy(bytes, w.zeros + entry + 4 * i, 4);
        zero.v[i] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes)))));
      }
  }

  // whole: sum of code * (128 hi + lo)
  // Without the scale of the activations, which the groups of a span share.
  __attribute__((always_inline)) Vec add(Vec part, IntVec whole, const Activations& a, size_t at) const {
    const int32_t high = a.parts[at] >> 16, low = static_cast<int16_t>(a.parts[at]);
    const int32x4_t total = vdupq_n_s32(high * 128 + low);
    if (KIND == kW4Zero || KIND == kInt8Min)
      for (int i = 0; i < kQuarters; ++i) whole.v[i] = vmlsq_s32(whole.v[i], zero.v[i], total);
    part = fma(to_float(whole), factor, part);
    return kMins ? fma(least, splat(a.sum[at]), part) : part;
  }
};

INLINE int8x16_t four_inputs(const int8_t* plane) {
  int32_t word;
  __builtin_memcpy(&word, plane, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

// sums += one operand line times four inputs of M rows of one plane, which lie 4 bytes apart.
template <int M>
INLINE void dot_line(IntVec* sums, const int8x16_t* weights, const int8_t* plane) {
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m) {
    const int8x16_t inputs = four_inputs(plane + 4 * m);
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) sums[m].v[i] = vdotq_s32(sums[m].v[i], weights[i], inputs);
  }
}

// One group's sums of code * plane for M rows. `m_all` rows lie in the block.
template <int KIND, int M>
INLINE void dot_group(IntVec* sums, const uint8_t* line, int lines, const int8_t* plane, int m_all) {
  constexpr bool kBytes = KIND == kInt8 || KIND == kInt8Min;
  for (int l = 0; l < lines; ++l, line += 64) {
    int8x16_t weights[kQuarters], upper[kQuarters];
#pragma GCC unroll 4
    for (int i = 0; i < kQuarters; ++i) {
      const uint8x16_t codes = vld1q_u8(line + 16 * i);
      weights[i] = vreinterpretq_s8_u8(kBytes ? veorq_u8(codes, vdupq_n_u8(0x80)) : vandq_u8(codes, vdupq_n_u8(15)));
      if (!kBytes) upper[i] = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));
    }
    dot_line<M>(sums, weights, plane);
    plane += 4 * m_all;
    if (kBytes) continue;
    dot_line<M>(sums, upper, plane);
    plane += 4 * m_all;
  }
}

// Rows [row, row + M), all of one activation block.
template <int KIND, int M>
static void grouped_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  constexpr int kPerLine = KIND == kInt8 || KIND == kInt8Min ? 4 : 8;
  const int first = row / kRowBlock * kRowBlock, m_all = rows_of_block(a, row);
  const size_t start = static_cast<size_t>(first) * a.k_padded + 4 * static_cast<size_t>(row - first);
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * (w.k_padded / kPerLine) * 64;
  const int lines = w.group / kPerLine;
  Vec result[M], part[M];
  for (int m = 0; m < M; ++m) result[m] = part[m] = zero();
  for (int g = 0; g < w.groups; ++g, line += 64 * lines) {
    const size_t at = start + static_cast<size_t>(g) * w.group * m_all;
    IntVec high[M], low[M];
    for (int m = 0; m < M; ++m) high[m] = low[m] = zero_ints();
    dot_group<KIND, M>(high, line, lines, a.hi + at, m_all);
    if (a.lo) dot_group<KIND, M>(low, line, lines, a.lo + at, m_all);
    const Group<KIND> group(w, (static_cast<size_t>(tile) * w.groups + g) * kTile);
    for (int m = 0; m < M; ++m) {
      const IntVec whole = each_int([&](int i) { return vaddq_s32(vshlq_n_s32(high[m].v[i], 7), low[m].v[i]); });
      part[m] = group.add(part[m], whole, a, group_entry(a, row + m, g));
    }
    if ((g + 1) * w.group % kScaled != 0 && g + 1 != w.groups) continue;
    for (int m = 0; m < M; ++m) {
      result[m] = fma(part[m], splat(a.scale[group_entry(a, row + m, g)]), result[m]);
      part[m] = zero();
    }
  }
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

INLINE float bf16_value(const Activations& a, size_t at) {
  const float high = float_of(static_cast<uint32_t>(a.bf_hi[at]) << 16);
  return a.bf_lo ? high + float_of(static_cast<uint32_t>(a.bf_lo[at]) << 16) : high;
}

// Weights of 16 channels at inputs k and k + 1 of one line.
template <int KIND>
INLINE void widen_line(const uint8_t* line, Vec (&weights)[2]) {
  if (KIND == kFp16) {
    const auto* halves = reinterpret_cast<const uint16_t*>(line);
    weights[0] = load_half(halves);
    weights[1] = load_half(halves + kTile);
    return;
  }
  const auto* pairs = reinterpret_cast<const uint32_t*>(line);
  weights[0] = each([=](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(pairs + 4 * i), 16)); });
  weights[1] =
      each([=](int i) { return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(pairs + 4 * i), vdupq_n_u32(0xffff0000))); });
}

template <int KIND, int M>
static void dense_tile(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
  const int first = row / kRowBlock * kRowBlock, m_all = rows_of_block(a, row);
  const size_t block = static_cast<size_t>(first) * a.k_padded, r = static_cast<size_t>(row - first);
  const uint8_t* line = w.lines + static_cast<size_t>(tile) * (w.k_padded / 2) * 64;
  Vec result[M];
  for (int m = 0; m < M; ++m) result[m] = zero();
  for (int k = 0; k < w.k_padded; k += 2, line += 64) {
    Vec weights[2];
    widen_line<KIND>(line, weights);
    const size_t at = block + static_cast<size_t>(k) * m_all;
    for (int j = 0; j < 2; ++j)
      for (int m = 0; m < M; ++m) {
        const float value =
            KIND == kFp16 ? a.f32[at + static_cast<size_t>(j) * m_all + r + m] : bf16_value(a, at + 2 * (r + m) + j);
        result[m] = fma(weights[j], splat(value), result[m]);
      }
  }
  for (int m = 0; m < M; ++m) store(out + m * ld_out, result[m]);
}

template <int M>
static void some_rows(const Matrix& w, const Activations& a, int row, int tile, float* out, ptrdiff_t ld_out) {
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
      return dense_tile<kBf16, M>(w, a, row, tile, out, ld_out);
    case kFp16:
      return dense_tile<kFp16, M>(w, a, row, tile, out, ld_out);
  }
}

static void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                   void*) {
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    float* to = out + static_cast<ptrdiff_t>(tile - tile_begin) * kTile;
    int row = 0;
    for (; row + kRowsAtOnce <= a.rows; row += kRowsAtOnce)
      some_rows<kRowsAtOnce>(w, a, row, tile, to + row * ld_out, ld_out);
    if (row < a.rows) some_rows<1>(w, a, row, tile, to + row * ld_out, ld_out);
  }
}

static size_t matmul_scratch_bytes(int) { return 64; }
