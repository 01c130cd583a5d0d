// Cache and attention of the portable table: kv_cache.inl and attention.inl, one value at a time. Included in its
// namespace.

// ---- cache ----

constexpr int kWordTop = 16383;
constexpr uint16_t kNanBf16 = 0x7fc0;

// +1 or -1 for dimension d; period 64.
float sign_of(int d) {
  const int both = (d >> 3) & d & 7;
  return ((both ^ (both >> 1) ^ (both >> 2)) & 1) != 0 ? -1.0f : 1.0f;
}

// Without their factor, Hadamard transforms of blocks of the largest power of two that divides head_dim.
void hadamard(float* x, int head_dim) {
  const int size = head_dim & -head_dim;
  for (int step = 1; step < size; step *= 2)
    for (int d = 0; d < head_dim; ++d) {
      if (d & step) continue;
      const float a = x[d], b = x[d + step];
      x[d] = a + b;
      x[d + step] = a - b;
    }
}
void scale_signs(float* x, int head_dim) {
  const float factor = 1.0f / sqrtf(float(head_dim & -head_dim));
  for (int d = 0; d < head_dim; ++d) x[d] *= sign_of(d) * factor;
}
void rotate(float* head, int head_dim) {
  scale_signs(head, head_dim);
  hadamard(head, head_dim);
}
void rotate_back(float* head, int head_dim) {
  hadamard(head, head_dim);
  scale_signs(head, head_dim);
}

uint16_t bf16_above(float x) {
  const uint32_t bits = to_bits(x);
  return (bits >> 31 ? bits : bits + 0xffff) >> 16;
}
uint16_t bf16_below(float x) {
  const uint32_t bits = to_bits(x);
  return (bits >> 31 ? bits + 0xffff : bits) >> 16;
}

struct Rounded {
  uint16_t scale, offset;  // bfloat16
  int codes[kMaxHeadDim];
};

void round_head(const float* x, int count, int bits, Rounded& r) {
  float top = -kInfinity, bottom = kInfinity;
  bool finite = true;
  for (int d = 0; d < count; ++d) {
    finite = finite && fabsf(x[d]) < kInfinity;
    top = x[d] > top ? x[d] : top;
    bottom = x[d] < bottom ? x[d] : bottom;
  }
  const bool words = bits == 16;
  const float range = words ? float(kWordTop) : float((1 << bits) - 1), least = words ? -range : 0;
  r.offset = words ? 0 : bf16_below(bottom);
  const float offset = bf16_to_float(r.offset);
  const float widest = !words ? top - offset : top > -bottom ? top : -bottom;
  finite = finite && widest < kInfinity;
  const bool empty = !finite || widest < 1e-30f;
  r.scale = !finite ? kNanBf16 : empty ? 0 : bf16_above(widest / range);
  if (!finite) r.offset = kNanBf16;
  const float inverse = empty ? 0 : 1.0f / bf16_to_float(r.scale);
  for (int d = 0; d < count; ++d) {
    const float code = empty ? 0 : (x[d] - offset) * inverse;
    r.codes[d] = int(nearbyintf(code < least ? least : code > range ? range : code));
  }
}

uint8_t* head_base(const KvLayer& kv, int kv_head, int block) {
  return kv.base + block * kv.block_stride + kv_head * kv.head_stride;
}
uint16_t* factors_of(const KvLayer& kv, uint8_t* head) {
  return reinterpret_cast<uint16_t*>(head + kv.block_size / kTile * (kv.key_tile + kv.value_tile));
}

// Where a code lies: its first byte, and whether it is the upper nibble there.
struct Place {
  size_t byte;
  bool upper;
};
Place key_place(const KvLayer& kv, int slot, int d) {
  const size_t tile = size_t(slot / kTile) * kv.key_tile;
  const int word = slot % kTile * 2 + d % 2;
  if (kv.bits == 16) return {tile + size_t(d / 2 * 32 + word) * 2, false};
  if (kv.bits == 8) return {tile + d / 2 * 32 + word, false};
  return {tile + d / 4 * 32 + word, d / 2 % 2 == 1};
}
Place value_place(const KvLayer& kv, int slot, int d) {
  const size_t tile = size_t(kv.block_size / kTile) * kv.key_tile + size_t(slot / kTile) * kv.value_tile;
  const int line = slot % kTile / 2, word = d % kTile * 2 + slot % 2, run = d / kTile;
  if (kv.bits == 16) return {tile + size_t((run * 8 + line) * 32 + word) * 2, false};
  if (kv.bits == 8) return {tile + (run * 8 + line) * 32 + word, false};
  return {tile + (run / 2 * 8 + line) * 32 + word, run % 2 == 1};
}

