// Kernels for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "kernels/limits.h"
#include "kernels/table.h"

namespace lmdeploy {
namespace avx2 {

#include "kernels/vec_avx2.h"
#define ISA_PAIRS 4
#include "kernels/small.inl"
//
#include "kernels/kv_cache.inl"
//
#include "kernels/attention.inl"
#include "kernels/limits_avx2.inl"
#include "kernels/matmul_dense.inl"
//
#include "kernels/matmul_avx2.inl"

static const KernelTable table = {"avx2",    matmul,       matmul_scratch_bytes,
                                  prepare,   gather_row,   rms_norm,
                                  rope,      silu_mul,     gelu_tanh_mul,
                                  gelu_mul,  add_scaled,   rotate,
                                  store_kv,  attend,       merge,
                                  max,       sum_exp,      collect,
                                  block_max, finish_logits};

}  // namespace avx2

const KernelTable& avx2_table() { return avx2::table; }
const Limits& avx2_limits() { return avx2::limits; }

}  // namespace lmdeploy
