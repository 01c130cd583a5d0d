// The matrix operations of a layer with what is fused to them.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace lmdeploy {

namespace {

int chunks_of(int rows) { return (rows + kRowChunk - 1) / kRowChunk; }

void multiply(const KernelTable& kernels, const Matrix& w, const Input& input, int tile, int tile_end, int first_row,
              int rows, float* out, ptrdiff_t stride, void* scratch) {
  kernels.matmul(w, rows_of(input.of(w), first_row, rows), tile, tile_end, out, stride, scratch);
}

// Items of a work list: pieces of a matrix times chunks of rows, the chunks of one piece next to each other so that
// its weights are read once.
template <class F>
void for_chunk(int item, int total_rows, F f) {
  int chunks = chunks_of(total_rows), first = item % chunks * kRowChunk;
  f(item / chunks, first, std::min(kRowChunk, total_rows - first));
}

}  // namespace

// Normed (if `norm`) and prepared rows; row i is row index[i] of `rows`. Few rows are prepared by every thread for
// itself; otherwise the threads share the work and meet at a barrier.
Input Model::prepared(Worker& w, const float* rows, const int32_t* index, int count, const float* norm,
                      const InputFormat& format, const int32_t* order) {
  bool alone = count <= kFewRows;
  Input input = make_input(format, count, alone ? w.space.input : space_.input);
  int begin = alone ? 0 : static_cast<int>(int64_t{count} * w.id / pool_.size());
  int end = alone ? count : static_cast<int>(int64_t{count} * (w.id + 1) / pool_.size());
  for (int i = begin; i < end; ++i) {
    const float* row = rows + size_t(index == nullptr ? i : index[i]) * format.k;
    if (norm != nullptr) {
      kernels_.rms_norm(row, norm, shape_.norm_offset, shape_.norm_eps, format.k, w.space.row);
      row = w.space.row;
    }
    if (order != nullptr) {
      for (int k = 0; k < format.k; ++k) w.space.reordered[k] = row[order[k]];
      row = w.space.reordered;
    }
    if (format.group > 0) kernels_.prepare(row, input.int8, i, 0, format.k);
    if (format.bf16 > 0 || format.f32) kernels_.prepare(row, input.dense, i, 0, format.k);
  }
  w.watch.lap(kOpPrepare);
  if (!alone) barrier(w);
  return input;
}

// x += scale * norm(branch), and a barrier.
void Model::add_normed(Worker& w, const float* norm, float scale) {
  distribute(w, batch_.tokens, 1, true, [&](int token, int) {
    size_t at = size_t(token) * shape_.hidden;
    kernels_.rms_norm(space_.branch + at, norm, shape_.norm_offset, shape_.norm_eps, shape_.hidden, w.space.row);
    kernels_.add_scaled(space_.x + at, w.space.row, scale, shape_.hidden);
  });
  w.watch.lap(kOpResidual);
  barrier(w);
}

// Work units: the key and value of one KV head (twice the weights), or one query head. With a norm across heads they
// leave plain projections, and norm_across_heads does the rest once all are there.
void Model::qkv(Worker& w, const Input& input, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  auto unit = [&](int number, int first, int rows) {
    if (number < shape.kv_heads) {
      key_value_head(w, input, layer, number, first, rows);
    } else {
      query_head(w, input, layer, number - shape.kv_heads, first, rows);
    }
  };
  int tokens = batch_.tokens;
  if (tokens >= kStaticRows) {
    distribute(w, (shape.kv_heads + shape.heads) * chunks_of(tokens), 1, false,
               [&](int item, int) { for_chunk(item, tokens, unit); });
    return;
  }
  // A KV head stands at an even place of 2 * kv_heads; it belongs to the thread whose share holds that place.
  distribute(w, 2 * shape.kv_heads + shape.heads, 1, true, [&](int place, int) {
    if (place >= 2 * shape.kv_heads) return unit(place - shape.kv_heads, 0, tokens);
    if (place % 2 == 0) unit(place / 2, 0, tokens);
  });
}

void Model::query_head(Worker& w, const Input& input, int layer, int head, int first, int rows) {
  const LayerShape& shape = shape_.layers[layer];
  const Linear& linear = weights_.layer(layer).qkv;
  int channel = head * shape.head_dim, at = channel;
  const Matrix& matrix = linear.part_of(at);
  float* out = space_.q + size_t(first) * shape.q_dim() + channel;
  multiply(kernels_, matrix, input, at / kTile, (at + shape.head_dim) / kTile, first, rows, out, shape.q_dim(),
           w.space.matmul);
  w.watch.lap(kOpQkv);
  for (int row = 0; row < rows; ++row, out += shape.q_dim()) {
    if (linear.bias != nullptr) kernels_.add_scaled(out, linear.bias + channel, 1, shape.head_dim);
    if (shape.qk_norm_across) continue;
    position_head(shape, weights_.layer(layer).q_norm, first + row, out);
    for (int d = 0; d < shape.head_dim; ++d) out[d] *= shape.scale;
    kernels_.rotate(out, shape.head_dim);
  }
  w.watch.lap(kOpRopeStore);
}

