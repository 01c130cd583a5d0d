// Compares the NEON kernels with the portable ones, which Python tests compare with NumPy: a program, so that an
// emulator can run it where there is no Python of that processor. Prints each check; exit status 1 when one fails.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "kv_layer.h"

using namespace lmdeploy;

namespace lmdeploy {
const KernelTable& neon_table();
}

namespace {

std::mt19937 engine(7);
int failures = 0;

float normal() { return std::normal_distribution<float>()(engine); }
std::vector<float> normals(size_t n) {
  std::vector<float> x(n);
  for (float& v : x) v = normal();
  return x;
}

void report(const std::string& name, double error, double bound) {
  const bool good = error <= bound;
  if (!good) ++failures;
  std::printf("%-60s %.2e of %.0e %s\n", name.c_str(), error, bound, good ? "" : "FAILED");
}

// Largest difference over the root mean square of the expected values; NaN must meet NaN.
double difference(const std::vector<float>& got, const std::vector<float>& expected) {
  double worst = 0, squares = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i]) != std::isnan(got[i])) return std::numeric_limits<double>::infinity();
    if (std::isnan(expected[i]) || expected[i] == got[i]) continue;
    worst = std::max(worst, std::fabs(double(got[i]) - double(expected[i])));
  }
  for (float v : expected) squares += std::isfinite(v) ? double(v) * v : 0;
  return worst / std::max(std::sqrt(squares / got.size()), 1e-30);
}

template <typename T>
struct Aligned {
  std::vector<T> memory;
  T* data;
  explicit Aligned(size_t n) : memory(n + 128 / sizeof(T)) {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    data = reinterpret_cast<T*>((at + 63) / 64 * 64);
  }
};

// ---- products ----

bool is_dense(WeightKind kind) { return kind == kBf16 || kind == kFp16; }

struct Weights {
  Aligned<uint8_t> lines, zeros;
  Aligned<uint16_t> scales, mins;
  Matrix matrix;

  Weights(WeightKind kind, int n, int k, int group)
      : lines(size_t(n) * k * 2), zeros(size_t(n) * k), scales(size_t(n) * k), mins(size_t(n) * k) {
    for (int i = 0; i < n * k * 2; ++i) lines.data[i] = uint8_t(engine());
    if (kind == kFp16)  // as a.f32 wants them: all finite
      for (int i = 1; i < n * k * 2; i += 2) lines.data[i] &= 0xbb;
    if (kind == kBf16)  // exponents near 1
      for (int i = 1; i < n * k * 2; i += 2) lines.data[i] = uint8_t((lines.data[i] & 0x80) | 0x3f);
    for (int i = 0; i < n * k; ++i) {
      zeros.data[i] = uint8_t(engine() & 15);
      scales.data[i] = uint16_t(0x2000 + (engine() & 0x3ff));  // about 0.01
      mins.data[i] = uint16_t(0xa000 + (engine() & 0x3ff));
    }
    const bool has_min = kind == kW4Min || kind == kInt8Min;
    matrix = {kind,
              n,
              k,
              n / kTile,
              k,
              is_dense(kind) ? 0 : group,
              is_dense(kind) ? 0 : k / group,
              lines.data,
              scales.data,
              kind == kW4Zero ? zeros.data : nullptr,
              has_min ? mins.data : nullptr};
  }
};

struct Inputs {
  Aligned<int8_t> hi, lo;
  Aligned<uint8_t> second;
  std::vector<float> scale, sum;
  std::vector<int32_t> parts;
  std::vector<uint16_t> bf_hi, bf_lo;
  std::vector<float> f32;
  Activations view;

