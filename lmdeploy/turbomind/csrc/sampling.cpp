#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "philox.h"

namespace lmdeploy {

namespace {

constexpr float kLowestLogprob = -9999.0f;
constexpr float kGreedyBelow = 1e-5f;  // temperatures under this only ever choose the largest
constexpr int kBlocks = 256;           // pieces of the vocabulary whose mass is known before a draw

// The row as the sampling rules see it at some point, with the list of ids kept so far.
struct Row {
  const KernelTable& kernels;
  const float* x;
  int n;
  int32_t* index;

  bool before(int a, int b) const { return x[a] != x[b] ? x[a] > x[b] : a < b; }

  // Puts the `count` largest of index[begin, end) first, largest first, equal values by id.
  void sort_largest(int begin, int count, int end) const {
    auto order = [this](int a, int b) { return before(a, b); };
    std::partial_sort(index + begin, index + begin + count, index + end, order);
  }

  int collect(float threshold) const { return kernels.collect(x, n, threshold, index, n); }

  // The `count` largest finite logits, sorted, in index; returns how many there are.
  int top(int count, float max) const {
    if (count <= 0) return 0;
    for (float depth = 8;; depth *= 4) {
      float threshold = std::max(max - depth, -FLT_MAX);
      int found = collect(threshold);
      if (found < count && threshold > -FLT_MAX) continue;
      count = std::min(count, found);
      sort_largest(0, count, found);
      return count;
    }
  }
};

// exp((x - max) / temperature), the unnormalised probability.
struct Weights {
  const Row& row;
  double max;
  float scale;

