// Attention over the paged cache, written once on Vec. Included after kv_cache.inl.
//
// Everything is a product of whole numbers: queries, keys, weights exp(score - max) and values. Sums are exact within
// a span of dimensions or tokens, so a pair (one query row and one query head) is what it is whichever pairs it shares
// loads with; up to kPairs do. Tokens that a pair does not see have weight 0, whatever lies in their place.
//
// Queries and weights have words of 16 bits. Against codes of 8 and 4 bits a span of them cannot overflow int32;
// against codes of 16 bits they get a scale at which the sum of their absolute values stays below kMostSum in every
// span, for kMostSum * kWordTop < 2^31: spread evenly over 64, that is a rounding error near 1e-4 of the root mean
// square.

constexpr int kSpan = 64;              // dimensions of a score, tokens of an output, that are added up as integers
constexpr float kMostSum = 131000.0f;  // and 32 more by rounding
constexpr int kSpans = kChunk / kSpan;

template <int BITS>
constexpr int kLineBytes = BITS == 16 ? 64 : 32;
template <int BITS>
constexpr int kLines = BITS == 4 ? 2 : 1;  // that one load gives

// What lies at p: one line, or with 4 bits two.
template <int BITS>
INLINE void load_lines(const uint8_t* p, IntVec (&lines)[kLines<BITS>]) {
  if constexpr (BITS == 4) {
    const IntVec bytes = load_bytes(p);
    lines[0] = low_nibbles(bytes);
    lines[1] = high_nibbles(bytes);
  } else {
    lines[0] = BITS == 16 ? load_words(p) : load_bytes(p);
  }
}
// One line of values: with 4 bits the first or the second of two.
template <int BITS>
INLINE IntVec load_line(const uint8_t* p, bool second) {
  if constexpr (BITS == 16) return load_words(p);
  const IntVec bytes = load_bytes(p);
  if constexpr (BITS == 4) return second ? high_nibbles(bytes) : low_nibbles(bytes);
  return bytes;
}

// What one call of attend() works with at a time: up to kPairs pairs and one chunk of tokens.
struct Chunk {
  int tiles, dim;  // key tiles that any pair sees, head dimension
  const uint8_t* keys[kChunk / kTile];
  const uint8_t* values[kChunk / kTile];
  // Of the chunk after this one, to be brought nearer: keys while scores are computed; of values, every other 64 bytes
  // during the softmax and the rest during the outputs, so that memory is never idle.
  const uint8_t *next_keys[kChunk / kTile], *next_values[kChunk / kTile];
  alignas(64) float factors[4][kChunk];  // scales of keys and of values, offsets of keys and of values
  int first[kPairs], last[kPairs];       // visible tokens [first, last) of each pair, counted from the chunk's first
  float query_unit[kPairs], query_sum[kPairs];
  float factor[kPairs], shift[kPairs];  // of earlier outputs, and what the values' offsets add
  float unit[kPairs][kSpans];           // of the weights below
  alignas(64) float scores[kPairs][kChunk];
  alignas(64) int32_t weights[kPairs][kChunk / 2];  // two int16 each
};

// ---- queries ----

// The scale of words of which the largest is `top` and whose sum in a span is at most `most`; NaN in `most` stays.
template <int BITS>
INLINE float word_unit(float top, float most) {
  const float high = top * (1.0f / 32767), even = most * (1.0f / kMostSum);
  return BITS < 16 || high > even ? high : even;
}

