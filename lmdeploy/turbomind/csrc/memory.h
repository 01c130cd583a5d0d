// Large aligned regions from the operating system and the bump arenas that hand them out.
//
// Owns mappings and offsets; knows nothing of what lies in them. Nothing here is called during a step.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lmdeploy {

constexpr size_t kAlign = 64;

constexpr size_t align_up(size_t bytes, size_t to = kAlign) { return (bytes + to - 1) / to * to; }

// Anonymous zeroed memory, aligned to 2 MiB, on huge pages where the kernel grants them.
class Region {
 public:
  explicit Region(size_t bytes);  // throws std::bad_alloc
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // Makes every page of part `part` of `parts` resident, so that what was planned is taken now or fails now.
  void touch(int part, int parts);

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out 64-byte aligned pieces. Without memory behind it, it only counts: one piece of code computes a size
// and uses it.
class Arena {
 public:
  Arena() = default;
  Arena(uint8_t* base, size_t size) : base_(base), size_(size) {}

  template <class T>
  T* take(size_t count) {
    return reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
  }
  uint8_t* take_bytes(size_t bytes);  // throws std::length_error when the arena is full
  size_t used() const { return used_; }

 private:
  uint8_t* base_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace lmdeploy