int read_code(const KvLayer& kv, const uint8_t* head, Place at) {
  if (kv.bits == 16) {
    int16_t word;
    memcpy(&word, head + at.byte, 2);
    return word;
  }
  const uint8_t byte = head[at.byte];
  return kv.bits == 8 ? byte : at.upper ? byte >> 4 : byte & 15;
}
void write_code(const KvLayer& kv, uint8_t* head, Place at, int code) {
  if (kv.bits == 16) {
    const int16_t word = int16_t(code);
    memcpy(head + at.byte, &word, 2);
    return;
  }
  uint8_t& byte = head[at.byte];
  byte = uint8_t(at.upper ? byte | code << 4 : code);  // the lower nibble comes first
}

void store_kv(const KvLayer& kv, int kv_head, int block, int slot, const float* key, const float* value) {
  uint8_t* head = head_base(kv, kv_head, block);
  uint16_t* factors = factors_of(kv, head);
  float x[kMaxHeadDim];
  Rounded r;
  for (int part = 0; part < 2; ++part) {
    memcpy(x, part == 0 ? key : value, kv.head_dim * sizeof(float));
    rotate(x, kv.head_dim);
    round_head(x, kv.head_dim, kv.bits, r);
    factors[part * kv.block_size + slot] = r.scale;
    if (kv.bits < 16) factors[(2 + part) * kv.block_size + slot] = r.offset;
    for (int d = 0; d < kv.head_dim; ++d)
      write_code(kv, head, part == 0 ? key_place(kv, slot, d) : value_place(kv, slot, d), r.codes[d]);
  }
}

// ---- attention ----

// Sums of products are exact over kSpan dimensions or tokens; see attention_chunk.inl.
constexpr int kSpan = 64;
constexpr float kMostSum = 131000.0f;

struct Query {
  float unit, sum;
  int words[kMaxHeadDim];
};

// The scale of words of which the largest is `top` and whose sum in a span is at most `most`.
float word_unit(int bits, float top, float most) {
  const float high = top * (1.0f / 32767), even = most * (1.0f / kMostSum);
  return bits < 16 || high > even ? high : even;
}

void round_query(const float* q, int dim, int bits, Query& r) {
  float most = 0, top = 0;
  for (int begin = 0; begin < dim; begin += kSpan) {
    float sum = 0;
    for (int d = begin; d < dim && d < begin + kSpan; ++d) {
      sum += fabsf(q[d]);
      top = fabsf(q[d]) > top ? fabsf(q[d]) : top;
    }
    most = most != most || sum <= most ? most : sum;
  }
  const bool finite = most < kInfinity, empty = !finite || most < 1e-30f;
  r.unit = !finite ? NAN : empty ? 0 : word_unit(bits, top, most);
  const float inverse = empty ? 0 : 1.0f / r.unit;
  int32_t sum = 0;
  for (int d = 0; d < dim; ++d) {
    r.words[d] = empty ? 0 : int(nearbyintf(q[d] * inverse));
    sum += r.words[d];
  }
  r.sum = r.unit * float(sum);
}

uint8_t* head_of(const AttentionItem& item, int token) {
  return head_base(*item.kv, item.kv_head, item.blocks[token / item.kv->block_size]);
}

// Factor `which` of a token: scale of its key, of its value, offset of its key, of its value.
float factor_of(const AttentionItem& item, int token, int which) {
  const int size = item.kv->block_size;
  return bf16_to_float(factors_of(*item.kv, head_of(item, token))[which * size + token % size]);
}

float score(const AttentionItem& item, const Query& q, int token) {
  const KvLayer& kv = *item.kv;
  const uint8_t* head = head_of(item, token);
  float total = 0;
  for (int begin = 0; begin < kv.head_dim; begin += kSpan) {
    int32_t sum = 0;
    for (int d = begin; d < kv.head_dim && d < begin + kSpan; ++d)
      sum += q.words[d] * read_code(kv, head, key_place(kv, token % kv.block_size, d));
    total += float(sum);
  }
  float s = total * (factor_of(item, token, 0) * q.unit);
  if (kv.bits < 16) s += factor_of(item, token, 2) * q.sum;
  return item.softcap > 0 ? item.softcap * tanhf(s / item.softcap) : s;
}

