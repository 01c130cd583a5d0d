// Attention over the paged cache, written once on Vec. Included after small.inl.
//
// A pair is one query row and one query head. Up to kPairs pairs share every load of a key or value; each pair's own
// sums run over dimensions (scores) and over its visible tokens (outputs) in ascending order, whatever pairs it
// shares loads with.
//
// Measured on two cores of Zen 4, AVX-512, 1024 tokens (benchmarks/native_kernels.py), GB/s of keys and values at one
// row and GFLOP/s at 16 rows (fp32 peak 234), 9/3 heads of 64 and 32/8 heads of 128:
//   next keys prefetched in one burst              28 / 25 GB/s
//   next keys prefetched while values are summed   35 / 35 GB/s, 160 / 177 GFLOP/s

static uint16_t* block_base(const KvLayer& kv, int kv_head, int block) {
  return kv.base + block * kv.block_stride + kv_head * kv.head_stride;
}

static void store_kv(const KvLayer& kv, int kv_head, int block, int slot, const float* key, const float* value) {
  const int tile = slot / kTile * kv.head_dim * kTile, lane = slot % kTile;
  uint16_t* keys = block_base(kv, kv_head, block) + tile + lane;
  uint16_t* values = block_base(kv, kv_head, block) + kv.block_size * kv.head_dim + tile + lane * kTile;
  for (int d = 0; d < kv.head_dim; d += kTile) {
    uint16_t halves[kTile];
    store_half(halves, load(key + d));
    for (int i = 0; i < kTile; ++i) keys[(d + i) * kTile] = halves[i];
    store_half(values + d * kTile, load(value + d));
  }
}

// What one call of attend() works with at a time: up to kPairs pairs and one chunk of tokens.
struct Chunk {
  int begin, tiles, dim, pairs;  // first token, key tiles, head dimension
  const uint16_t* keys[kChunk / kTile];
  const uint16_t* values[kChunk / kTile];
  const uint16_t* next_keys[kChunk / kTile];  // keys of the chunk after this one, to be brought nearer
  int first[kPairs], last[kPairs];            // visible tokens [first, last) of each pair, counted from `begin`
  float weights[kPairs][kChunk];              // scores, then exp(score - max)
};