  Inputs(int rows, int k, int group, float threshold, WeightKind kind)
      : hi(size_t(rows + 8) * k),
        lo(size_t(rows + 8) * k),
        second(size_t(rows + 8) * k),
        scale(size_t(rows) * k),
        sum(size_t(rows) * k),
        parts(size_t(rows) * k),
        bf_hi(size_t(rows + 8) * k),
        bf_lo(size_t(rows + 8) * k),
        f32(size_t(rows + 8) * k) {
    const bool one = std::isinf(threshold);
    view = {};
    view.rows = rows;
    view.k = view.k_padded = k;
    view.group = group;
    view.groups = k / group;
    view.threshold = threshold;
    if (kind == kFp16) {
      view.f32 = f32.data();
      return;
    }
    if (kind == kBf16) {
      view.bf_hi = bf_hi.data();
      view.bf_lo = one ? nullptr : bf_lo.data();
      return;
    }
    view.hi = hi.data;
    view.lo = one ? nullptr : lo.data;
    view.second = one ? nullptr : second.data;
    view.scale = scale.data();
    view.sum = sum.data();
    view.parts = parts.data();
  }
};

std::vector<float> product(const KernelTable& table, const Weights& w, const std::vector<float>& x, int rows,
                           float threshold, Inputs** kept = nullptr) {
  const Matrix& m = w.matrix;
  auto* inputs = new Inputs(rows, m.k, m.group ? m.group : 32, threshold, m.kind);
  for (int r = 0; r < rows; ++r) table.prepare(x.data() + size_t(r) * m.k, inputs->view, r, 0, m.k);
  std::vector<float> out(size_t(rows) * m.n);
  Aligned<uint8_t> scratch(table.matmul_scratch_bytes(m.k_padded) + 64);
  table.matmul(m, inputs->view, 0, m.tiles, out.data(), m.n, scratch.data);
  if (kept) {
    *kept = inputs;
  } else {
    delete inputs;
  }
  return out;
}

void check_product(const KernelTable& neon, WeightKind kind, int group, int rows, float threshold) {
  const int n = 48, k = 384;
  const Weights w(kind, n, k, group);
  std::vector<float> x = normals(size_t(rows) * k);
  for (size_t i = 5; i < x.size(); i += 97) x[i] *= 40;
  const std::string name = "matmul kind " + std::to_string(kind) + " group " + std::to_string(group) + " rows " +
                           std::to_string(rows) + " threshold " + std::to_string(threshold);
  Inputs *mine, *theirs;
  const std::vector<float> got = product(neon, w, x, rows, threshold, &mine);
  const std::vector<float> expected = product(portable_table(), w, x, rows, threshold, &theirs);
  report(name, difference(got, expected), 1e-5);
  if (!is_dense(kind)) report("  first plane", std::memcmp(mine->hi.data, theirs->hi.data, size_t(rows) * k), 0);
  if (!is_dense(kind) && mine->view.lo)
    report("  second plane", std::memcmp(mine->lo.data, theirs->lo.data, size_t(rows) * k), 0);
  delete mine;
  delete theirs;
  double unequal = 0;
  for (int r = 0; r < rows; ++r) {
    const std::vector<float> row(x.begin() + size_t(r) * k, x.begin() + size_t(r + 1) * k);
    const std::vector<float> alone = product(neon, w, row, 1, threshold);
    unequal += std::memcmp(alone.data(), got.data() + size_t(r) * n, size_t(n) * 4) != 0;
  }
  report("  rows that differ from themselves alone", unequal, 0);
}

void check_products(const KernelTable& neon) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (WeightKind kind : {kW4Zero, kW4Min, kInt8, kInt8Min})
    for (int group : {16, 32, 128})
      for (int rows : {1, 2, 3, 8, 9, 17})
        for (float threshold : {0.0f, 3.0f, infinity})
          if (group != 16 || kind == kInt8) check_product(neon, kind, group, rows, threshold);
  for (int rows : {1, 2, 9})
    for (float threshold : {0.0f, infinity}) {
      check_product(neon, kBf16, 0, rows, threshold);
      check_product(neon, kFp16, 0, rows, threshold);
    }
}

