// Everything but matrix products and attention, written once on Vec. Included inside an instruction set's namespace,
// after its vec_*.h. Sums run in sixteen lanes from the first value to the last and are combined at the end.

constexpr float kInfinity = __builtin_inff();

// e^x with a relative error near 1e-7; exactly 0 below -87.3, infinity above 88.7.
INLINE Vec exp(Vec x) {
  const Vec inside = max(splat(-88.0f), min(splat(89.0f), x));
  const Vec n = round(mul(inside, splat(1.44269504f)));
  Vec r = fnma(n, splat(0.693147182f), inside);
  r = fnma(n, splat(-1.90465430e-9f), r);
  // e^r = 1 + r + r^2 p(r); p is the Chebyshev fit of degree 4 on |r| <= log(2) / 2.
  Vec p = fma(splat(1.393373357e-3f), r, splat(8.363235742e-3f));
  p = fma(p, r, splat(4.166646302e-2f));
  p = fma(p, r, splat(1.666657627e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return zero_below(x, -87.3f, scale2(p, n));
}
INLINE float exp1(float x) { return first_lane(exp(splat(x))); }

// y[i] = op(Vec at x[i], Vec at w[i]) for n values.
template <typename Op>
INLINE void map2(const float* x, const float* w, int n, float* y, Op op) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, op(load(x + i), load(w + i)));
  if (i < n) store_n(y + i, op(load_n(x + i, n - i), load_n(w + i, n - i)), n - i);
}

static void rms_norm(const float* x, const float* weight, float offset, float eps, int n, float* y) {
  Vec s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    const Vec a = load(x + i), b = load(x + i + 16), c = load(x + i + 32), d = load(x + i + 48);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i < n; i += 16) {
    const Vec a = n - i < 16 ? load_n(x + i, n - i) : load(x + i);
    s0 = fma(a, a, s0);
  }
  const float squares = reduce_add(add(add(s0, s1), add(s2, s3)));
  const float root = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
  const Vec factor = splat(squares <= __FLT_MAX__ ? root : __builtin_nanf("")), shift = splat(offset);
  map2(x, weight, n, y, [=](Vec a, Vec w) { return mul(mul(a, factor), add(shift, w)); });
}

static void rope(float* head, const float* cos, const float* sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  int d = 0;
  for (; d + 16 <= half; d += 16) {
    const Vec a = load(head + d), b = load(head + d + half), c = load(cos + d), s = load(sin + d);
    store(head + d, sub(mul(a, c), mul(b, s)));
    store(head + d + half, add(mul(b, c), mul(a, s)));
  }
  for (; d < half; ++d) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cos[d] - b * sin[d];
    head[d + half] = b * cos[d] + a * sin[d];
  }
}

static void silu_mul(const float* gate, const float* up, int n, float* y) {
  const Vec one = splat(1.0f);
  map2(gate, up, n, y, [=](Vec g, Vec u) { return mul(div(g, add(one, exp(sub(zero(), g)))), u); });
}

// 0.5 x (1 + tanh(t)) = x / (1 + exp(-2 t))
static void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) {
  const Vec one = splat(1.0f), cubic = splat(0.044715f), factor = splat(-2.0f * 0.7978845608f);
  map2(gate, up, n, y, [=](Vec g, Vec u) {
    const Vec t = mul(factor, fma(mul(mul(cubic, g), g), g, g));
    return mul(div(g, add(one, exp(t))), u);
  });
}

static void gelu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.7071067812f)) * up[i];
}

static void add_scaled(float* x, const float* y, float scale, int n) {
  const Vec factor = splat(scale);
  map2(x, y, n, x, [=](Vec a, Vec b) { return fma(factor, b, a); });
}

// ---- activations for a matmul ----

static int rows_of_block(const Activations& a, int row) {
  const int left = a.rows - row / kRowBlock * kRowBlock;
  return left < kRowBlock ? left : kRowBlock;
}

INLINE Vec load_padded(const float* x, int count) {
  return count >= 16 ? load(x) : count > 0 ? load_n(x, count) : zero();
}

// Where scale, sum, parts and second of a group of a row lie.
INLINE size_t group_entry(const Activations& a, int row, int g) {
  return static_cast<size_t>(row / kRowBlock) * kRowBlock * a.groups + static_cast<size_t>(g) * rows_of_block(a, row) +
         row % kRowBlock;
}

// The groups of one span: what they are multiplied by is found for all of them together.
struct SpanScale {
  float inverse, scale;
  bool empty, second;
};
static SpanScale span_scale(const float* x, int count, int inputs, const Activations& a) {
  Vec largest = zero(), squares = zero();
  uint32_t bad = 0;
  for (int i = 0; i < count; i += 16) {
    const Vec value = load_padded(x + i, count - i), magnitude = abs(value);
    bad |= mask_not_less(magnitude, splat(kInfinity));
    largest = max(magnitude, largest);
    squares = fma(value, value, squares);
  }
  const float top = reduce_max(largest);
  const bool empty = bad || top < 1e-30f;
  const bool second = a.lo && !(top <= a.threshold * __builtin_sqrtf(reduce_add(squares) / static_cast<float>(inputs)));
  const float inverse = empty ? 0.0f : (second ? 16256.0f : 127.0f) / top;
  return {inverse, bad ? __builtin_nanf("") : empty ? 0.0f : top / 127.0f, empty, second};
}

