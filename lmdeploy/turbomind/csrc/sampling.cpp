#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "philox.h"

namespace lmdeploy {

namespace {

constexpr float kLowestLogprob = -9999.0f;
constexpr float kGreedyBelow = 1e-5f;  // temperatures under this only ever choose the largest
constexpr int kBlocks = 256;           // pieces of the vocabulary whose mass is known before a draw
constexpr int kBlockSize = 64;         // ids whose largest logit stands for them when the largest of all are looked for
constexpr int kBins = 256;             // of logits, when the few at the border of a mass are looked for

// The row as the sampling rules see it at some point. A list of ids kept so far is in `index`, ascending, and the
// unnormalised probability exp((x - max) / temperature) of each of them in `weight`.
struct Row {
  const KernelTable& kernels;
  const float* x;
  int n;
  int32_t* index;
  float* weight;  // [n]

  // Order of likelihood: equal values by id.
  bool before(int a, int b) const { return x[a] != x[b] ? x[a] > x[b] : a < b; }

  int collect(float threshold) const { return kernels.collect(x, n, std::max(threshold, -FLT_MAX), index, n); }

  // A value that at least `count` logits reach, and not many more: so many blocks have a largest one of that size.
  float reached_by(int count) const {
    kernels.block_max(x, n, kBlockSize, weight);
    std::nth_element(weight, weight + count - 1, weight + (n + kBlockSize - 1) / kBlockSize, std::greater<float>());
    return weight[count - 1];
  }

  // The `count` largest finite logits, most likely first, in index; returns how many there are.
  int top(int count, float max) const {
    if (count <= 0) return 0;
    bool blocks = count <= n / kBlockSize;
    float threshold = blocks ? reached_by(count) : max - 8;
    int found = collect(threshold);
    for (float depth = 32; found < count && threshold > -FLT_MAX; depth *= 4) {
      threshold = max - depth;
      found = collect(threshold);
    }
    count = std::min(count, found);
    auto order = [this](int a, int b) { return before(a, b); };
    std::partial_sort(index, index + count, index + found, order);
    return count;
  }

