// Attention of up to kPairs pairs over one chunk of the paged cache, written once on Vec. Included by attention.inl.
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