static void prepare_group(const float* x, int count, const Activations& a, int row, int g, const SpanScale& s) {
  const int m = rows_of_block(a, row), stride = 4 * m;
  const size_t at = static_cast<size_t>(row / kRowBlock) * kRowBlock * a.k_padded +
                    static_cast<size_t>(g) * a.group * m + row % kRowBlock * 4;
  const Vec inverse = splat(s.inverse);
  IntVec high_sum = zero_ints(), low_sum = zero_ints();
  for (int i = 0; i < a.group; i += 16) {
    const Vec value = s.empty ? zero() : load_padded(x + i, count - i);
    const IntVec whole = to_int(mul(value, inverse));
    const IntVec high = s.second ? high_plane(whole) : whole, low = s.second ? low_plane(whole, high) : zero_ints();
    high_sum = add_ints(high_sum, high);
    low_sum = add_ints(low_sum, low);
    store_dwords(high, a.hi + at + i * m, stride);
    if (a.lo) store_dwords(low, a.lo + at + i * m, stride);
  }
  const int32_t high = reduce_ints(high_sum), low = reduce_ints(low_sum);
  const size_t entry = group_entry(a, row, g);
  a.scale[entry] = s.scale;
  a.sum[entry] = static_cast<float>(high * 128 + low) * (1.0f / 128);
  a.parts[entry] = static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (static_cast<uint32_t>(low) & 0xffff));
  if (a.lo) a.second[entry] = s.second;
}

static int clamped(int n, int most) { return n < 0 ? 0 : n < most ? n : most; }

static float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
// Writes eight pairs, or the first of them, `stride` values apart.
INLINE void store_pairs(const uint32_t* pairs, int count, uint16_t* out, int stride) {
  if (count == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) __builtin_memcpy(out + i * stride, &pairs[i], 4);
    return;
  }
  for (int i = 0; i < count; ++i) __builtin_memcpy(out + i * stride, &pairs[i], 4);
}

static void prepare_bf16(const float* x, int count, const Activations& a, int row, int k_begin, int k_end) {
  const int m = rows_of_block(a, row);
  const size_t block = static_cast<size_t>(row / kRowBlock) * kRowBlock * a.k_padded + row % kRowBlock * 2;
  for (int k = k_begin; k < k_end; k += 16) {
    const Vec v = load_padded(x + (k - k_begin), count - (k - k_begin));
    const int pairs = k_end - k < 16 ? (k_end - k) / 2 : 8;
    const size_t at = block + static_cast<size_t>(k) * m;
    uint32_t hi[8], lo[8];
    if (a.bf_lo) {
      split_bf16(v, hi, lo);
      store_pairs(lo, pairs, a.bf_lo + at, 2 * m);
    } else {
      round_bf16(v, hi);
    }
    store_pairs(hi, pairs, a.bf_hi + at, 2 * m);
  }
}

static void prepare_f32(const float* x, int count, const Activations& a, int row, int k_begin, int k_end) {
  const int m = rows_of_block(a, row);
  float* to = a.f32 + static_cast<size_t>(row / kRowBlock) * kRowBlock * a.k_padded + row % kRowBlock;
  for (int k = k_begin; k < k_end; ++k) to[static_cast<size_t>(k) * m] = k - k_begin < count ? x[k - k_begin] : 0;
}

static void prepare(const float* x, const Activations& a, int row, int k_begin, int count) {
  const int end = k_begin + count == a.k ? a.k_padded : k_begin + count;
  if (a.hi)
    for (int span = k_begin; span < end; span += kScaled) {
      const int stop = span + kScaled < end ? span + kScaled : end, filled = k_begin + count;
      const SpanScale scale = span_scale(x + (span - k_begin), clamped(filled - span, kScaled), stop - span, a);
      for (int k = span; k < stop; k += a.group)
        prepare_group(x + (k - k_begin), clamped(filled - k, a.group), a, row, k / a.group, scale);
    }
  if (a.bf_hi) prepare_bf16(x, count, a, row, k_begin, end);
  if (a.f32) prepare_f32(x, count, a, row, k_begin, end);
}

// ---- one row of a matrix ----

static void gather_bf16(const Matrix& w, int row, float* out) {
  const uint8_t* lane = w.lines + static_cast<size_t>(row / kTile) * (w.k_padded / 2) * 64 + row % kTile * 4;
  for (int k = 0; k < w.k; ++k) {
    uint16_t value;
    __builtin_memcpy(&value, lane + static_cast<size_t>(k / 2) * 64 + k % 2 * 2, 2);
    out[k] = float_of(static_cast<uint32_t>(value) << 16);
  }
}

static void gather_fp16(const Matrix& w, int row, float* out) {
  const uint16_t* lane =
      reinterpret_cast<const uint16_t*>(w.lines) + static_cast<size_t>(row / kTile) * w.k_padded * kTile + row % kTile;
  for (int k = 0; k < w.k; ++k) out[k] = half_to_float(lane[static_cast<size_t>(k) * kTile]);
}