void Model::key_value_head(Worker& w, const Input& input, int layer, int head, int first, int rows) {
  const LayerShape& shape = shape_.layers[layer];
  const Linear& linear = weights_.layer(layer).qkv;
  const int dim = shape.head_dim;
  float* out[2] = {w.space.out, w.space.out + size_t(rows) * dim};
  const int channel[2] = {shape.q_dim() + head * dim, shape.q_dim() + (shape.kv_heads + head) * dim};
  for (int i = 0; i < 2; ++i) {
    int at = channel[i];
    const Matrix& matrix = linear.part_of(at);
    multiply(kernels_, matrix, input, at / kTile, (at + dim) / kTile, first, rows, out[i], dim, w.space.matmul);
  }
  w.watch.lap(kOpQkv);
  for (int row = 0; row < rows; ++row) {
    int token = first + row;
    float *key = out[0] + size_t(row) * dim, *value = out[1] + size_t(row) * dim;
    if (linear.bias != nullptr) {
      kernels_.add_scaled(key, linear.bias + channel[0], 1, dim);
      kernels_.add_scaled(value, linear.bias + channel[1], 1, dim);
    }
    if (shape.qk_norm_across) {
      float* to = space_.kv + size_t(token) * 2 * shape.kv_dim() + head * dim;
      std::memcpy(to, key, dim * sizeof(float));
      std::memcpy(to + shape.kv_dim(), value, dim * sizeof(float));
      continue;
    }
    position_head(shape, weights_.layer(layer).k_norm, token, key);
    store_kv(layer, head, token, key, value);
  }
  w.watch.lap(kOpRopeStore);
}

void Model::store_kv(int layer, int head, int token, const float* key, const float* value) {
  int row = space_.token_row[token];
  int position = batch_.context_len[row] + token - batch_.row_start[row];
  int block = batch_.block_ids[batch_.block_start[row] + position / limits_.block_size];
  kernels_.store_kv(cache_[layer], head, block, position % limits_.block_size, key, value);
}

// Queries and keys of whole tokens: norm over all heads, then position, head by head.
void Model::norm_across_heads(Worker& w, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  const LayerWeights& weights = weights_.layer(layer);
  const float offset = shape_.norm_offset, eps = shape_.norm_eps;
  barrier(w);
  distribute(w, batch_.tokens, 1, true, [&](int token, int) {
    float* q = space_.q + size_t(token) * shape.q_dim();
    float* key = space_.kv + size_t(token) * 2 * shape.kv_dim();
    kernels_.rms_norm(q, weights.q_norm, offset, eps, shape.q_dim(), q);
    kernels_.rms_norm(key, weights.k_norm, offset, eps, shape.kv_dim(), key);
    for (int head = 0; head < shape.heads; ++head) rotate_head(shape, token, q + head * shape.head_dim);
    for (int i = 0; i < shape.q_dim(); ++i) q[i] *= shape.scale;
    for (int head = 0; head < shape.heads; ++head) kernels_.rotate(q + head * shape.head_dim, shape.head_dim);
    for (int head = 0; head < shape.kv_heads; ++head, key += shape.head_dim) {
      rotate_head(shape, token, key);
      store_kv(layer, head, token, key, key + shape.kv_dim());
    }
  });
  w.watch.lap(kOpRopeStore);
}

void Model::position_head(const LayerShape& shape, const float* norm, int token, float* head) const {
  if (norm != nullptr) kernels_.rms_norm(head, norm, shape_.norm_offset, shape_.norm_eps, shape.head_dim, head);
  rotate_head(shape, token, head);
}

void Model::rotate_head(const LayerShape& shape, int token, float* head) const {
  if (shape.rope < 0) return;
  size_t at = size_t(token) * space_.rope_stride + rope_offset_[shape.rope];
  kernels_.rope(head, space_.cosine + at, space_.sine + at, shape.rotary_dim);
}