void check_gather(const KernelTable& neon) {
  for (WeightKind kind : {kW4Zero, kW4Min, kInt8, kInt8Min, kBf16, kFp16}) {
    const Weights w(kind, 32, 128, 32);
    std::vector<float> a(128), b(128);
    for (int row : {0, 17, 31}) {
      neon.gather_row(w.matrix, row, a.data());
      portable_table().gather_row(w.matrix, row, b.data());
      report("gather_row kind " + std::to_string(kind), difference(a, b), 1e-6);
    }
  }
}

// ---- small operations ----

void check_small(const KernelTable& neon) {
  const KernelTable& plain = portable_table();
  for (int n : {1, 15, 16, 17, 576, 1000}) {
    const std::string size = " of " + std::to_string(n);
    std::vector<float> x = normals(n), y = normals(n), a(n), b(n);
    neon.rms_norm(x.data(), y.data(), 1.0f, 1e-6f, n, a.data());
    plain.rms_norm(x.data(), y.data(), 1.0f, 1e-6f, n, b.data());
    report("rms_norm" + size, difference(a, b), 1e-5);
    const std::pair<const char*, decltype(plain.silu_mul) KernelTable::*> maps[] = {
        {"silu_mul", &KernelTable::silu_mul},
        {"gelu_tanh_mul", &KernelTable::gelu_tanh_mul},
        {"gelu_mul", &KernelTable::gelu_mul}};
    for (const auto& [name, member] : maps) {
      (neon.*member)(x.data(), y.data(), n, a.data());
      (plain.*member)(x.data(), y.data(), n, b.data());
      report(name + size, difference(a, b), 1e-5);
    }
    a = b = x;
    neon.add_scaled(a.data(), y.data(), 0.3f, n);
    plain.add_scaled(b.data(), y.data(), 0.3f, n);
    report("add_scaled" + size, difference(a, b), 1e-6);
    int32_t i = 0, j = 0;
    report("max" + size, neon.max(x.data(), n, &i) != plain.max(x.data(), n, &j) || i != j, 0);
    const double s = neon.sum_exp(x.data(), n, 1.0f, 0.7f, a.data()),
                 t = plain.sum_exp(x.data(), n, 1.0f, 0.7f, b.data());
    report("sum_exp" + size, std::fabs(s / t - 1), 1e-6);
    report("  each" + size, difference(a, b), 1e-6);
    std::vector<int32_t> p(n), q(n);
    const int count = neon.collect(x.data(), n, 0.5f, p.data(), n);
    report("collect" + size, count != plain.collect(x.data(), n, 0.5f, q.data(), n) || p != q, 0);
    std::vector<float> tops((n + 31) / 32), others(tops.size());
    neon.block_max(x.data(), n, 32, tops.data());
    plain.block_max(x.data(), n, 32, others.data());
    report("block_max" + size, tops != others, 0);
    a = b = x;
    const bool finite = neon.finish_logits(a.data(), n, 2.0f, 30.0f);
    report("finish_logits" + size, finite != plain.finish_logits(b.data(), n, 2.0f, 30.0f) ? 1 : difference(a, b),
           1e-5);
  }
  std::vector<float> x = normals(33);
  x[20] = std::nanf("");
  int32_t at = 0;
  report("max finds what is no number", !std::isnan(neon.max(x.data(), 33, &at)) || at != 20, 0);
  report("finish_logits sees it", neon.finish_logits(x.data(), 33, 1.0f, 0.0f), 0);
  for (int dim : {16, 64, 80, 96, 128}) {
    std::vector<float> a = normals(dim), b = a, angles = normals(dim);
    neon.rope(a.data(), angles.data(), angles.data() + dim / 2, dim);
    plain.rope(b.data(), angles.data(), angles.data() + dim / 2, dim);
    report("rope of " + std::to_string(dim), difference(a, b), 1e-6);
    neon.rotate(a.data(), dim);
    plain.rotate(b.data(), dim);
    report("rotate of " + std::to_string(dim), difference(a, b), 1e-6);
  }
}