  double operator()(int id) const { return std::exp((row.x[id] - max) * scale); }
  double sum(int count) const {
    double total = 0;
    for (int i = 0; i < count; ++i) total += (*this)(row.index[i]);
    return total;
  }
};

// The shortest run of the largest ones in index[0, count) that holds `mass`; -1 when all of them hold less.
int shortest_run(const Weights& weights, int count, double mass, int sorted) {
  double held = 0;
  int step = 64;
  for (int i = 0; i < count; ++i) {
    if (i == sorted) {
      weights.row.sort_largest(i, std::min(step, count - i), count);
      sorted = std::min(i + step, count);
      step *= 4;
    }
    held += weights(weights.row.index[i]);
    if (held >= mass) return i + 1;
  }
  return -1;
}

int keep_top_p(const Weights& weights, float top_p, int kept) {
  if (kept > 0) {  // on what top_k left, already sorted
    int run = shortest_run(weights, kept, top_p * weights.sum(kept), kept);
    return run < 0 ? kept : run;
  }
  const Row& row = weights.row;
  float max = static_cast<float>(weights.max);
  double mass = top_p * row.kernels.sum_exp(row.x, row.n, max, weights.scale);
  for (float depth = 8 / weights.scale;; depth *= 4) {
    float threshold = std::max(max - depth, -FLT_MAX);
    int found = row.collect(threshold);
    int run = shortest_run(weights, found, mass, 0);
    if (run >= 0) return run;
    if (threshold == -FLT_MAX) return found;
  }
}

int keep_min_p(const Weights& weights, float min_p, int kept) {
  const Row& row = weights.row;
  if (kept == 0) {
    float depth = -std::log(min_p) / weights.scale;
    kept = row.collect(std::max(static_cast<float>(weights.max) - depth * 1.001f - 1e-6f, -FLT_MAX));
  }
  auto unlikely = [&](int id) { return weights(id) < min_p; };
  return static_cast<int>(std::remove_if(row.index, row.index + kept, unlikely) - row.index);
}

// The first id, in ascending order, at which the mass passed exceeds u times the whole.
int draw_among(const Weights& weights, int kept, double u) {
  int32_t* index = weights.row.index;
  std::sort(index, index + kept);
  double target = u * weights.sum(kept), passed = 0;
  int chosen = index[0];
  for (int i = 0; i < kept; ++i) {
    double weight = weights(index[i]);
    if (weight > 0) chosen = index[i];
    passed += weight;
    if (passed > target) break;
  }
  return chosen;
}

int draw_from_all(const Weights& weights, double u) {
  const Row& row = weights.row;
  int size = std::max(1024, (row.n + kBlocks - 1) / kBlocks);
  int blocks = (row.n + size - 1) / size;
  double mass[kBlocks], total = 0;
  for (int b = 0; b < blocks; ++b) {
    mass[b] = row.kernels.sum_exp(row.x + b * size, std::min(size, row.n - b * size), static_cast<float>(weights.max),
                                  weights.scale);
    total += mass[b];
  }
  double target = u * total, passed = 0;
  int block = 0, last = 0;
  for (; block < blocks && passed + mass[block] <= target; ++block) passed += mass[block];
  block = std::min(block, blocks - 1);
  while (block > 0 && mass[block] == 0) --block;
  for (int id = block * size; id < std::min(row.n, (block + 1) * size); ++id) {
    double weight = weights(id);
    if (weight > 0) last = id;
    passed += weight;
    if (passed > target) break;
  }
  return last;
}

int draw(const Row& row, const SampleColumns& c, int i, float max) {
  Weights weights{row, max, 1 / c.temperature[i]};
  double u = uniform(c.seed[i], static_cast<uint64_t>(c.position[i]));
  int kept = 0;  // 0: all
  if (c.top_k[i] > 0 && c.top_k[i] < row.n) kept = row.top(c.top_k[i], max);
  if (c.top_p[i] < 1) kept = keep_top_p(weights, c.top_p[i], kept);
  if (c.min_p[i] > 0) kept = keep_min_p(weights, c.min_p[i], kept);
  return kept > 0 ? draw_among(weights, kept, u) : draw_from_all(weights, u);
}

bool is_changed(const SampleColumns& c, int i) {
  return c.bias_start[i] < c.bias_start[i + 1] || c.history_start[i] < c.history_start[i + 1];
}

template <class F>
void for_changed_ids(const SampleColumns& c, int i, F f) {
  for (int j = c.bias_start[i]; j < c.bias_start[i + 1]; ++j) f(c.bias_ids[j]);
  for (int j = c.history_start[i]; j < c.history_start[i + 1]; ++j) f(c.history_ids[j]);
}

void apply_changes(const SampleColumns& c, int i, float* x) {
  for (int j = c.bias_start[i]; j < c.bias_start[i + 1]; ++j) x[c.bias_ids[j]] += c.bias_values[j];
  float repetition = c.repetition_penalty[i];
  for (int j = c.history_start[i]; j < c.history_start[i + 1]; ++j) {
    float& value = x[c.history_ids[j]];
    if (repetition != 1) value = value > 0 ? value / repetition : value * repetition;
    int count = c.history_counts[j];
    if (count > 0) value -= c.presence_penalty[i] + c.frequency_penalty[i] * static_cast<float>(count);
  }
}

// The drawn id, or -1 when every id is banned. The row is as before afterwards.
int choose(const Row& row, const SampleColumns& c, int i, float* x, float* original) {
  bool changed = is_changed(c, i);
  if (changed) {
    for_changed_ids(c, i, [&](int id) { original[id] = x[id]; });
    apply_changes(c, i, x);
  }
  int32_t largest = 0;
  float max = row.kernels.max(x, row.n, &largest);
  int chosen = std::isfinite(max) ? largest : -1;
  if (chosen >= 0 && c.temperature[i] >= kGreedyBelow) chosen = draw(row, c, i, max);
  if (changed) for_changed_ids(c, i, [&](int id) { x[id] = original[id]; });
  return chosen;
}

void clear_top(const StepOutput& out, int i) {
  std::fill_n(out.top_ids + static_cast<int64_t>(i) * out.top, out.top, -1);
  std::fill_n(out.top_logprobs + static_cast<int64_t>(i) * out.top, out.top, kLowestLogprob);
}

void write_logprobs(const Row& row, const SampleColumns& c, int i, int token, const StepOutput& out) {
  int32_t largest;
  float max = row.kernels.max(row.x, row.n, &largest);
  double total = max + std::log(row.kernels.sum_exp(row.x, row.n, max, 1));
  auto logprob = [&](int id) { return std::max(static_cast<float>(row.x[id] - total), kLowestLogprob); };
  out.logprob[i] = logprob(token);
  int count = std::min(row.top(c.logprobs[i], max), out.top);
  for (int j = 0; j < count; ++j) {
    out.top_ids[static_cast<int64_t>(i) * out.top + j] = row.index[j];
    out.top_logprobs[static_cast<int64_t>(i) * out.top + j] = logprob(row.index[j]);
  }
}

}  // namespace

void sample_row(const KernelTable& kernels, const SampleColumns& columns, int sample, float* logits, int vocab,
                bool finite, const SampleScratch& scratch, const StepOutput& out) {
  Row row{kernels, logits, vocab, scratch.index};
  int token = columns.target_ids[sample];
  if (finite && token < 0) token = choose(row, columns, sample, logits, scratch.original);
  finite = finite && token >= 0;
  clear_top(out, sample);
  out.finite[sample] = finite;
  out.token_ids[sample] = finite ? token : -1;
  out.logprob[sample] = 0;
  if (finite && columns.logprobs[sample] >= 0) write_logprobs(row, columns, sample, token, out);
}

}  // namespace lmdeploy
