// Attention over the paged cache, written once on Vec: items, their chunks and the merging of ranges. Included after
// kv_cache.inl.
#include "kernels/attention_chunk.inl"

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