// Rounds a query; two words of pair p lie at q[d / 2 * P + p].
template <int BITS, int P>
static void round_query(Chunk& c, int p, const float* from, int32_t* q) {
  float most = 0.0f;
  Vec largest = zero();
  for (int d = 0; d < c.dim; d += kSpan) {
    const int end = c.dim - d < kSpan ? c.dim : d + kSpan;
    Vec total = zero();
    for (int i = d; i < end; i += kTile) {
      const Vec size = abs(load(from + i));
      total = add(total, size);
      largest = max(size, largest);
    }
    const float sum = reduce_add(total);
    most = most != most || sum <= most ? most : sum;  // NaN stays
  }
  const bool finite = most <= __FLT_MAX__, empty = !finite || most < 1e-30f;
  const float unit = !finite ? __builtin_nanf("") : empty ? 0.0f : word_unit<BITS>(reduce_max(largest), most);
  const Vec inverse = splat(empty ? 0.0f : 1.0f / unit);
  IntVec sum = zero_ints();
  for (int d = 0; d < c.dim; d += kTile) {
    const IntVec whole = to_int(empty ? zero() : mul(load(from + d), inverse));
    sum = add_ints(sum, whole);
    int16_t words[kTile];
    store_shorts(words, whole);
    for (int i = 0; i < kTile; i += 2) __builtin_memcpy(q + (d + i) / 2 * P + p, words + i, 4);
  }
  c.query_unit[p] = unit;
  c.query_sum[p] = unit * static_cast<float>(reduce_ints(sum));
}

// ---- scores ----

template <int BITS, int P, int T>
INLINE void score_tiles(Chunk& c, const int32_t* q, int tile) {
  constexpr int L = kLines<BITS>;
  for (int d = 0; d < c.dim; d += kSpan) {
    const int begin = d / 2, end = (c.dim - d < kSpan ? c.dim : d + kSpan) / 2;
    IntVec sums[P][T];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[p][t] = zero_ints();
    for (int i = begin; i < end; i += L) {
      IntVec lines[T][L];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int at = i / L * kLineBytes<BITS>;
        if (at % 64 == 0) __builtin_prefetch(c.next_keys[tile + t] + at, 0, 2);
        load_lines<BITS>(c.keys[tile + t] + at, lines[t]);
      }
#pragma GCC unroll 2
      for (int l = 0; l < L; ++l)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          const IntVec pair = splat_int(q[(i + l) * P + p]);
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) sums[p][t] = dot_words(sums[p][t], lines[t][l], pair);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* to = c.scores[p] + (tile + t) * kTile;
        const Vec sum = to_float(sums[p][t]);
        store(to, d == 0 ? sum : add(load(to), sum));
      }
  }
}

template <int BITS, int P>
static void scores(Chunk& c, const int32_t* q) {
  constexpr int T = key_tiles(P, BITS);
  int tile = 0;
  for (; tile + T <= c.tiles; tile += T) score_tiles<BITS, P, T>(c, q, tile);
  for (; tile < c.tiles; ++tile) score_tiles<BITS, P, 1>(c, q, tile);
}

// ---- softmax ----

// The chunk's scores of one pair as numbers, capped, -infinity where it sees nothing. Returns the largest.
template <int BITS>
INLINE float finish_scores(Chunk& c, int p, float softcap, bool partial) {
  const Vec unit = splat(c.query_unit[p]), sum = splat(c.query_sum[p]);
  Vec largest = splat(-kInfinity);
  for (int t = 0; t < c.tiles; ++t) {
    float* at = c.scores[p] + t * kTile;
    Vec s = mul(load(at), mul(load(c.factors[0] + t * kTile), unit));
    if constexpr (BITS < 16) s = fma(load(c.factors[2] + t * kTile), sum, s);
    if (softcap > 0) s = capped(s, softcap);
    if (partial) s = keep(s, c.first[p] - t * kTile, c.last[p] - t * kTile, splat(-kInfinity));
    store(at, s);
    largest = max(s, largest);
  }
  return reduce_max(largest);
}

// e^(x - shift) where x <= shift, as 2^t with a relative error of 3e-6; exactly 0 far below.
INLINE Vec weight(Vec x, Vec minus_shift2) {
  const Vec t = max(splat(-200.0f), fma(x, splat(1.44269504f), minus_shift2)), n = round(t), f = sub(t, n);
  Vec p = fma(splat(9.58285e-3f), f, splat(5.590642e-2f));
  p = fma(p, f, splat(2.4024099e-1f));
  p = fma(p, f, splat(6.9312419e-1f));
  return scale2(fma(p, f, splat(1.0f)), n);
}

