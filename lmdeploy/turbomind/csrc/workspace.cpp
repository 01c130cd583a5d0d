#include "workspace.h"

#include <cmath>
#include <stdexcept>

namespace lmdeploy {

namespace {

int round_up(int value, int to) { return (value + to - 1) / to * to; }

Activations take_int8(const InputFormat& f, int rows, Arena& arena) {
  Activations a{};
  if (f.group == 0) return a;
  a.rows = rows;
  a.k = f.k;
  a.group = f.group;
  a.k_padded = round_up(f.k, f.group);
  a.groups = a.k_padded / f.group;
  size_t values = size_t(rows) * a.k_padded, scales = size_t(round_up(rows, kRowBlock)) * a.groups;
  a.threshold = f.threshold;
  a.hi = arena.take<int8_t>(values);
  if (std::isfinite(f.threshold)) {
    a.lo = arena.take<int8_t>(values);
    a.second = arena.take<uint8_t>(scales);
  }
  a.scale = arena.take<float>(scales);
  a.sum = arena.take<float>(scales);
  a.parts = arena.take<int32_t>(scales);
  return a;
}

Activations take_dense(const InputFormat& f, int rows, Arena& arena) {
  Activations a{};
  if (f.bf16 == 0 && !f.f32) return a;
  a.rows = rows;
  a.k = f.k;
  a.k_padded = round_up(f.k, 2);
  size_t values = size_t(rows) * a.k_padded;
  if (f.bf16 > 0) a.bf_hi = arena.take<uint16_t>(values);
  if (f.bf16 > 1) a.bf_lo = arena.take<uint16_t>(values);
  if (f.f32) a.f32 = arena.take<float>(values);
  return a;
}

Input take_input(const InputFormat& format, int rows, Arena& arena) {
  Input input;
  input.int8 = take_int8(format, rows, arena);
  input.dense = take_dense(format, rows, arena);
  return input;
}

template <class F>
auto largest(const ModelShape& shape, F f) {
  decltype(f(shape.layers[0])) most{};
  for (const LayerShape& layer : shape.layers) most = std::max(most, f(layer));
  return most;
}

// The same for every instruction set, so that the memory plan need not know which one runs.
size_t matmul_scratch(const KernelTable& kernels, int inputs) {
  size_t room = size_t(64) * inputs + (size_t(64) << 10);
  if (kernels.matmul_scratch_bytes(inputs) > room) throw std::length_error("matmul scratch is larger than its plan");
  return room;
}

size_t wide_input_bytes(const ModelShape& shape, int rows) {
  size_t most = largest(shape, [&](const LayerShape& l) {
    return std::max({input_bytes(l.qkv_input, rows), input_bytes(l.o_input, rows), input_bytes(l.gate_up_input, rows)});
  });
  return std::max(most, input_bytes(shape.head_input, rows));
}

int max_q_dim(const ModelShape& shape) {
  return largest(shape, [](const LayerShape& l) { return l.q_dim(); });
}

// Query vectors x head_dim of one attention unit, and query vectors alone.
size_t tile_floats(const LayerShape& l) {
  int heads = l.heads / l.kv_heads;
  return size_t(tile_rows(heads)) * heads * l.head_dim;
}
size_t tile_vectors(const LayerShape& l) {
  int heads = l.heads / l.kv_heads;
  return size_t(tile_rows(heads)) * heads;
}

Partial take_partial(size_t vectors, size_t values, Arena& arena) {
  Partial p;
  p.out = arena.take<float>(values);
  p.max = arena.take<float>(vectors);
  p.sum = arena.take<float>(vectors);
  return p;
}

}  // namespace

size_t input_bytes(const InputFormat& format, int rows) {
  Arena arena;
  take_input(format, rows, arena);
  return arena.used();
}

Input make_input(const InputFormat& format, int rows, uint8_t* memory) {
  Arena arena(memory, input_bytes(format, rows));
  return take_input(format, rows, arena);
}

Activations rows_of(const Activations& a, int begin, int rows) {
  Activations view = a;
  view.rows = rows;
  size_t values = size_t(begin) * a.k_padded, scales = size_t(begin) * a.groups;
  if (a.hi != nullptr) {
    view.hi += values;
    if (a.lo != nullptr) {
      view.lo += values;
      view.second += scales;
    }
    view.scale += scales;
    view.sum += scales;
    view.parts += scales;
  }
  if (a.bf_hi != nullptr) view.bf_hi += values;
  if (a.bf_lo != nullptr) view.bf_lo += values;
  if (a.f32 != nullptr) view.f32 += values;
  return view;
}

Workspace::Workspace(const ModelShape& shape, const Limits& limits, const KernelTable& kernels, Arena& arena) {
  vocab_stride = round_up(shape.vocab, kTile);
  int fits = static_cast<int>(kLogitBytes / (sizeof(float) * vocab_stride));
  logit_rows = std::clamp(fits, 1, limits.max_step_tokens);
  rope_stride = 0;
  for (const auto& frequencies : shape.rope) rope_stride += static_cast<int>(frequencies.size());
  take_shared(shape, limits, arena);
  for (int i = 0; i < limits.threads; ++i) take_thread(shape, limits, kernels, arena);
}

void Workspace::take_shared(const ModelShape& shape, const Limits& limits, Arena& arena) {
  size_t tokens = limits.max_step_tokens;
  bool post_norm = largest(shape, [](const LayerShape& l) { return int(l.post_norm); }) != 0;
  x = arena.take<float>(tokens * shape.hidden);
  branch = arena.take<float>(post_norm ? tokens * shape.hidden : 0);
  q = arena.take<float>(tokens * max_q_dim(shape));
  attention = arena.take<float>(tokens * max_q_dim(shape));
  int kv_across = largest(shape, [](const LayerShape& l) { return l.qk_norm_across ? 2 * l.kv_dim() : 0; });
  kv = arena.take<float>(tokens * kv_across);
  cosine = arena.take<float>(tokens * rope_stride);
  sine = arena.take<float>(tokens * rope_stride);
  input = arena.take_bytes(wide_input_bytes(shape, limits.max_step_tokens));
  down_input = arena.take_bytes(
      largest(shape, [&](const LayerShape& l) { return input_bytes(l.down_input, limits.max_step_tokens); }));
  logits = arena.take<float>(size_t(logit_rows) * vocab_stride);
  bad_row = arena.take<std::atomic<uint8_t>>(logit_rows);
  // Two whole contexts per thread: enough to spread what few long sequences there are over all threads.
  shared_parts = 2 * limits.threads * splits_of(limits.max_context);
  size_t heads = largest(shape, [](const LayerShape& l) { return l.heads / l.kv_heads; });
  size_t values = largest(shape, [](const LayerShape& l) { return l.heads / l.kv_heads * l.head_dim; });
  shared = take_partial(shared_parts * heads, shared_parts * values, arena);
  splits_done = arena.take<std::atomic<int>>(shared_parts);
  tiles = arena.take<QueryTile>(tokens);
  token_row = arena.take<int32_t>(tokens);
}

void Workspace::take_thread(const ModelShape& shape, const Limits& limits, const KernelTable& kernels, Arena& arena) {
  int widest = std::max(2 * kUnitTiles * kTile, largest(shape, [](const LayerShape& l) { return 2 * l.head_dim; }));
  int deepest = std::max(shape.hidden, max_q_dim(shape));
  deepest = std::max(deepest, largest(shape, [](const LayerShape& l) { return l.intermediate; }));
  ThreadSpace t{};
  t.input = arena.take_bytes(wide_input_bytes(shape, kFewRows));
  t.row = arena.take<float>(std::max(shape.hidden, max_q_dim(shape)));
  t.reordered = arena.take<float>(std::max(shape.hidden, max_q_dim(shape)));
  t.out = arena.take<float>(size_t(std::min(kRowChunk, round_up(limits.max_step_tokens, kRowBlock))) * widest);
  t.matmul = arena.take_bytes(matmul_scratch(kernels, round_up(deepest, 128)));
  t.total = take_partial(largest(shape, tile_vectors), largest(shape, tile_floats), arena);
  t.part = take_partial(largest(shape, tile_vectors), largest(shape, tile_floats), arena);
  t.sample.index = arena.take<int32_t>(shape.vocab);
  t.sample.original = arena.take<float>(shape.vocab);
  t.sample.weight = arena.take<float>(shape.vocab);
  threads.push_back(t);
}

size_t workspace_bytes(const ModelShape& shape, const Limits& limits, const KernelTable& kernels) {
  Arena arena;
  Workspace(shape, limits, kernels, arena);
  return arena.used();
}

}  // namespace lmdeploy