  // Fills the weights of the ids in index[0, count).
  void weigh(int count, double max, float scale) const {
    for (int i = 0; i < count; ++i) weight[index[i]] = static_cast<float>(std::exp((x[index[i]] - max) * scale));
  }
  double sum(int count) const {
    double total = 0;
    for (int i = 0; i < count; ++i) total += weight[index[i]];
    return total;
  }
};

// The most likely ones of a sorted list that together hold `mass`.
int shortest_run(const Row& row, const int32_t* ids, int count, double mass) {
  double held = 0;
  for (int i = 0; i < count; ++i) {
    held += row.weight[ids[i]];
    if (held >= mass) return i + 1;
  }
  return count;
}

int keep_top_k(const Row& row, int count, float max, float scale, float top_p) {
  int kept = row.top(count, max);
  row.weigh(kept, max, scale);
  if (top_p < 1) kept = shortest_run(row, row.index, kept, top_p * row.sum(kept));
  std::sort(row.index, row.index + kept);
  return kept;
}

// Of index[0, found) the most likely ones that together hold `mass`, again ascending. Only those near the border are
// ever sorted: bins of equal width tell which.
int keep_mass(const Row& row, int found, double mass, float max) {
  float lowest = max;
  for (int i = 0; i < found; ++i) lowest = std::min(lowest, row.x[row.index[i]]);
  float factor = max > lowest ? (kBins - 1) / (max - lowest) : 0;
  auto bin_of = [&](int id) {
    float bin = (max - row.x[id]) * factor;
    return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;  // also where it is no number
  };
  double bins[kBins] = {};
  for (int i = 0; i < found; ++i) bins[bin_of(row.index[i])] += row.weight[row.index[i]];
  double held = 0;
  int border = 0;
  while (border < kBins && held + bins[border] < mass) held += bins[border++];
  if (border == kBins) return found;
  int32_t* begin = std::partition(row.index, row.index + found, [&](int id) { return bin_of(id) != border; });
  int count = static_cast<int>(row.index + found - begin);
  std::sort(begin, begin + count, [&](int a, int b) { return row.before(a, b); });
  int last = begin[std::max(shortest_run(row, begin, count, mass - held) - 1, 0)];
  int kept = row.collect(row.x[last]);
  auto beyond = [&](int id) { return row.before(last, id); };
  return static_cast<int>(std::remove_if(row.index, row.index + kept, beyond) - row.index);
}

int keep_top_p(const Row& row, float top_p, float max, float scale) {
  double mass = top_p * row.kernels.sum_exp(row.x, row.n, max, scale, row.weight);
  for (float depth = 4 / scale;; depth *= 2) {
    float threshold = std::max(max - depth, -FLT_MAX);
    int found = row.collect(threshold);
    if (row.sum(found) >= mass || threshold == -FLT_MAX) return keep_mass(row, found, mass, max);
  }
}

int keep_min_p(const Row& row, float min_p, int kept, float max, float scale) {
  if (kept == 0) {
    float depth = -std::log(min_p) / scale;
    kept = row.collect(max - depth * 1.001f - 1e-6f);
    row.weigh(kept, max, scale);
  }
  auto unlikely = [&](int id) { return row.weight[id] < min_p; };
  return static_cast<int>(std::remove_if(row.index, row.index + kept, unlikely) - row.index);
}

// The first id, in ascending order, at which the mass passed exceeds u times the whole.
int draw_among(const Row& row, int kept, double u) {
  double target = u * row.sum(kept), passed = 0;
  int chosen = row.index[0];
  for (int i = 0; i < kept; ++i) {
    float weight = row.weight[row.index[i]];
    if (weight > 0) chosen = row.index[i];
    passed += weight;
    if (passed > target) break;
  }
  return chosen;
}

int draw_from_all(const Row& row, double u, float max, float scale) {
  int size = std::max(1024, (row.n + kBlocks - 1) / kBlocks);
  int blocks = (row.n + size - 1) / size;
  double mass[kBlocks], total = 0;
  for (int b = 0; b < blocks; ++b) {
    int begin = b * size;
    mass[b] = row.kernels.sum_exp(row.x + begin, std::min(size, row.n - begin), max, scale, row.weight + begin);
    total += mass[b];
  }
  double target = u * total, passed = 0;
  int block = 0, last = 0;
  for (; block < blocks && passed + mass[block] <= target; ++block) passed += mass[block];
  block = std::min(block, blocks - 1);
  while (block > 0 && mass[block] == 0) --block;
  for (int id = block * size; id < std::min(row.n, (block + 1) * size); ++id) {
    if (row.weight[id] > 0) last = id;
    passed += row.weight[id];
    if (passed > target) break;
  }
  return last;
}

int draw(const Row& row, const SampleColumns& c, int i, float max) {
  float scale = 1 / c.temperature[i];
  double u = uniform(c.seed[i], static_cast<uint64_t>(c.position[i]));
  int kept = 0;  // 0: all
  if (c.top_k[i] > 0 && c.top_k[i] < row.n) {
    kept = keep_top_k(row, c.top_k[i], max, scale, c.top_p[i]);
  } else if (c.top_p[i] < 1) {
    kept = keep_top_p(row, c.top_p[i], max, scale);
  }
  if (c.min_p[i] > 0) kept = keep_min_p(row, c.min_p[i], kept, max, scale);
  return kept > 0 ? draw_among(row, kept, u) : draw_from_all(row, u, max, scale);
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

void apply_mask(const uint32_t* bits, int n, float* x) {
  for (int begin = 0; begin < n; begin += 32) {
    uint32_t word = bits[begin / 32];
    if (word == ~0u) continue;
    int count = std::min(32, n - begin);
    for (int i = 0; i < count; ++i) x[begin + i] = word >> i & 1 ? x[begin + i] : -INFINITY;
  }
}

// The drawn id, or -1 when every id is banned. The row is as before afterwards.
int choose(const Row& row, const SampleColumns& c, int i, float* x, float* original) {
  bool masked = c.mask_index != nullptr && c.mask_index[i] >= 0, changed = !masked && is_changed(c, i);
  if (masked) {
    std::copy_n(x, row.n, original);
    apply_changes(c, i, x);
    apply_mask(c.mask_bits + c.mask_index[i] * mask_words(row.n), row.n, x);
  }
  if (changed) {
    for_changed_ids(c, i, [&](int id) { original[id] = x[id]; });
    apply_changes(c, i, x);
  }
  int32_t largest = 0;
  float max = row.kernels.max(x, row.n, &largest);
  int chosen = std::isfinite(max) ? largest : -1;
  if (chosen >= 0 && c.temperature[i] >= kGreedyBelow) chosen = draw(row, c, i, max);
  if (changed) for_changed_ids(c, i, [&](int id) { x[id] = original[id]; });
  if (masked) std::copy_n(original, row.n, x);
  return chosen;
}

void clear_top(const StepOutput& out, int i) {
  std::fill_n(out.top_ids + static_cast<int64_t>(i) * out.top, out.top, -1);
  std::fill_n(out.top_logprobs + static_cast<int64_t>(i) * out.top, out.top, kLowestLogprob);
}

void write_logprobs(const Row& row, const SampleColumns& c, int i, int token, const StepOutput& out) {
  int32_t largest;
  float max = row.kernels.max(row.x, row.n, &largest);
  double total = max + std::log(row.kernels.sum_exp(row.x, row.n, max, 1, nullptr));
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
  Row row{kernels, logits, vocab, scratch.index, scratch.weight};
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