template <int P, int T>
INLINE void score_tiles(Chunk& c, const float* q, int tile) {
  Vec sums[P][T];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) sums[p][t] = zero();
  for (int d = 0; d < c.dim; ++d) {
    Vec keys[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      // The values of these tokens are wanted next, and lie elsewhere in the block.
      if (d % 2 == 0) __builtin_prefetch(c.values[tile + t] + d * kTile, 0, 2);
      keys[t] = load_half(c.keys[tile + t] + d * kTile);
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const Vec factor = splat(q[d * P + p]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[p][t] = fma(factor, keys[t], sums[p][t]);
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) store(c.weights[p] + (tile + t) * kTile, sums[p][t]);
}

template <int P>
static void scores(Chunk& c, const float* q) {
  constexpr int T = key_tiles(P);
  int tile = 0;
  for (; tile + T <= c.tiles; tile += T) score_tiles<P, T>(c, q, tile);
  for (; tile < c.tiles; ++tile) score_tiles<P, 1>(c, q, tile);
}

// Turns a pair's scores into weights and joins them to its running maximum and sum. Returns the factor that brings
// earlier outputs to the new maximum.
static float softmax_chunk(Chunk& c, int p, float softcap, float* max_so_far, float* sum) {
  float* w = c.weights[p];
  const bool partial = c.first[p] > 0 || c.last[p] < c.tiles * kTile;
  Vec largest = splat(-kInfinity);
  for (int t = 0; t < c.tiles; ++t) {
    Vec s = load(w + t * kTile);
    if (softcap > 0) s = capped(s, softcap);
    if (partial) s = keep(s, c.first[p] - t * kTile, c.last[p] - t * kTile, splat(-kInfinity));
    store(w + t * kTile, s);
    largest = max(s, largest);
  }
  const float top = reduce_max(largest), best = top > *max_so_far ? top : *max_so_far;
  const float shift = best == -kInfinity ? 0.0f : best;
  Vec total = zero();
  for (int t = 0; t < c.tiles; ++t) {
    const Vec e = exp(sub(load(w + t * kTile), splat(shift)));
    store(w + t * kTile, e);
    total = add(total, e);
  }
  const float factor = exp1(*max_so_far - shift);
  *max_so_far = best;
  *sum = *sum * factor + reduce_add(total);
  return factor;
}

// out[p] += weight * value over tokens [begin, end) of the chunk, for P pairs from `pair` on and V vectors from `d` on.
template <int P, int V>
INLINE void add_values(const Chunk& c, int pair, int begin, int end, int d, float* out) {
  Vec sums[P][V];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[p][v] = load(out + p * c.dim + (d + v) * kTile);
  for (int t = begin; t < end;) {
    const int tile = t / kTile, stop = (tile + 1) * kTile < end ? (tile + 1) * kTile : end;
    const int skip = d * kTile * kTile + t % kTile * kTile;
    const uint16_t *at = c.values[tile] + skip, *next = c.next_keys[tile] + skip;
    for (; t < stop; ++t) {
      Vec values[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if (t % 2 == 0) __builtin_prefetch(next + v * kTile * kTile, 0, 2);
        values[v] = load_half(at + v * kTile * kTile);
      }
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const Vec weight = splat(c.weights[pair + p][t]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[p][v] = fma(weight, values[v], sums[p][v]);
      }
      at += kTile;
      next += kTile;
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(out + p * c.dim + (d + v) * kTile, sums[p][v]);
}

template <int P>
static void outputs(const Chunk& c, int pair, int begin, int end, float* out) {
  constexpr int V = value_vectors(P);
  if (begin >= end) return;
  int d = 0;
  for (; d + V <= c.dim / kTile; d += V) add_values<P, V>(c, pair, begin, end, d, out);
  for (; d < c.dim / kTile; ++d) add_values<P, 1>(c, pair, begin, end, d, out);
}

// Tokens that all pairs see are read once for all; before and after them each pair reads only what it sees itself.
template <int P>
static void all_outputs(const Chunk& c, float* out) {
  int begin = 0, end = kChunk;
  for (int p = 0; p < P; ++p) {
    begin = c.first[p] > begin ? c.first[p] : begin;
    end = c.last[p] < end ? c.last[p] : end;
  }
  if (begin > end) begin = end = 0;
  for (int p = 0; p < P; ++p) {
    const int stop = c.last[p] < begin ? c.last[p] : begin;
    outputs<1>(c, p, c.first[p], stop, out + p * c.dim);
  }
  outputs<P>(c, 0, begin, end, out);
  for (int p = 0; p < P; ++p) {
    const int start = c.first[p] > end ? c.first[p] : end;
    outputs<1>(c, p, start, c.last[p], out + p * c.dim);
  }
}

static const uint16_t* keys_of(const AttentionItem& item, int token) {
  const KvLayer& kv = *item.kv;
  return block_base(kv, item.kv_head, item.blocks[token / kv.block_size]) + token % kv.block_size * kv.head_dim;
}

// Places the chunk starting at `begin`; false when no pair sees any of it.
static bool place_chunk(const AttentionItem& item, int pair, int begin, Chunk& c) {
  const KvLayer& kv = *item.kv;
  bool any = false;
  int end = 0;
  for (int p = 0; p < c.pairs; ++p) {
    const int last = item.position + (pair + p) / item.heads + 1;
    const int stop = last < item.kv_end ? last : item.kv_end;
    const int first = item.window > 0 && last - item.window > begin ? last - item.window - begin : 0;
    c.first[p] = first < kChunk ? first : kChunk;
    c.last[p] = stop - begin < 0 ? 0 : stop - begin < kChunk ? stop - begin : kChunk;
    any = any || c.first[p] < c.last[p];
    end = c.last[p] > end ? c.last[p] : end;
  }
  c.begin = begin;
  c.tiles = (end + kTile - 1) / kTile;
  for (int t = 0; t < c.tiles; ++t) {
    c.keys[t] = keys_of(item, begin + t * kTile);
    c.values[t] = c.keys[t] + kv.block_size * kv.head_dim;
    const int next = begin + kChunk + t * kTile;
    c.next_keys[t] = next < item.kv_end ? keys_of(item, next) : c.keys[t];
  }
  return any;
}

template <int P>
static void attend_pairs(const AttentionItem& item, int pair) {
  Chunk c;
  c.dim = item.kv->head_dim;
  c.pairs = P;
  float q[kMaxHeadDim * P];
  for (int p = 0; p < P; ++p) {
    const int row = (pair + p) / item.heads, head = (pair + p) % item.heads;
    const float* from = item.q + row * item.q_stride + static_cast<ptrdiff_t>(head) * c.dim;
    for (int d = 0; d < c.dim; ++d) q[d * P + p] = from[d];
  }
  float* out = item.out + static_cast<size_t>(pair) * c.dim;
  for (int i = 0; i < P * c.dim; i += kTile) store(out + i, zero());
  for (int p = 0; p < P; ++p) {
    item.max[pair + p] = -kInfinity;
    item.sum[pair + p] = 0.0f;
  }
  for (int begin = item.kv_begin; begin < item.kv_end; begin += kChunk) {
    if (!place_chunk(item, pair, begin, c)) continue;
    scores<P>(c, q);
    for (int p = 0; p < P; ++p) {
      const float factor = softmax_chunk(c, p, item.softcap, item.max + pair + p, item.sum + pair + p);
      for (int d = 0; d < c.dim; d += kTile) store(out + p * c.dim + d, mul(load(out + p * c.dim + d), splat(factor)));
    }
    all_outputs<P>(c, out);
  }
}

static void attend_some(const AttentionItem& item, int pair, int count) {
  switch (count) {
    case 1:
      return attend_pairs<1>(item, pair);
    case 2:
      return attend_pairs<2>(item, pair);
    case 3:
      return attend_pairs<3>(item, pair);
    case 4:
      return attend_pairs<4>(item, pair);
#if ISA_PAIRS > 4
    case 5:
      return attend_pairs<5>(item, pair);
    case 6:
      return attend_pairs<6>(item, pair);
    case 7:
      return attend_pairs<7>(item, pair);
    case 8:
      return attend_pairs<8>(item, pair);
#endif
  }
}

static void attend(const AttentionItem& item) {
  const int pairs = item.rows * item.heads;
  for (int pair = 0; pair < pairs; pair += kPairs)
    attend_some(item, pair, pairs - pair < kPairs ? pairs - pair : kPairs);
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
  }
}