// Words for the weights of one span, [span * kSpan, end).
INLINE void round_weights(Chunk& c, int p, int span, float unit, int end) {
  const bool empty = unit < 1e-35f;
  const Vec inverse = splat(empty ? 0.0f : 1.0f / unit);
  auto* words = reinterpret_cast<int16_t*>(c.weights[p]);
  for (int t = span * kSpan; t < end; t += kTile) store_shorts(words + t, to_int(mul(load(c.scores[p] + t), inverse)));
  c.unit[p][span] = empty ? 0.0f : unit;
}

// Turns a pair's scores into weights of the value codes, and joins them to its running maximum and sum.
template <int BITS>
static void softmax_chunk(Chunk& c, int p, float softcap, float* max_so_far, float* sum) {
  const bool partial = c.first[p] > 0 || c.last[p] < c.tiles * kTile;
  const float top = finish_scores<BITS>(c, p, softcap, partial), best = top > *max_so_far ? top : *max_so_far;
  const float shift = best == -kInfinity ? 0.0f : best;
  const Vec base = splat(shift * -1.44269504f);
  Vec total = zero(), shifts = zero();
  for (int span = 0; span < kSpans && span * kSpan < c.tiles * kTile; ++span) {
    Vec weights = zero(), largest = zero();
    const int end = (span + 1) * kSpan < c.tiles * kTile ? (span + 1) * kSpan : c.tiles * kTile;
    for (int at = span * kSpan; at < end; at += kTile) {
      const Vec e = weight(load(c.scores[p] + at), base);
      total = add(total, e);
      Vec w = mul(e, load(c.factors[1] + at));
      Vec offset = BITS < 16 ? mul(e, load(c.factors[3] + at)) : zero();
      if (partial) {
        w = keep(w, c.first[p] - at, c.last[p] - at, zero());
        offset = keep(offset, c.first[p] - at, c.last[p] - at, zero());
      }
      store(c.scores[p] + at, w);
      if constexpr (BITS == 16) weights = add(weights, w);
      shifts = add(shifts, offset);
      largest = max(w, largest);
    }
    const float most = BITS == 16 ? reduce_add(weights) : 0.0f;
    round_weights(c, p, span, word_unit<BITS>(reduce_max(largest), most), end);
  }
  c.factor[p] = exp1(*max_so_far - shift);
  c.shift[p] = BITS < 16 ? reduce_add(shifts) : 0.0f;
  *max_so_far = best;
  *sum = *sum * c.factor[p] + reduce_add(total);
}

// ---- outputs ----

// Adds words times values of one token tile, for V vectors of dimensions from vector `v0` on: V is even or 1.
template <int BITS, int P, int V>
INLINE void add_tile(const Chunk& c, int tile, int v0, IntVec (&sums)[P][V]) {
  constexpr int L = V == 1 ? 1 : kLines<BITS>, B = kLineBytes<BITS>, RUN = 8 * B;
  const int skip = v0 / kLines<BITS> * RUN;
  const uint8_t *at = c.values[tile] + skip, *next = c.next_values[tile] + skip;
#pragma GCC unroll 1
  for (int i = 0; i < kTile / 2; ++i, at += B, next += B) {
    IntVec lines[V / L][kLines<BITS>];
#pragma GCC unroll 4
    for (int v = 0; v < V / L; ++v) {
      if (i * B % 128 == 64) __builtin_prefetch(next + v * RUN, 0, 2);
      if constexpr (V == 1) {
        lines[v][0] = load_line<BITS>(at, v0 % 2 == 1);
      } else {
        load_lines<BITS>(at + v * RUN, lines[v]);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const int32_t* words = &c.weights[p][tile * (kTile / 2) + i];
      if constexpr (V <= 2) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[p][v] = dot_words(sums[p][v], lines[v / L][v % L], words);
      } else {
        const IntVec pair = splat_int(*words);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[p][v] = dot_words(sums[p][v], lines[v / L][v % L], pair);
      }
    }
  }
}