// Tokens [begin, end), a part of a span: their weights p times their values join the output.
void add_span(const AttentionItem& item, const float* p, int begin, int end, float* out) {
  const KvLayer& kv = *item.kv;
  float w[kSpan], total = 0, top = 0;
  for (int t = begin; t < end; ++t) {
    w[t - begin] = p[t - begin] * factor_of(item, t, 1);
    total += w[t - begin];
    top = w[t - begin] > top ? w[t - begin] : top;
  }
  const float unit = word_unit(kv.bits, top, total);
  if (unit < 1e-35f) return;
  int words[kSpan];
  // What is not a number becomes so in the product with its unit.
  for (int t = 0; t < end - begin; ++t) words[t] = unit == unit ? int(nearbyintf(w[t] * (1.0f / unit))) : 0;
  for (int d = 0; d < kv.head_dim; ++d) {
    int32_t sum = 0;
    for (int t = begin; t < end; ++t)
      sum += words[t - begin] * read_code(kv, head_of(item, t), value_place(kv, t % kv.block_size, d));
    out[d] += float(sum) * unit;
  }
}

// Tokens [begin, end) of the chunk at `chunk` join the running maximum, sum and output of one query head.
void add_chunk(const AttentionItem& item, const Query& q, int chunk, int begin, int end, float* out, float* max,
               float* sum) {
  float p[kChunk], largest = *max;
  for (int t = begin; t < end; ++t) {
    p[t - chunk] = score(item, q, t);
    largest = p[t - chunk] > largest ? p[t - chunk] : largest;
  }
  // With nothing but NaN so far any finite maximum lets them through.
  const float shift = largest == -kInfinity ? 0 : largest;
  const float factor = expf(*max - shift);
  *max = largest;
  *sum *= factor;
  float offset = 0;
  for (int t = begin; t < end; ++t) {
    p[t - chunk] = expf(p[t - chunk] - shift);
    *sum += p[t - chunk];
    if (item.kv->bits < 16) offset += p[t - chunk] * factor_of(item, t, 3);
  }
  for (int d = 0; d < item.kv->head_dim; ++d) out[d] = out[d] * factor + offset;
  for (int span = chunk; span < end; span += kSpan) {
    const int first = begin > span ? begin : span, stop = end < span + kSpan ? end : span + kSpan;
    if (first < stop) add_span(item, p + (first - chunk), first, stop, out);
  }
}

void attend(const AttentionItem& item) {
  const int dim = item.kv->head_dim;
  for (int pair = 0; pair < item.rows * item.heads; ++pair) {
    const int row = pair / item.heads, last = item.position + row + 1;
    const int end = last < item.kv_end ? last : item.kv_end;
    const int first = item.window > 0 ? last - item.window : 0;
    Query q;
    round_query(item.q + row * item.q_stride + pair % item.heads * dim, dim, item.kv->bits, q);
    float* out = item.out + size_t(pair) * dim;
    item.max[pair] = -kInfinity;
    item.sum[pair] = 0;
    for (int d = 0; d < dim; ++d) out[d] = 0;
    for (int chunk = item.kv_begin; chunk < end; chunk += kChunk) {
      const int begin = first > chunk ? first : chunk, stop = chunk + kChunk < end ? chunk + kChunk : end;
      if (begin < stop) add_chunk(item, q, chunk, begin, stop, out, item.max + pair, item.sum + pair);
    }
  }
}

void merge(const float* out_parts, const float* max_parts, const float* sum_parts, int splits, int heads, int head_dim,
           float* out) {
  for (int h = 0; h < heads; ++h) {
    float largest = -kInfinity;
    for (int s = 0; s < splits; ++s) largest = max_parts[s * heads + h] > largest ? max_parts[s * heads + h] : largest;
    const float shift = largest == -kInfinity ? 0 : largest;
    float total = 0;
    float* row = out + size_t(h) * head_dim;
    for (int d = 0; d < head_dim; ++d) row[d] = 0;
    for (int s = 0; s < splits; ++s) {
      const float weight = expf(max_parts[s * heads + h] - shift);
      const float* part = out_parts + (size_t(s) * heads + h) * head_dim;
      total += weight * sum_parts[s * heads + h];
      for (int d = 0; d < head_dim; ++d) row[d] += weight * part[d];
    }
    const float inverse = total == 0 ? 0 : 1.0f / total;
    for (int d = 0; d < head_dim; ++d) row[d] *= inverse;
    rotate_back(row, head_dim);
  }
}