// The last matrix of a block: adds scale * (W input + bias) to the residual stream, or stores it for a norm.
void Model::project(Worker& w, const Linear& linear, const Input& input, bool add, float scale, Op op) {
  const Matrix& matrix = linear.parts[0];
  auto unit = [&](int tile, int tile_end, int first, int rows) {
    int width = (tile_end - tile) * kTile, channel = tile * kTile, n = std::min(width, matrix.n - channel);
    multiply(kernels_, matrix, input, tile, tile_end, first, rows, w.space.out, width, w.space.matmul);
    w.watch.lap(op);
    for (int row = 0; row < rows; ++row) {
      float* out = w.space.out + size_t(row) * width;
      size_t at = size_t(first + row) * shape_.hidden + channel;
      if (linear.bias != nullptr) kernels_.add_scaled(out, linear.bias + channel, 1, n);
      if (add) {
        kernels_.add_scaled(space_.x + at, out, scale, n);
      } else {
        std::memcpy(space_.branch + at, out, n * sizeof(float));
      }
    }
    w.watch.lap(kOpResidual);
  };
  int tokens = batch_.tokens;
  if (tokens < kStaticRows) {
    distribute(w, matrix.tiles, kUnitTiles, true, [&](int tile, int end) { unit(tile, end, 0, tokens); });
    return;
  }
  int piece = std::clamp(matrix.tiles / (4 * pool_.size()), 1, kUnitTiles);
  int pieces = (matrix.tiles + piece - 1) / piece;
  distribute(w, pieces * chunks_of(tokens), 1, false, [&](int item, int) {
    for_chunk(item, tokens, [&](int number, int first, int rows) {
      unit(number * piece, std::min((number + 1) * piece, matrix.tiles), first, rows);
    });
  });
}

// The thread that has computed a run of channels also prepares it as input of the next matrix, so the grain is as many
// runs as share a scale there.
void Model::gate_up(Worker& w, const Input& input, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  int run = run_channels(shape.down_input), tokens = batch_.tokens;
  int grain = shape.down_input.group > 0 ? kScaled / run : 1;
  int runs = (shape.intermediate + run - 1) / run, grains = (runs + grain - 1) / grain;
  int most = std::max(1, kUnitTiles * kTile / (run * grain));
  auto unit = [&](int begin, int end, int first, int rows) {
    gate_up_unit(w, input, layer, begin * grain, std::min(end * grain, runs), first, rows);
  };
  if (tokens < kStaticRows) {
    distribute(w, grains, most, true, [&](int begin, int end) { unit(begin, end, 0, tokens); });
    return;
  }
  int piece = std::clamp(grains / (4 * pool_.size()), 1, most), pieces = (grains + piece - 1) / piece;
  distribute(w, pieces * chunks_of(tokens), 1, false, [&](int item, int) {
    for_chunk(item, tokens, [&](int number, int first, int rows) {
      unit(number * piece, std::min((number + 1) * piece, grains), first, rows);
    });
  });
}

void Model::gate_up_unit(Worker& w, const Input& input, int layer, int begin, int end, int first, int rows) {
  const LayerShape& shape = shape_.layers[layer];
  const LayerWeights& weights = weights_.layer(layer);
  const Linear& linear = weights.gate_up;
  int run = run_channels(shape.down_input);
  int channel = begin * run, channels = std::min(end * run, shape.intermediate) - channel;
  int tiles = (channels + kTile - 1) / kTile, width = tiles * kTile;
  float* out = w.space.out;
  bool fused = linear.count == 1;
  ptrdiff_t stride = fused ? 2 * width : width;
  int tile = fused ? 2 * channel / kTile : channel / kTile;
  multiply(kernels_, linear.parts[0], input, tile, tile + static_cast<int>(stride) / kTile, first, rows, out, stride,
           w.space.matmul);
  float* apart = out + size_t(rows) * width;
  if (!fused) multiply(kernels_, linear.parts[1], input, tile, tile + tiles, first, rows, apart, width, w.space.matmul);
  w.watch.lap(kOpGateUp);
  auto act = shape.activation == kSilu       ? kernels_.silu_mul
             : shape.activation == kGeluTanh ? kernels_.gelu_tanh_mul
                                             : kernels_.gelu_mul;
  Input down = make_input(shape.down_input, batch_.tokens, space_.down_input);
  float product[kUnitTiles * kTile];
  for (int row = 0; row < rows; ++row) {
    for (int c = 0; c < channels; c += run) {
      int count = std::min(run, channels - c), padded = static_cast<int>(align_up(count, kTile));
      float* gate = out + row * stride + (fused ? 2 * c : c);
      float* up = fused ? gate + padded : apart + row * stride + c;
      if (weights.gate_bias != nullptr) {
        kernels_.add_scaled(gate, weights.gate_bias + channel + c, 1, count);
        kernels_.add_scaled(up, weights.up_bias + channel + c, 1, count);
      }
      act(gate, up, count, product + c);
    }
    if (down.int8.hi != nullptr) kernels_.prepare(product, down.int8, first + row, channel, channels);
    if (down.dense.rows > 0) kernels_.prepare(product, down.dense, first + row, channel, channels);
  }
  w.watch.lap(kOpActivation);
}

}  // namespace lmdeploy
