#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kv_layer.h"

namespace lmdeploy {

size_t cache_block_bytes(const ModelShape& shape, int block_size, int kv_bits) {
  size_t bytes = 0;
  for (const LayerShape& l : shape.layers) bytes += l.kv_heads * kv_head_bytes(block_size, l.head_dim, kv_bits);
  return bytes;
}

Model::Model(const ModelShape& shape, const Limits& limits, const std::vector<int>& cpus, size_t weight_bytes,
             const KernelTable& kernels)
    : shape_(shape),
      limits_(limits),
      kernels_(kernels),
      pool_(cpus),
      weights_(weight_bytes, static_cast<int>(shape.layers.size())),
      cache_memory_(cache_block_bytes(shape, limits.block_size, limits.kv_bits) * limits.num_blocks),
      workspace_memory_(workspace_bytes(shape, limits, kernels)),
      arena_(workspace_memory_.data(), workspace_memory_.size()),
      space_(shape, limits, kernels, arena_) {
  auto touch = [this](int thread) {
    cache_memory_.touch(thread, pool_.size());
    workspace_memory_.touch(thread, pool_.size());
  };
  pool_.run(touch);
  uint8_t* base = cache_memory_.data();
  for (const LayerShape& l : shape_.layers) {
    cache_.push_back(make_kv_layer(base, l.kv_heads, limits.block_size, l.head_dim, limits.kv_bits));
    base += cache_.back().block_stride * limits.num_blocks;
  }
  int offset = 0;
  for (const auto& frequencies : shape_.rope) {
    rope_offset_.push_back(offset);
    offset += static_cast<int>(frequencies.size());
  }
}

void Model::fill_cache(uint16_t bits) {
  auto* values = reinterpret_cast<uint16_t*>(cache_memory_.data());
  std::fill_n(values, cache_memory_.size() / sizeof(uint16_t), bits);
}

void Model::step(const Batch& batch, const StepOutput& output) {
  std::lock_guard<std::mutex> one_at_a_time(mutex_);
  batch_ = batch;
  output_ = output;
  for (int row = 0; row < batch.rows; ++row) {
    std::fill(space_.token_row + batch.row_start[row], space_.token_row + batch.row_start[row + 1], row);
  }
  plan_attention();
  for (Counter& counter : counters_) counter.value.store(0);
  auto body = [this](int thread) { work(thread); };
  pool_.run(body);
}

void Model::work(int thread) {
  OpTime* times = nullptr;
  if (!profile_.empty()) {
    times = profile_[thread].data();
    std::fill_n(times, kOps, OpTime{});
  }
  Worker w{thread, 0, space_.threads[thread], Stopwatch(times)};
  embed(w);
  barrier(w);
  for (int layer = 0; layer < static_cast<int>(shape_.layers.size()); ++layer) {
    attention_block(w, layer);
    ffn_block(w, layer);
  }
  output_head(w);
}

void Model::barrier(Worker& w) {
  pool_.barrier();
  w.watch.lap(kOpBarrier);
}

void Model::set_profile(bool on) {
  std::lock_guard<std::mutex> no_step(mutex_);
  profile_.assign(on ? pool_.size() : 0, OpTimes(kOps));
}

void Model::embed(Worker& w) {
  distribute(w, batch_.tokens, 1, true, [&](int token, int) {
    float* x = space_.x + size_t(token) * shape_.hidden;
    kernels_.gather_row(weights_.embedding(), batch_.token_ids[token], x);
    if (shape_.embedding_scale != 1) {
      for (int i = 0; i < shape_.hidden; ++i) x[i] *= shape_.embedding_scale;
    }
    int row = space_.token_row[token];
    double position = batch_.context_len[row] + token - batch_.row_start[row];
    size_t at = size_t(token) * space_.rope_stride;
    for (size_t rope = 0; rope < shape_.rope.size(); ++rope) {
      double scale = shape_.rope_scale[rope];
      for (double frequency : shape_.rope[rope]) {
        space_.cosine[at] = static_cast<float>(scale * std::cos(position * frequency));
        space_.sine[at++] = static_cast<float>(scale * std::sin(position * frequency));
      }
    }
  });
  w.watch.lap(kOpEmbed);
}

void Model::attention_block(Worker& w, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  const LayerWeights& weights = weights_.layer(layer);
  const float* norm = shape.pre_norm ? weights.attn_norm : nullptr;
  qkv(w, prepared(w, space_.x, nullptr, batch_.tokens, norm, shape.qkv_input, weights.qkv.order), layer);
  if (shape.qk_norm_across) norm_across_heads(w, layer);
  barrier(w);
  attention(w, layer);
  w.watch.lap(kOpAttention);
  barrier(w);
  Input input = prepared(w, space_.attention, nullptr, batch_.tokens, nullptr, shape.o_input, weights.o.order);
  project(w, weights.o, input, !shape.post_norm, shape.residual_scale, kOpO);
  barrier(w);
  if (shape.post_norm) add_normed(w, weights.attn_post_norm, shape.residual_scale);
}

void Model::ffn_block(Worker& w, int layer) {
  const LayerShape& shape = shape_.layers[layer];
  const LayerWeights& weights = weights_.layer(layer);
  const float* norm = shape.pre_norm ? weights.ffn_norm : nullptr;
  gate_up(w, prepared(w, space_.x, nullptr, batch_.tokens, norm, shape.gate_up_input, weights.gate_up.order), layer);
  barrier(w);
  Input input = make_input(shape.down_input, batch_.tokens, space_.down_input);
  project(w, weights.down, input, !shape.post_norm, shape.residual_scale, kOpDown);
  barrier(w);
  if (shape.post_norm) add_normed(w, weights.ffn_post_norm, shape.residual_scale);
}

void Model::output_head(Worker& w) {
  const SampleColumns& samples = batch_.samples;
  for (int first = 0; first < samples.count; first += space_.logit_rows) {
    int rows = std::min(space_.logit_rows, samples.count - first);
    Input input = prepared(w, space_.x, samples.token_index + first, rows, weights_.final_norm(), shape_.head_input,
                           weights_.head().order);
    head_logits(w, input, rows);
    if (w.id == 0 && first == 0 && batch_.wait_for_masks != nullptr) (*batch_.wait_for_masks)();
    barrier(w);
    sample_rows(w, first, rows);
    w.watch.lap(kOpSample);
    barrier(w);
  }
}

void Model::head_logits(Worker& w, const Input& input, int rows) {
  const Matrix& head = weights_.head().parts[0];
  distribute(w, head.tiles, kHeadTiles, rows < kStaticRows, [&](int begin, int end) {
    float* out = space_.logits + begin * kTile;
    kernels_.matmul(head, input.of(head), begin, end, out, space_.vocab_stride, w.space.matmul);
    w.watch.lap(kOpHead);
    finish_logits(out, rows, begin * kTile, std::min(end * kTile, shape_.vocab) - begin * kTile);
    w.watch.lap(kOpFinish);
  });
}

// Scales and caps columns [begin, begin + count) of all rows, and notes rows with a number that is not finite.
void Model::finish_logits(float* out, int rows, int begin, int count) {
  const float* bias = weights_.head().bias;
  for (int row = 0; row < rows; ++row, out += space_.vocab_stride) {
    if (bias != nullptr) kernels_.add_scaled(out, bias + begin, 1, count);
    bool finite = kernels_.finish_logits(out, count, shape_.logit_scale, shape_.logit_softcap);
    if (!finite) space_.bad_row[row].store(1, std::memory_order_relaxed);
  }
}

void Model::sample_rows(Worker& w, int first, int rows) {
  distribute(w, rows, 1, false, [&](int row, int) {
    float* logits = space_.logits + size_t(row) * space_.vocab_stride;
    float* copy = output_.logits[first + row];
    if (copy != nullptr) std::memcpy(copy, logits, shape_.vocab * sizeof(float));
    bool finite = space_.bad_row[row].load(std::memory_order_relaxed) == 0;
    space_.bad_row[row].store(0, std::memory_order_relaxed);
    sample_row(kernels_, batch_.samples, first + row, logits, shape_.vocab, finite, w.space.sample, output_);
  });
}

}  // namespace lmdeploy
