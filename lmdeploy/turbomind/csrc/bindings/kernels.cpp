// Python's view of the kernel tables, for tests and benchmarks: submodule `_turbomind.kernels`.
//
// Owns the buffers that the plain structs of table.h point to; knows nothing of models.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "bindings/bench.h"
#include "bindings/buffers.h"
#include "kernels/dispatch.h"
#include "pack.h"

namespace nb = nanobind;
using namespace lmdeploy;

namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const uint16_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
template <typename T>
using Result = nb::ndarray<nb::numpy, T>;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

template <typename T>
Result<T> new_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t s : shape) size *= s;
  T* data = new T[size]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Result<T>(data, shape, owner);
}

template <typename T>
Result<T> copy_array(const T* from, size_t size) {
  Result<T> result = new_array<T>({size});
  std::copy_n(from, size, result.data());
  return result;
}

void pack_into(PackedMatrix& self, Bytes codes, Halves scales, Bytes zeros, Halves mins, int k, int group, int src_row,
               int count, int dst_row) {
  const int unit = is_dense(self.matrix.kind) ? 2 : 1;
  const int n = static_cast<int>(codes.size() / (size_t(k) * unit));
  const size_t entries = is_dense(self.matrix.kind) ? 0 : size_t(n) * ((k + group - 1) / group);
  require(codes.size() == size_t(n) * k * unit, "codes must be whole rows");
  require(scales.size() >= entries, "too few scales");
  require(self.matrix.kind != kW4Zero || zeros.size() >= entries, "too few zeros");
  require(self.matrix.mins == nullptr || mins.size() >= entries, "too few mins");
  const PackSource src{self.matrix.kind, n, k, group, codes.data(), scales.data(), zeros.data(), mins.data()};
  nb::gil_scoped_release release;
  pack_rows(src, src_row, count, self.matrix, dst_row);
}

Result<uint8_t> codes_of(const PackedMatrix& self, int channel) {
  require(channel >= 0 && channel < self.matrix.n, "channel outside the matrix");
  Result<uint8_t> out = new_array<uint8_t>({size_t(self.matrix.k) * (is_dense(self.matrix.kind) ? 2 : 1)});
  unpack_codes(self.matrix, channel, out.data());
  return out;
}

std::unique_ptr<PreparedRows> prepare_rows(const KernelTable& table, Floats x, int group, bool int8, int bf16, bool f32,
                                           int span, float threshold) {
  require(x.ndim() == 2, "x must be [rows, k]");
  const int rows = x.shape(0), k = x.shape(1);
  auto result = std::make_unique<PreparedRows>(rows, k, group, int8, bf16, f32, threshold);
  const int step = span > 0 ? span : k;
  for (int row = 0; row < rows; ++row)
    for (int begin = 0; begin < k; begin += step)
      table.prepare(x.data() + size_t(row) * k + begin, result->view, row, begin, std::min(step, k - begin));
  return result;
}

Result<float> matmul(const KernelTable& table, const PackedMatrix& w, const PreparedRows& a, int begin, int end) {
  if (end < 0) end = w.matrix.tiles;
  require(w.matrix.k == a.view.k, "inner sizes differ");
  require(begin >= 0 && begin < end && end <= w.matrix.tiles, "tiles outside the matrix");
  require(w.matrix.kind == kFp16   ? a.view.f32 != nullptr
          : w.matrix.kind == kBf16 ? a.view.bf_hi != nullptr
                                   : a.view.group == w.matrix.group,
          "planes do not fit");
  Result<float> out = new_array<float>({size_t(a.view.rows), size_t(end - begin) * kTile});
  Buffer scratch(table.matmul_scratch_bytes(w.matrix.k_padded));
  table.matmul(w.matrix, a.view, begin, end, out.data(), ptrdiff_t(end - begin) * kTile, scratch.data());
  return out;
}

Result<float> gather_row(const KernelTable& table, const PackedMatrix& w, int row) {
  require(row >= 0 && row < w.matrix.n, "row outside the matrix");
  Result<float> out = new_array<float>({size_t(w.matrix.k)});
  table.gather_row(w.matrix, row, out.data());
  return out;
}

Result<float> rms_norm(const KernelTable& table, Floats x, Floats weight, float offset, float eps) {
  require(x.size() == weight.size(), "x and weight differ in size");
  Result<float> y = new_array<float>({x.size()});
  table.rms_norm(x.data(), weight.data(), offset, eps, x.size(), y.data());
  return y;
}

Result<float> rope(const KernelTable& table, Floats head, Floats cos, Floats sin, int rotary_dim) {
  require(int(head.size()) >= rotary_dim && int(cos.size()) * 2 >= rotary_dim && cos.size() == sin.size(), "sizes");
  Result<float> y = copy_array(head.data(), head.size());
  table.rope(y.data(), cos.data(), sin.data(), rotary_dim);
  return y;
}