// out[p] = out[p] * factor + weights * values over the chunk, for V vectors of dimensions from vector `v0` on.
template <int BITS, int P, int V>
INLINE void add_values(const Chunk& c, int v0, float* out) {
  for (int span = 0; span < kSpans && span * kSpan < c.tiles * kTile; ++span) {
    IntVec sums[P][V];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[p][v] = zero_ints();
    const int first = span * (kSpan / kTile), end = first + kSpan / kTile < c.tiles ? first + kSpan / kTile : c.tiles;
    for (int t = first; t < end; ++t) add_tile<BITS, P, V>(c, t, v0, sums);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* to = out + p * c.dim + (v0 + v) * kTile;
        const Vec before = load(to);
        const Vec start = span == 0 ? fma(before, splat(c.factor[p]), splat(c.shift[p])) : before;
        store(to, fma(to_float(sums[p][v]), splat(c.unit[p][span]), start));
      }
  }
}

template <int BITS, int P>
static void outputs(const Chunk& c, float* out) {
  constexpr int V = value_vectors(P);
  int v = 0;
  for (; v + V <= c.dim / kTile; v += V) add_values<BITS, P, V>(c, v, out);
  if (V > 2)
    for (; v + 2 <= c.dim / kTile; v += 2) add_values<BITS, P, 2>(c, v, out);
  for (; v < c.dim / kTile; ++v) add_values<BITS, P, 1>(c, v, out);
}

// ---- one item ----

INLINE uint8_t* head_of(const AttentionItem& item, int token) {
  return head_base(*item.kv, item.kv_head, item.blocks[token / item.kv->block_size]);
}
INLINE const uint8_t* values_of(const AttentionItem& item, int token) {
  const KvLayer& kv = *item.kv;
  const int tile = token % kv.block_size / kTile;
  return head_of(item, token) + kv.block_size / kTile * kv.key_tile + tile * kv.value_tile;
}

// Every other 64 bytes of the next values, share `part` of `parts`.
INLINE void fetch_values(const Chunk& c, int value_tile, int part, int parts) {
  for (int t = part; t < c.tiles; t += parts)
    for (int at = 0; at < value_tile; at += 128) __builtin_prefetch(c.next_values[t] + at, 0, 2);
}

// Where tile t of the next chunk lies, from `token` on. Its scales and offsets are fetched now: a chunk begins with
// them.
INLINE void place_next(const AttentionItem& item, int token, int t, Chunk& c) {
  const KvLayer& kv = *item.kv;
  uint8_t* head = head_of(item, token);
  c.next_keys[t] = head + token % kv.block_size / kTile * kv.key_tile;
  c.next_values[t] = values_of(item, token);
  const uint16_t* factors = factors_of(kv, head) + token % kv.block_size;
  for (int i = 0; i < (kv.bits == 16 ? 2 : 4); ++i) __builtin_prefetch(factors + i * kv.block_size, 0, 3);
}

// Places the chunk starting at `begin`; false when no pair sees any of it.
static bool place_chunk(const AttentionItem& item, int pair, int pairs, int begin, Chunk& c) {
  const KvLayer& kv = *item.kv;
  bool any = false;
  int end = 0;
  for (int p = 0; p < pairs; ++p) {
    const int last = item.position + (pair + p) / item.heads + 1;
    const int stop = last < item.kv_end ? last : item.kv_end;
    const int first = item.window > 0 && last - item.window > begin ? last - item.window - begin : 0;
    c.first[p] = first < kChunk ? first : kChunk;
    c.last[p] = stop - begin < 0 ? 0 : stop - begin < kChunk ? stop - begin : kChunk;
    any = any || c.first[p] < c.last[p];
    end = c.last[p] > end ? c.last[p] : end;
  }
  c.tiles = (end + kTile - 1) / kTile;
  for (int t = 0; t < c.tiles; ++t) {
    const int token = begin + t * kTile, next = token + kChunk;
    uint8_t* head = head_of(item, token);
    c.keys[t] = head + token % kv.block_size / kTile * kv.key_tile;
    c.values[t] = values_of(item, token);
    c.next_keys[t] = c.keys[t];
    c.next_values[t] = c.values[t];
    if (next < item.kv_ahead) place_next(item, next, t, c);
    const uint16_t* factors = factors_of(kv, head) + token % kv.block_size;
    for (int i = 0; i < (kv.bits == 16 ? 2 : 4); ++i)
      store(c.factors[i] + t * kTile, load_bf16(factors + i * kv.block_size));
  }
  return any;
}

