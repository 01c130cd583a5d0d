// Packed weights as one file: read straight into place, checked piece by piece.
//
// Knows bytes and layouts, neither models nor file formats. A file holds the packed region as it is in memory, which
// is the same for every instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "thread_pool.h"

namespace lmdeploy {

// Tells accidents: any changed byte, and pieces of 8 bytes in another order. Fast enough not to slow reading.
uint64_t checksum(const uint8_t* data, size_t bytes);

// Fills `to` with the first `bytes` of the file, each thread a range. sums: of each `piece` bytes. Returns the number
// of the first piece that is unlike its sum or not there, -1 when all are sound. Throws std::system_error when the
// file cannot be read.
int64_t read_image(int fd, uint8_t* to, size_t bytes, size_t piece, const uint64_t* sums, ThreadPool& pool);

// A number that changes when packing puts anything in another place: of small matrices of every kind.
uint64_t layout_fingerprint();

}  // namespace lmdeploy
