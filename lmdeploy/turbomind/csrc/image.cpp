#include "image.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "weights.h"

namespace lmdeploy {
namespace {

constexpr int kLanes = 8;
constexpr size_t kStretch = size_t{1} << 20;  // read, then checked while still in the cache

// Two sums for each of eight lanes: of the words, and of the first sum after each word, which depends on the order.
struct Sums {
  uint64_t plain[kLanes] = {}, running[kLanes] = {};

  void add(const uint8_t* data, size_t bytes) {
    for (; bytes >= kLanes * 8; data += kLanes * 8, bytes -= kLanes * 8) {
      uint64_t words[kLanes];
      std::memcpy(words, data, sizeof words);
      for (int i = 0; i < kLanes; ++i) plain[i] += words[i];
      for (int i = 0; i < kLanes; ++i) running[i] += plain[i];
    }
    if (bytes == 0) return;
    uint8_t tail[kLanes * 8] = {};
    std::memcpy(tail, data, bytes);
    tail[bytes] = 1;  // an end of zeros counts
    add(tail, sizeof tail);
  }
  uint64_t mixed() const {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (int i = 0; i < kLanes; ++i) {
      for (uint64_t word : {plain[i], running[i]}) {
        h = (h ^ word) * 0xBF58476D1CE4E5B9ull;
        h ^= h >> 29;
      }
    }
    return h;
  }
};

// False when the file ends too early; `error` gets what the system reports.
bool read_fully(int fd, uint8_t* to, size_t bytes, size_t at, std::atomic<int>& error) {
  while (bytes > 0) {
    ssize_t got = pread(fd, to, bytes, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) error.store(errno);
    if (got <= 0) return false;
    to += got;
    at += got;
    bytes -= got;
  }
  return true;
}

bool read_piece(int fd, uint8_t* to, size_t begin, size_t bytes, uint64_t expected, std::atomic<int>& error) {
  Sums sums;
  for (size_t done = 0; done < bytes; done += kStretch) {
    size_t count = std::min(kStretch, bytes - done);
    if (!read_fully(fd, to + begin + done, count, begin + done, error)) return false;
    sums.add(to + begin + done, count);
  }
  return sums.mixed() == expected;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t bytes) {
  Sums sums;
  sums.add(data, bytes);
  return sums.mixed();
}

int64_t read_image(int fd, uint8_t* to, size_t bytes, size_t piece, const uint64_t* sums, ThreadPool& pool) {
  int64_t pieces = static_cast<int64_t>((bytes + piece - 1) / piece);
  std::atomic<int64_t> bad{pieces};
  std::atomic<int> error{0};
  auto share = [&](int thread) {
    int64_t end = pieces * (thread + 1) / pool.size();
    for (int64_t i = pieces * thread / pool.size(); i < end && i < bad.load(); ++i) {
      size_t begin = i * piece;
      if (read_piece(fd, to, begin, std::min(piece, bytes - begin), sums[i], error)) continue;
      int64_t first = bad.load();
      while (i < first && !bad.compare_exchange_weak(first, i)) {
      }
    }
  };
  pool.run(share);
  if (error.load() != 0) throw std::system_error(error.load(), std::generic_category());
  return bad.load() < pieces ? bad.load() : -1;
}

uint64_t layout_fingerprint() {
  constexpr int kRows = 40, kInputs = 96, kGroup = 32, kRun = 16, kEntries = kRows * kInputs / kGroup;
  ThreadPool pool({-1});
  Weights weights(size_t{1} << 20, 1);
  std::vector<uint8_t> codes(kRows * kInputs * 2);
  std::vector<uint16_t> scales(kEntries), mins(kEntries);
  std::vector<uint8_t> zeros(kEntries);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 197 + (i >> 8));
  for (int i = 0; i < kEntries; ++i) {
    scales[i] = static_cast<uint16_t>(i * 257 + 1);
    mins[i] = static_cast<uint16_t>(i * 263 + 2);
    zeros[i] = static_cast<uint8_t>(i % 16);
  }
  std::vector<uint8_t> nibbles(codes.size());
  for (size_t i = 0; i < codes.size(); ++i) nibbles[i] = codes[i] & 15;
  for (WeightKind kind : {kW4Zero, kW4Min, kInt8, kBf16, kInt8Min, kFp16}) {
    bool w4 = kind == kW4Zero || kind == kW4Min;
    int group = is_dense(kind) ? 0 : kGroup;
    PackSource source{kind,          kRows,        kInputs,    group, w4 ? nibbles.data() : codes.data(),
                      scales.data(), zeros.data(), mins.data()};
    weights.pack(weights.add_matrix(kind, kRows, kInputs, group), source, 0, 0, pool);
    int runs = weights.add_matrix(kind, 2 * 48, kInputs, group);
    for (int half : {0, 1}) weights.pack(runs, source, half, kRun, pool);
  }
  float values[] = {1, 2, 3};
  weights.add_vector(values, 3);
  weights.add_vector(values, 3);
  return checksum(weights.data(), weights.used());
}

}  // namespace lmdeploy
