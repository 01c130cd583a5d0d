// How the attention of a step is cut into units and who computes them.
//
// A unit is a run of tokens of one sequence and one KV head. Its cached tokens are visited in ranges of kSplit from
// the start of the sequence; partial results are added up in that order. When there are fewer units than threads
// want, each range becomes a unit of its own and the last to finish adds up; the result is the same.
#include <algorithm>
#include <cmath>

#include "model.h"

namespace lmdeploy {

namespace {

struct Splits {
  int first, count;
};

// Ranges that any row of the tile may see.
Splits visible_splits(const LayerShape& shape, const QueryTile& tile) {
  int first = 0;
  if (shape.window > 0) first = std::max(0, tile.position - shape.window + 1) / kSplit;
  return {first, splits_of(tile.position + tile.rows) - first};
}

// Adds the partial results of a later range. A range in which a vector saw nothing (max -inf) changes no bit of it.
void add_part(const Partial& to, const Partial& part, int vectors, int head_dim) {
  for (int v = 0; v < vectors; ++v) {
    float before = to.max[v], max = before > part.max[v] ? before : part.max[v];
    if (max == -INFINITY) continue;
    float keep = std::exp(before - max), add = std::exp(part.max[v] - max);
    to.max[v] = max;
    to.sum[v] = to.sum[v] * keep + part.sum[v] * add;
    float* out = to.out + size_t(v) * head_dim;
    const float* from = part.out + size_t(v) * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] = out[d] * keep + from[d] * add;
  }
}

}  // namespace

void Model::plan_attention() {
  int most_heads = 1;
  for (const LayerShape& l : shape_.layers) most_heads = std::max(most_heads, l.heads / l.kv_heads);
  int step = tile_rows(most_heads);
  tiles_ = 0;
  for (int row = 0; row < batch_.rows; ++row) {
    int begin = batch_.row_start[row], end = batch_.row_start[row + 1];
    for (int token = begin; token < end; token += step) {
      int position = batch_.context_len[row] + token - begin;
      space_.tiles[tiles_++] = {row, token, position, std::min(step, end - token)};
    }
  }
}

// Whether ranges are spread over threads: only for few, single-row tiles (decoding), for which there is memory.
bool Model::shares_sequences(const LayerShape& shape) const {
  if (pool_.size() == 1 || tiles_ * shape.kv_heads > 2 * pool_.size()) return false;
  int parts = 0;
  for (int i = 0; i < tiles_; ++i) {
    if (space_.tiles[i].rows > 1) return false;
    parts += visible_splits(shape, space_.tiles[i]).count * shape.kv_heads;
  }
  return parts > tiles_ * shape.kv_heads && parts <= space_.shared_parts;
}

void Model::attention(Worker& w, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  int units = tiles_ * shape.kv_heads;
  if (!shares_sequences(shape)) {
    // Later tiles of a sequence see more tokens: the longest units come first.
    distribute(w, units, 1, false, [&](int unit, int) {
      const QueryTile& tile = space_.tiles[tiles_ - 1 - unit / shape.kv_heads];
      attend_tile(w, layer, tile, unit % shape.kv_heads);
    });
    return;
  }
  int parts = 0;
  for (int i = 0; i < tiles_; ++i) parts += visible_splits(shape, space_.tiles[i]).count * shape.kv_heads;
  distribute(w, parts, 1, false, [&](int part, int) {
    int slot = 0;
    for (int i = 0; i < tiles_; ++i) {
      const QueryTile& tile = space_.tiles[i];
      int count = visible_splits(shape, tile).count;
      if (part < slot + count * shape.kv_heads) {
        int kv_head = (part - slot) / count, split = (part - slot) % count;
        return attend_part(layer, tile, kv_head, split, slot + kv_head * count);
      }
      slot += count * shape.kv_heads;
    }
  });
}

void Model::attend(int layer, const QueryTile& tile, int kv_head, int split, bool ahead, const Partial& result) {
  const LayerShape& shape = shape_.layers[layer];
  int heads = shape.heads / shape.kv_heads;
  AttentionItem item{};
  item.kv = &cache_[layer];
  item.kv_head = kv_head;
  item.blocks = batch_.block_ids + batch_.block_start[tile.row];
  item.kv_begin = split * kSplit;
  item.kv_end = std::min(item.kv_begin + kSplit, tile.position + tile.rows);
  item.kv_ahead = ahead ? tile.position + tile.rows : item.kv_end;
  item.position = tile.position;
  item.rows = tile.rows;
  item.heads = heads;
  item.q = space_.q + size_t(tile.token) * shape.q_dim() + size_t(kv_head) * heads * shape.head_dim;
  item.q_stride = shape.q_dim();
  item.window = shape.window;
  item.softcap = shape.softcap;
  item.out = result.out;
  item.max = result.max;
  item.sum = result.sum;
  kernels_.attend(item);
}

void Model::attend_tile(Worker& w, int layer, const QueryTile& tile, int kv_head) {
  const LayerShape& shape = shape_.layers[layer];
  Splits splits = visible_splits(shape, tile);
  const Partial &total = w.space.total, &part = w.space.part;
  attend(layer, tile, kv_head, splits.first, true, total);
  for (int i = 1; i < splits.count; ++i) {
    attend(layer, tile, kv_head, splits.first + i, true, part);
    add_part(total, part, tile.rows * (shape.heads / shape.kv_heads), shape.head_dim);
  }
  finish_tile(layer, tile, kv_head, total);
}

// One range of a single-row tile; `slot` is where the partial results of its first range lie.
void Model::attend_part(int layer, const QueryTile& tile, int kv_head, int split, int slot) {
  const LayerShape& shape = shape_.layers[layer];
  Splits splits = visible_splits(shape, tile);
  int heads = shape.heads / shape.kv_heads;
  auto part = [&](int i) {
    size_t at = size_t(slot + i) * heads;
    return Partial{space_.shared.out + at * shape.head_dim, space_.shared.max + at, space_.shared.sum + at};
  };
  attend(layer, tile, kv_head, splits.first + split, false, part(split));
  std::atomic<int>& done = space_.splits_done[slot];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < splits.count) return;
  done.store(0, std::memory_order_relaxed);
  for (int i = 1; i < splits.count; ++i) add_part(part(0), part(i), heads, shape.head_dim);
  finish_tile(layer, tile, kv_head, part(0));
}

// Divides by the sums and writes each row to its place.
void Model::finish_tile(int layer, const QueryTile& tile, int kv_head, const Partial& total) {
  const LayerShape& shape = shape_.layers[layer];
  int heads = shape.heads / shape.kv_heads;
  size_t values = size_t(heads) * shape.head_dim;
  for (int row = 0; row < tile.rows; ++row) {
    float* to = space_.attention + size_t(tile.token + row) * shape.q_dim() + kv_head * values;
    kernels_.merge(total.out + row * values, total.max + row * heads, total.sum + row * heads, 1, heads, shape.head_dim,
                   to);
  }
}

}  // namespace lmdeploy
