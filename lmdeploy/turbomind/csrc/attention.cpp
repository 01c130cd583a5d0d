// How the attention of a step is cut into units and who computes them.
//
// A unit is a run of tokens of one sequence and one KV head. Its cached tokens are visited in ranges of kSplit from
// the start of the sequence; partial results are merged in that order. When there are fewer units than threads want,
// each range becomes a unit of its own and the last to finish merges; the result is the same.
#include <algorithm>
#include <cstring>

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
  bool any = false;
  for (int i = 0; i < tiles_; ++i) {
    if (space_.tiles[i].rows > 1) return false;
    any = any || visible_splits(shape, space_.tiles[i]).count > 1;
  }
  return any;
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
        return attend_part(w, layer, tile, kv_head, split, slot + kv_head * count);
      }
      slot += count * shape.kv_heads;
    }
  });
}

void Model::attend(int layer, const QueryTile& tile, int kv_head, int split, float* out, float* max, float* sum) {
  const LayerShape& shape = shape_.layers[layer];
  int heads = shape.heads / shape.kv_heads;
  AttentionItem item{};
  item.kv = &cache_[layer];
  item.kv_head = kv_head;
  item.blocks = batch_.block_ids + batch_.block_start[tile.row];
  item.kv_begin = split * kSplit;
  item.kv_end = std::min(item.kv_begin + kSplit, tile.position + tile.rows);
  item.position = tile.position;
  item.rows = tile.rows;
  item.heads = heads;
  item.q = space_.q + size_t(tile.token) * shape.q_dim() + size_t(kv_head) * heads * shape.head_dim;
  item.q_stride = shape.q_dim();
  item.window = shape.window;
  item.softcap = shape.softcap;
  item.out = out;
  item.max = max;
  item.sum = sum;
  kernels_.attend(item);
}

void Model::attend_tile(Worker& w, int layer, const QueryTile& tile, int kv_head) {
  const LayerShape& shape = shape_.layers[layer];
  Splits splits = visible_splits(shape, tile);
  size_t vectors = size_t(tile.rows) * (shape.heads / shape.kv_heads);
  const ThreadSpace& t = w.space;
  for (int i = 0; i < splits.count; ++i) {
    attend(layer, tile, kv_head, splits.first + i, t.part_out + i * vectors * shape.head_dim, t.part_max + i * vectors,
           t.part_sum + i * vectors);
  }
  merge_tile(w, layer, tile, kv_head, splits.count, t.part_out, t.part_max, t.part_sum);
}

// One range of a single-row tile; `slot` is where the partial results of its first range lie.
void Model::attend_part(Worker& w, int layer, const QueryTile& tile, int kv_head, int split, int slot) {
  const LayerShape& shape = shape_.layers[layer];
  Splits splits = visible_splits(shape, tile);
  size_t heads = shape.heads / shape.kv_heads, values = heads * shape.head_dim;
  float *out = space_.shared_out + slot * values, *max = space_.shared_max + slot * heads;
  float* sum = space_.shared_sum + slot * heads;
  attend(layer, tile, kv_head, splits.first + split, out + split * values, max + split * heads, sum + split * heads);
  std::atomic<int>& done = space_.splits_done[slot];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < splits.count) return;
  done.store(0, std::memory_order_relaxed);
  merge_tile(w, layer, tile, kv_head, splits.count, out, max, sum);
}

// Partial results are [splits][rows][heads][...]; the kernel merges [splits][heads][...] of one row.
void Model::merge_tile(Worker& w, int layer, const QueryTile& tile, int kv_head, int splits, const float* out,
                       const float* max, const float* sum) {
  const LayerShape& shape = shape_.layers[layer];
  size_t heads = shape.heads / shape.kv_heads, values = heads * shape.head_dim;
  for (int row = 0; row < tile.rows; ++row) {
    float* to = space_.attention + size_t(tile.token + row) * shape.q_dim() + kv_head * values;
    if (splits == 1 || tile.rows == 1) {
      kernels_.merge(out + row * values, max + row * heads, sum + row * heads, splits, static_cast<int>(heads),
                     shape.head_dim, to);
      continue;
    }
    for (int i = 0; i < splits; ++i) {
      size_t from = size_t(i) * tile.rows + row;
      std::memcpy(w.space.merge_out + i * values, out + from * values, values * sizeof(float));
      std::memcpy(w.space.merge_max + i * heads, max + from * heads, heads * sizeof(float));
      std::memcpy(w.space.merge_sum + i * heads, sum + from * heads, heads * sizeof(float));
    }
    kernels_.merge(w.space.merge_out, w.space.merge_max, w.space.merge_sum, splits, static_cast<int>(heads),
                   shape.head_dim, to);
  }
}

}  // namespace lmdeploy