Result<float> activation(const KernelTable& table, const std::string& name, Floats gate, Floats up) {
  require(gate.size() == up.size(), "gate and up differ in size");
  auto* apply = name == "silu" ? table.silu_mul : name == "gelu_tanh" ? table.gelu_tanh_mul : table.gelu_mul;
  Result<float> y = new_array<float>({gate.size()});
  apply(gate.data(), up.data(), gate.size(), y.data());
  return y;
}

Result<float> add_scaled(const KernelTable& table, Floats x, Floats y, float scale) {
  require(x.size() == y.size(), "x and y differ in size");
  Result<float> out = copy_array(x.data(), x.size());
  table.add_scaled(out.data(), y.data(), scale, x.size());
  return out;
}

// Each vector along the last axis.
Result<float> rotate(const KernelTable& table, Floats heads) {
  require(heads.ndim() == 3 && heads.shape(2) % kTile == 0, "heads must be [rows, heads, head_dim]");
  const size_t dim = heads.shape(2);
  Result<float> y = new_array<float>({heads.shape(0), heads.shape(1), dim});
  std::copy_n(heads.data(), heads.size(), y.data());
  for (size_t i = 0; i < heads.size(); i += dim) table.rotate(y.data() + i, int(dim));
  return y;
}

void store_kv(const KernelTable& table, KvCache& cache, int kv_head, int block, int slot, Floats key, Floats value) {
  require(int(key.size()) == cache.layer.head_dim && key.size() == value.size(), "key and value are [head_dim]");
  require(kv_head < cache.heads && block < cache.blocks && slot < cache.layer.block_size, "place outside the cache");
  table.store_kv(cache.layer, kv_head, block, slot, key.data(), value.data());
}

// One attention item: (out [rows, heads, head_dim] unnormalised, max [rows, heads], sum [rows, heads]).
std::tuple<Result<float>, Result<float>, Result<float>> attend(const KernelTable& table, const KvCache& cache,
                                                               int kv_head, Ints blocks, int kv_begin, int kv_end,
                                                               int position, Floats q, int window, float softcap) {
  require(q.ndim() == 3 && int(q.shape(2)) == cache.layer.head_dim, "q must be [rows, heads, head_dim]");
  require(kv_begin % kSplit == 0 && kv_end > kv_begin && kv_end <= kv_begin + kSplit, "one split at a time");
  require(size_t(kv_end) <= blocks.size() * cache.layer.block_size, "too few blocks");
  const size_t rows = q.shape(0), heads = q.shape(1), dim = q.shape(2);
  auto out = new_array<float>({rows, heads, dim});
  auto max = new_array<float>({rows, heads}), sum = new_array<float>({rows, heads});
  const AttentionItem item{
      &cache.layer, kv_head,  blocks.data(),          kv_begin, kv_end,  kv_end,     position,   int(rows),
      int(heads),   q.data(), ptrdiff_t(heads * dim), window,   softcap, out.data(), max.data(), sum.data()};
  table.attend(item);
  return {out, max, sum};
}

Result<float> merge(const KernelTable& table, Floats out_parts, Floats max_parts, Floats sum_parts) {
  require(out_parts.ndim() == 3, "parts must be [splits, heads, head_dim]");
  const size_t heads = out_parts.shape(1), dim = out_parts.shape(2);
  Result<float> out = new_array<float>({heads, dim});
  table.merge(out_parts.data(), max_parts.data(), sum_parts.data(), out_parts.shape(0), heads, dim, out.data());
  return out;
}

std::pair<float, int> max_of(const KernelTable& table, Floats x) {
  require(x.size() > 0, "no values");
  int32_t index = -1;
  const float value = table.max(x.data(), x.size(), &index);
  return {value, index};
}

std::pair<double, Result<float>> sum_exp(const KernelTable& table, Floats x, float max, float scale) {
  Result<float> y = new_array<float>({x.size()});
  const double sum = table.sum_exp(x.data(), x.size(), max, scale, y.data());
  require(sum == table.sum_exp(x.data(), x.size(), max, scale, nullptr), "the sum depends on what is stored");
  return {sum, y};
}

Result<float> block_max(const KernelTable& table, Floats x, int size) {
  require(size > 0 && size % kTile == 0, "blocks are whole vectors");
  Result<float> y = new_array<float>({(x.size() + size - 1) / size});
  table.block_max(x.data(), x.size(), size, y.data());
  return y;
}

std::pair<Result<float>, bool> finish_logits(const KernelTable& table, Floats x, float scale, float softcap) {
  Result<float> y = copy_array(x.data(), x.size());
  const bool finite = table.finish_logits(y.data(), x.size(), scale, softcap);
  return {y, finite};
}

