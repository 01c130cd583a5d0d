// What the machine can do at most with one instruction set: the yardsticks of the kernel benchmarks.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lmdeploy {

struct Limits {
  // Reads the bytes once, in order; the result only keeps the reads from being dropped.
  int64_t (*read)(const void* data, size_t bytes);
  // Runs `rounds` rounds of independent products from registers; returns multiplications and additions done.
  double (*dot_int8)(int64_t rounds);   // each product of an int8 activation plane counts
  double (*dot_float)(int64_t rounds);  // as the bf16 kernels multiply
  double (*fma)(int64_t rounds);        // of float
};

const Limits& avx2_limits();
const Limits& avx512_limits();

}  // namespace lmdeploy