template <int BITS, int P>
static void attend_pairs(const AttentionItem& item, int pair) {
  Chunk c;
  c.dim = item.kv->head_dim;
  int32_t q[kMaxHeadDim / 2 * P];
  for (int p = 0; p < P; ++p) {
    const int row = (pair + p) / item.heads, head = (pair + p) % item.heads;
    round_query<BITS, P>(c, p, item.q + row * item.q_stride + static_cast<ptrdiff_t>(head) * c.dim, q);
  }
  float* out = item.out + static_cast<size_t>(pair) * c.dim;
  for (int i = 0; i < P * c.dim; i += kTile) store(out + i, zero());
  for (int p = 0; p < P; ++p) {
    item.max[pair + p] = -kInfinity;
    item.sum[pair + p] = 0.0f;
  }
  for (int begin = item.kv_begin; begin < item.kv_end; begin += kChunk) {
    if (!place_chunk(item, pair, P, begin, c)) continue;
    scores<BITS, P>(c, q);
    for (int p = 0; p < P; ++p) {
      fetch_values(c, item.kv->value_tile, p, P);
      softmax_chunk<BITS>(c, p, item.softcap, item.max + pair + p, item.sum + pair + p);
    }
    outputs<BITS, P>(c, out);
  }
}

template <int BITS>
static void attend_some(const AttentionItem& item, int pair, int count) {
  switch (count) {
    case 1:
      return attend_pairs<BITS, 1>(item, pair);
    case 2:
      return attend_pairs<BITS, 2>(item, pair);
    case 3:
      return attend_pairs<BITS, 3>(item, pair);
    case 4:
      return attend_pairs<BITS, 4>(item, pair);
#if ISA_PAIRS > 4
    case 5:
      return attend_pairs<BITS, 5>(item, pair);
    case 6:
      return attend_pairs<BITS, 6>(item, pair);
    case 7:
      return attend_pairs<BITS, 7>(item, pair);
    case 8:
      return attend_pairs<BITS, 8>(item, pair);
#endif
  }
}

static void attend(const AttentionItem& item) {
  const int pairs = item.rows * item.heads;
  for (int pair = 0; pair < pairs; pair += kPairs) {
    const int count = pairs - pair < kPairs ? pairs - pair : kPairs;
    if (item.kv->bits == 16) attend_some<16>(item, pair, count);
    if (item.kv->bits == 8) attend_some<8>(item, pair, count);
    if (item.kv->bits == 4) attend_some<4>(item, pair, count);
  }
}

static void merge(const float* out_parts, const float* max_parts, const float* sum_parts, int splits, int heads,
                  int head_dim, float* out) {
  for (int h = 0; h < heads; ++h) {
    float largest = -kInfinity, total = 0.0f;
    for (int s = 0; s < splits; ++s) largest = max_parts[s * heads + h] > largest ? max_parts[s * heads + h] : largest;
    const float shift = largest == -kInfinity ? 0.0f : largest;
    float* row = out + static_cast<size_t>(h) * head_dim;
    for (int d = 0; d < head_dim; d += kTile) store(row + d, zero());
    for (int s = 0; s < splits; ++s) {
      const float weight = exp1(max_parts[s * heads + h] - shift);
      const float* part = out_parts + (static_cast<size_t>(s) * heads + h) * head_dim;
      total += weight * sum_parts[s * heads + h];
      for (int d = 0; d < head_dim; d += kTile) store(row + d, fma(splat(weight), load(part + d), load(row + d)));
    }
    const Vec inverse = splat(total == 0.0f ? 0.0f : 1.0f / total);
    for (int d = 0; d < head_dim; d += kTile) store(row + d, mul(load(row + d), inverse));
    rotate_back(row, head_dim);
  }
}