std::pair<Result<int32_t>, int> collect(const KernelTable& table, Floats x, float threshold, int limit) {
  std::vector<int32_t> index(limit);
  const int count = table.collect(x.data(), x.size(), threshold, index.data(), limit);
  return {copy_array(index.data(), std::min(count, limit)), count};
}

// What is kept of each group of prepared rows, [rows][groups]; nothing when it is absent.
template <typename T>
Result<T> by_rows(const PreparedRows& self, const T* values) {
  const int groups = self.view.groups;
  Result<T> out = new_array<T>({values == nullptr ? 0 : size_t(self.rows) * groups});
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t row = i / groups, group = i % groups, first = row / kRowBlock * kRowBlock;
    const size_t block = std::min<size_t>(kRowBlock, self.rows - first);
    out.data()[i] = values[first * groups + group * block + row % kRowBlock];
  }
  return out;
}

void register_buffers(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<int, int, int, int>(), nb::arg("kind"), nb::arg("n"), nb::arg("k"), nb::arg("group"))
      .def("pack", pack_into)
      .def("codes", codes_of)
      .def_prop_ro("nbytes", [](const PackedMatrix& self) { return self.memory.size(); })
      .def_prop_ro("tiles", [](const PackedMatrix& self) { return self.matrix.tiles; })
      .def_prop_ro("k_padded", [](const PackedMatrix& self) { return self.matrix.k_padded; });
  nb::class_<PreparedRows>(m, "PreparedRows")
      .def_prop_ro(
          "hi", [](const PreparedRows& self) { return copy_array(self.view.hi, self.size()); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "lo", [](const PreparedRows& self) { return copy_array(self.view.lo, self.view.lo ? self.size() : 0); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "second", [](const PreparedRows& self) { return by_rows(self, self.view.second); }, nb::rv_policy::automatic)
      .def_prop_ro(
          "bf_hi", [](const PreparedRows& self) { return copy_array(self.view.bf_hi, self.size()); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "bf_lo",
          [](const PreparedRows& self) { return copy_array(self.view.bf_lo, self.view.bf_lo ? self.size() : 0); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "scale", [](const PreparedRows& self) { return by_rows(self, self.view.scale); }, nb::rv_policy::automatic)
      .def_prop_ro(
          "sum", [](const PreparedRows& self) { return by_rows(self, self.view.sum); }, nb::rv_policy::automatic);
  nb::class_<KvCache>(m, "KvCache")
      .def(nb::init<int, int, int, int, int>(), nb::arg("blocks"), nb::arg("heads"), nb::arg("block_size"),
           nb::arg("head_dim"), nb::arg("bits") = 16)
      .def("fill", [](KvCache& self, uint8_t byte) { std::fill_n(self.layer.base, self.memory.size(), byte); })
      .def("data", [](const KvCache& self) { return copy_array(self.layer.base, self.memory.size()); })
      .def_prop_ro("nbytes", [](const KvCache& self) { return self.memory.size(); });
}

}  // namespace

void register_kernels(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("kernels", "The kernel tables, for tests and benchmarks.");
  m.attr("W4_ZERO") = int(kW4Zero);
  m.attr("W4_MIN") = int(kW4Min);
  m.attr("INT8") = int(kInt8);
  m.attr("BF16") = int(kBf16);
  m.attr("FP16") = int(kFp16);
  m.attr("INT8_MIN") = int(kInt8Min);
  m.def("supported", supported_tables);
  m.def("active", [] { return std::string(kernels().name); });
  m.def("detect", detect);
  m.def("packed_bytes",
        [](int kind, int n, int k, int group) { return packed_bytes(static_cast<WeightKind>(kind), n, k, group); });
  register_buffers(m);
  register_bench(m);
  nb::class_<KernelTable>(m, "Table")
      .def_static("get", table_by_name, nb::rv_policy::reference)
      .def("prepare", prepare_rows, nb::arg("x"), nb::arg("group"), nb::arg("int8") = true, nb::arg("bf16") = 0,
           nb::arg("f32") = false, nb::arg("span") = 0, nb::arg("threshold") = 0.0f)
      .def("matmul", matmul, nb::arg("w"), nb::arg("a"), nb::arg("begin") = 0, nb::arg("end") = -1)
      .def("gather_row", gather_row)
      .def("rms_norm", rms_norm)
      .def("rope", rope)
      .def("activation", activation)
      .def("add_scaled", add_scaled)
      .def("rotate", rotate)
      .def("store_kv", store_kv)
      .def("attend", attend, nb::arg("cache"), nb::arg("kv_head"), nb::arg("blocks"), nb::arg("kv_begin"),
           nb::arg("kv_end"), nb::arg("position"), nb::arg("q"), nb::arg("window") = 0, nb::arg("softcap") = 0.0f)
      .def("merge", merge)
      .def("max", max_of)
      .def("sum_exp", sum_exp)
      .def("block_max", block_max)
      .def("finish_logits", finish_logits)
      .def("collect", collect);
}
