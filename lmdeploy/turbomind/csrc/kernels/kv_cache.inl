// Keys and values into the paged cache: rotation and rounding, written once on Vec. Included after small.inl.

constexpr int kWordTop = 16383;  // largest code of 16 bits

// +-1 for each of 64 neighbouring dimensions. The pattern is a bent function: its Hadamard transform is flat, so
// neither one strong channel nor an equal shift of all channels stays in one place.
struct Signs {
  float at[64];
};
constexpr Signs make_signs() {
  Signs s{};
  for (int d = 0; d < 64; ++d) {
    const int both = (d >> 3) & d & 7;
    s.at[d] = ((both ^ (both >> 1) ^ (both >> 2)) & 1) != 0 ? -1.0f : 1.0f;
  }
  return s;
}
static constexpr Signs kSigns = make_signs();

// One butterfly of lanes S apart: sums in the lower ones, differences in the upper.
template <int S>
INLINE Vec butterfly(Vec v) {
  alignas(64) static const float signs[3 * 16] = {1, 1, 1,  1,  1,  1,  1,  1,  -1, -1, -1, -1, -1, -1, -1, -1,
                                                  1, 1, 1,  1,  -1, -1, -1, -1, 1,  1,  1,  1,  -1, -1, -1, -1,
                                                  1, 1, -1, -1, 1,  1,  -1, -1, 1,  1,  -1, -1, 1,  1,  -1, -1};
  alignas(64) static const float ones[16] = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
  const float* sign = S == 1 ? ones : signs + (S == 8 ? 0 : S == 4 ? 16 : 32);
  return fma(v, load(sign), swap_lanes<S>(v));
}

// Hadamard transforms (without their factor) of blocks of `size` values, a power of two from 16 on.
static void hadamard(float* x, int count, int size) {
  for (int d = 0; d < count; d += kTile) {
    store(x + d, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + d))))));
  }
  for (int step = kTile; step < size; step *= 2)
    for (int d = 0; d < count; d += kTile) {
      if (d & step) continue;
      const Vec a = load(x + d), b = load(x + d + step);
      store(x + d, add(a, b));
      store(x + d + step, sub(a, b));
    }
}

INLINE int hadamard_size(int head_dim) { return head_dim & -head_dim; }

static void scale_signs(float* x, int count, float factor) {
  for (int d = 0; d < count; d += kTile) store(x + d, mul(load(x + d), mul(load(kSigns.at + d % 64), splat(factor))));
}

static void rotate(float* head, int head_dim) {
  const int size = hadamard_size(head_dim);
  scale_signs(head, head_dim, 1.0f / __builtin_sqrtf(static_cast<float>(size)));
  hadamard(head, head_dim, size);
}
static void rotate_back(float* head, int head_dim) {
  const int size = hadamard_size(head_dim);
  hadamard(head, head_dim, size);
  scale_signs(head, head_dim, 1.0f / __builtin_sqrtf(static_cast<float>(size)));
}

// ---- rounding one token's head ----

// bfloat16 bits of the nearest value that is not less (not more) than x.
INLINE uint16_t bf16_above(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits >> 31 ? bits : bits + 0xffff) >> 16);
}
INLINE uint16_t bf16_below(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits >> 31 ? bits + 0xffff : bits) >> 16);
}

struct Rounded {
  uint16_t scale, offset;  // bfloat16; both NaN when a value is not finite
  int16_t codes[kMaxHeadDim];
};
constexpr uint16_t kNanBf16 = 0x7fc0;