static void gather_row(const Matrix& w, int row, float* out) {
  if (w.kind == kBf16) return gather_bf16(w, row, out);
  if (w.kind == kFp16) return gather_fp16(w, row, out);
  const bool bytes = w.kind == kInt8 || w.kind == kInt8Min;
  const int per_line = bytes ? 4 : 8;
  const uint8_t* lane = w.lines + static_cast<size_t>(row / kTile) * (w.k_padded / per_line) * 64 + row % kTile * 4;
  for (int g = 0; g < w.groups; ++g) {
    const size_t entry = (static_cast<size_t>(row / kTile) * w.groups + g) * kTile + row % kTile;
    const float scale = half_to_float(w.scales[entry]);
    const float least = w.mins != nullptr ? half_to_float(w.mins[entry]) : 0.0f;
    const int zero_code = w.kind == kInt8 ? 128 : w.kind == kW4Zero ? w.zeros[entry] : 0;
    const int end = (g + 1) * w.group < w.k ? (g + 1) * w.group : w.k;
    for (int k = g * w.group; k < end; ++k) {
      const uint8_t byte = lane[static_cast<size_t>(k / per_line) * 64 + k % 4];
      const int code = bytes ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
      out[k] = static_cast<float>(code - zero_code) * scale + least;
    }
  }
}

// ---- sampling ----

static int32_t first_equal(const float* x, int n, float value, bool nan) {
  for (int i = 0;; i += 16) {
    const int left = n - i < 16 ? n - i : 16;
    const Vec v = left < 16 ? load_n(x + i, left) : load(x + i);
    const uint32_t hits = (nan ? mask_nan(v) : mask_ge(v, splat(value))) & ((1u << left) - 1);
    if (hits) return i + __builtin_ctz(hits);
  }
}

static float max(const float* x, int n, int32_t* index) {
  Vec largest = splat(-kInfinity);
  uint32_t nan = 0;
  for (int i = 0; i < n; i += 16) {
    // Repeating the last value fills the vector without changing the answer.
    const Vec v = n - i < 16 ? keep(load_n(x + i, n - i), 0, n - i, splat(x[n - 1])) : load(x + i);
    nan |= mask_nan(v);
    largest = max(largest, v);
  }
  const float value = nan ? __builtin_nanf("") : reduce_max(largest);
  *index = first_equal(x, n, value, nan != 0);
  return value;
}

static double sum_exp(const float* x, int n, float max, float scale, float* y) {
  const Vec shift = splat(max), factor = splat(scale);
  Doubles sum = zero_doubles();
  for (int i = 0; i < n; i += 16) {
    const int left = n - i < 16 ? n - i : 16;
    const Vec v = left < 16 ? load_n(x + i, left) : load(x + i);
    const Vec e = keep(exp(mul(sub(v, shift), factor)), 0, left, zero());
    sum = add_doubles(sum, e);
    if (y && left == 16) store(y + i, e);
    if (y && left < 16) store_n(y + i, e, left);
  }
  return reduce_doubles(sum);
}

static int collect(const float* x, int n, float threshold, int32_t* index, int limit) {
  const Vec bound = splat(threshold);
  int count = 0;
  for (int i = 0; i < n; i += 16) {
    const int left = n - i < 16 ? n - i : 16;
    const Vec v = left < 16 ? load_n(x + i, left) : load(x + i);
    for (uint32_t hits = mask_ge(v, bound) & ((1u << left) - 1); hits; hits &= hits - 1) {
      if (count < limit) index[count] = i + __builtin_ctz(hits);
      ++count;
    }
  }
  return count;
}

static void block_max(const float* x, int n, int size, float* y) {
  for (int begin = 0; begin < n; begin += size) {
    const int end = begin + size < n ? begin + size : n;
    Vec largest = splat(-kInfinity);
    for (int i = begin; i < end; i += 16) {
      const int left = end - i;
      largest = max(largest, left < 16 ? keep(load_n(x + i, left), 0, left, largest) : load(x + i));
    }
    *y++ = reduce_max(largest);
  }
}

// cap * tanh(s / cap), tanh(t) = 1 - 2 / (exp(2 t) + 1)
INLINE Vec capped(Vec score, float softcap) {
  const Vec e = exp(mul(score, splat(2.0f / softcap)));
  return mul(splat(softcap), sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f)))));
}

static bool finish_logits(float* x, int n, float scale, float softcap) {
  const Vec factor = splat(scale), infinity = splat(kInfinity);
  uint32_t bad = 0;
  for (int i = 0; i < n; i += 16) {
    const int left = n - i;
    const Vec v = mul(left < 16 ? load_n(x + i, left) : load(x + i), factor);
    bad |= mask_not_less(abs(v), infinity);
    if (scale == 1 && softcap == 0) continue;
    const Vec y = softcap > 0 ? capped(v, softcap) : v;
    if (left < 16)
      store_n(x + i, y, left);
    else
      store(x + i, y);
  }
  return bad == 0;
}
