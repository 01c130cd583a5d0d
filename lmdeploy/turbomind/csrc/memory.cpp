#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <stdexcept>

namespace lmdeploy {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
}  // namespace

Region::Region(size_t bytes) : size_(bytes) {
  // One huge page more than asked, so that an aligned start exists; pages never touched cost nothing.
  mapped_ = align_up(bytes, kHugePage) + kHugePage;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  auto start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>(align_up(start, kHugePage));
#ifdef MADV_HUGEPAGE
  // Only whole huge pages: a tail on one would take up to 2 MiB more than planned. Refusal is harmless.
  madvise(data_, size_ / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

Region::~Region() {
  if (mapping_ != nullptr && mapping_ != MAP_FAILED) munmap(mapping_, mapped_);
}

void Region::touch(int part, int parts) {
  size_t pages = (size_ + kPage - 1) / kPage;
  for (size_t i = pages * part / parts; i < pages * (part + 1) / parts; ++i) {
    static_cast<volatile uint8_t*>(data_)[i * kPage] = 0;
  }
}

uint8_t* Arena::take_bytes(size_t bytes) {
  size_t begin = used_;
  used_ = align_up(used_ + bytes);
  if (base_ == nullptr) return nullptr;
  if (used_ > align_up(size_)) throw std::length_error("arena is smaller than its plan");
  return base_ + begin;
}

}  // namespace lmdeploy