// `levels` codes from 0 on above an offset; 0: codes on both sides of zero.
INLINE void round_head(const float* x, int count, int levels, Rounded& r) {
  Vec high = splat(-kInfinity), low = splat(kInfinity);
  uint32_t bad = 0;
  for (int d = 0; d < count; d += kTile) {
    const Vec v = load(x + d);
    bad |= mask_not_less(abs(v), splat(kInfinity));
    high = max(v, high);
    low = min(v, low);
  }
  const float top = reduce_max(high), bottom = -reduce_max(sub(zero(), low));
  r.offset = levels > 0 ? bf16_below(bottom) : 0;
  const float offset = float_of(static_cast<uint32_t>(r.offset) << 16);
  const float widest = levels > 0 ? top - offset : top > -bottom ? top : -bottom;
  const float range = levels > 0 ? static_cast<float>(levels) : static_cast<float>(kWordTop);
  const bool nan = bad || !(widest <= __FLT_MAX__), empty = nan || widest < 1e-30f;
  r.scale = nan ? kNanBf16 : empty ? 0 : bf16_above(widest / range);
  if (nan) r.offset = kNanBf16;
  const float inverse = empty ? 0.0f : 1.0f / float_of(static_cast<uint32_t>(r.scale) << 16);
  const Vec least = splat(levels > 0 ? 0.0f : -range), most = splat(range);
  for (int d = 0; d < count; d += kTile) {
    const Vec code = mul(sub(load(x + d), splat(offset)), splat(inverse));
    store_shorts(r.codes + d, to_int(empty ? zero() : min(max(code, least), most)));
  }
}

INLINE int levels_of(const KvLayer& kv) { return kv.bits == 16 ? 0 : (1 << kv.bits) - 1; }

static uint8_t* head_base(const KvLayer& kv, int kv_head, int block) {
  return kv.base + block * kv.block_stride + kv_head * kv.head_stride;
}
// Scales of keys; those of values, then offsets, follow block_size further on each.
INLINE uint16_t* factors_of(const KvLayer& kv, uint8_t* head) {
  return reinterpret_cast<uint16_t*>(head + kv.block_size / kTile * (kv.key_tile + kv.value_tile));
}

static void store_key_codes(const KvLayer& kv, uint8_t* tile, int lane, const int16_t* codes) {
  uint8_t* at = tile + lane * (kv.bits == 16 ? 4 : 2);
  for (int d = 0; d < kv.head_dim; d += kv.bits == 4 ? 4 : 2) {
    if (kv.bits == 16) {
      __builtin_memcpy(at + d * 32, codes + d, 4);
    } else if (kv.bits == 8) {
      at[d * 16] = static_cast<uint8_t>(codes[d]);
      at[d * 16 + 1] = static_cast<uint8_t>(codes[d + 1]);
    } else {
      at[d * 8] = static_cast<uint8_t>(codes[d] | codes[d + 2] << 4);
      at[d * 8 + 1] = static_cast<uint8_t>(codes[d + 1] | codes[d + 3] << 4);
    }
  }
}

static void store_value_codes(const KvLayer& kv, uint8_t* tile, int lane, const int16_t* codes) {
  const int line = kv.bits == 16 ? 64 : 32, unit = line / 32;
  const int run = kv.bits == 4 ? 2 * kTile : kTile;  // dimensions that lie in one run of 8 lines
  for (int d = 0; d < kv.head_dim; d += run) {
    uint8_t* at = tile + d / run * 8 * line + lane / 2 * line + lane % 2 * unit;
    for (int i = 0; i < kTile; ++i, at += 2 * unit) {
      if (kv.bits == 16) {
        __builtin_memcpy(at, codes + d + i, 2);
      } else if (kv.bits == 8) {
        *at = static_cast<uint8_t>(codes[d + i]);
      } else {
        const int upper = d + kTile < kv.head_dim ? codes[d + kTile + i] : 0;
        *at = static_cast<uint8_t>(codes[d + i] | upper << 4);
      }
    }
  }
}

static void store_kv(const KvLayer& kv, int kv_head, int block, int slot, const float* key, const float* value) {
  uint8_t* head = head_base(kv, kv_head, block);
  const int tile = slot / kTile, lane = slot % kTile, size = kv.block_size;
  uint16_t* factors = factors_of(kv, head);
  alignas(64) float x[kMaxHeadDim];
  Rounded r;
  for (int part = 0; part < 2; ++part) {
    __builtin_memcpy(x, part == 0 ? key : value, kv.head_dim * sizeof(float));
    rotate(x, kv.head_dim);
    round_head(x, kv.head_dim, levels_of(kv), r);
    factors[part * size + slot] = r.scale;
    if (kv.bits < 16) factors[(2 + part) * size + slot] = r.offset;
    if (part == 0) {
      store_key_codes(kv, head + tile * kv.key_tile, lane, r.codes);
    } else {
      store_value_codes(kv, head + size / kTile * kv.key_tile + tile * kv.value_tile, lane, r.codes);
    }
  }
}