// ---- attention ----

struct Cache {
  Aligned<uint8_t> memory;
  KvLayer layer;

  Cache(int blocks, int block_size, int dim, int bits)
      : memory(blocks * kv_head_bytes(block_size, dim, bits)),
        layer(make_kv_layer(memory.data, 1, block_size, dim, bits)) {}
};

std::vector<float> attention(const KernelTable& table, const Cache& cache, const std::vector<int32_t>& blocks,
                             const std::vector<float>& q, int rows, int heads, int tokens, int window, float softcap) {
  const int dim = cache.layer.head_dim, pairs = rows * heads;
  std::vector<float> parts(size_t(pairs) * dim), max(pairs), sum(pairs), out(size_t(pairs) * dim);
  AttentionItem item{};
  item.kv = &cache.layer;
  item.blocks = blocks.data();
  item.kv_end = tokens;
  item.position = tokens - rows;
  item.rows = rows;
  item.heads = heads;
  item.q = q.data();
  item.q_stride = int64_t(heads) * dim;
  item.window = window;
  item.softcap = softcap;
  item.out = parts.data();
  item.max = max.data();
  item.sum = sum.data();
  table.attend(item);
  for (int row = 0; row < rows; ++row)
    table.merge(parts.data() + size_t(row) * heads * dim, max.data() + row * heads, sum.data() + row * heads, 1, heads,
                dim, out.data() + size_t(row) * heads * dim);
  return out;
}

void check_attention(const KernelTable& neon, int bits, int dim, int rows, int heads, int tokens, int window) {
  const int block_size = 32, count = (tokens + block_size - 1) / block_size;
  Cache mine(count, block_size, dim, bits), theirs(count, block_size, dim, bits);
  std::vector<int32_t> blocks(count);
  for (int i = 0; i < count; ++i) blocks[i] = count - 1 - i;
  for (int t = 0; t < tokens; ++t) {
    const std::vector<float> key = normals(dim), value = normals(dim);
    neon.store_kv(mine.layer, 0, blocks[t / block_size], t % block_size, key.data(), value.data());
    portable_table().store_kv(theirs.layer, 0, blocks[t / block_size], t % block_size, key.data(), value.data());
  }
  const std::vector<float> q = normals(size_t(rows) * heads * dim);
  const auto name = "attention bits " + std::to_string(bits) + " dim " + std::to_string(dim) + " rows " +
                    std::to_string(rows) + " heads " + std::to_string(heads) + " tokens " + std::to_string(tokens) +
                    " window " + std::to_string(window);
  // On the same stored codes, so that a code rounded the other way does not count here.
  report(name,
         difference(attention(neon, mine, blocks, q, rows, heads, tokens, window, 0),
                    attention(portable_table(), mine, blocks, q, rows, heads, tokens, window, 0)),
         2e-3);
  report("  its own cache",
         difference(attention(neon, mine, blocks, q, rows, heads, tokens, window, 20),
                    attention(portable_table(), theirs, blocks, q, rows, heads, tokens, window, 20)),
         bits == 16 ? 2e-3 : 2e-2);
}

void check_attentions(const KernelTable& neon) {
  for (int bits : {16, 8, 4})
    for (int dim : {64, 80, 128}) {
      check_attention(neon, bits, dim, 1, 4, 200, 0);
      check_attention(neon, bits, dim, 5, 3, 131, 50);
      check_attention(neon, bits, dim, 1, 1, 1, 0);
    }
}

}  // namespace

int main() {
  const KernelTable& neon = neon_table();
  check_products(neon);
  check_gather(neon);
  check_small(neon);
  check_attentions(neon);
  std::printf("%d failed\n", failures);
  return failures != 0;
}
