// Owners of the memory behind the plain structs of table.h, for tests and benchmarks. Knows nothing of Python.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/table.h"
#include "kv_layer.h"
#include "pack.h"

namespace lmdeploy {

// Zero-filled memory on huge pages where the system grants them.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    const size_t unit = bytes >= (size_t{1} << 21) ? size_t{1} << 21 : 64;
    const size_t rounded = (bytes + unit - 1) / unit * unit;
    data_ = std::aligned_alloc(unit, rounded);
    if (!data_) throw std::bad_alloc();
    if (unit > 64) madvise(data_, rounded, MADV_HUGEPAGE);
    std::memset(data_, 0, rounded);
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_;
};

struct PackedMatrix {
  PackedMatrix(int kind, int n, int k, int group)
      : memory(packed_bytes(static_cast<WeightKind>(kind), n, k, group)),
        matrix(layout_matrix(static_cast<WeightKind>(kind), n, k, group, memory.data())) {}
  Buffer memory;
  Matrix matrix;
};

struct PreparedRows {
  PreparedRows(int rows_, int k, int group, bool int8, int bf16, bool f32, float threshold)
      : rows(rows_),
        unit(group > 0 ? group : 2),
        k_padded((k + unit - 1) / unit * unit),
        groups_per_row(group > 0 ? k_padded / group : 0),
        planes(size_t(rows) * k_padded * (int8 ? 2 : 0)),
        bf_planes(size_t(rows) * k_padded * 2 * bf16),
        f32_plane(f32 ? size_t(rows) * k_padded * sizeof(float) : 0),
        factors(groups() * 3 * sizeof(float)),
        flags(groups()) {
    auto* bytes = static_cast<int8_t*>(planes.data());
    auto* halves = static_cast<uint16_t*>(bf_planes.data());
    auto* floats = static_cast<float*>(factors.data());
    const size_t values = size_t(rows) * k_padded, scales = groups();
    view = {};
    view.rows = rows;
    view.k = k;
    view.k_padded = k_padded;
    view.group = group;
    view.groups = groups_per_row;
    view.hi = bytes;
    view.threshold = threshold;
    if (int8 && std::isfinite(threshold)) {
      view.lo = bytes + values;
      view.second = static_cast<uint8_t*>(flags.data());
    }
    view.scale = floats;
    view.sum = floats ? floats + scales : nullptr;
    view.parts = floats ? reinterpret_cast<int32_t*>(floats + 2 * scales) : nullptr;
    view.bf_hi = halves;
    view.bf_lo = bf16 == 2 ? halves + values : nullptr;
    view.f32 = static_cast<float*>(f32_plane.data());
  }
  size_t size() const { return size_t(view.rows) * k_padded; }
  size_t groups() const { return (size_t(rows) + kRowBlock - 1) / kRowBlock * kRowBlock * groups_per_row; }
  int rows, unit, k_padded, groups_per_row;
  Buffer planes, bf_planes, f32_plane, factors, flags;
  Activations view{};
};

struct KvCache {
  KvCache(int blocks_, int heads_, int block_size, int head_dim, int bits)
      : blocks(blocks_), heads(heads_), memory(blocks_ * heads_ * kv_head_bytes(block_size, head_dim, bits)) {
    layer = make_kv_layer(static_cast<uint8_t*>(memory.data()), heads, block_size, head_dim, bits);
  }
  int blocks, heads;
  Buffer memory;
  KvLayer layer{};
};

}  // namespace lmdeploy
