// Kernels for AVX-512 with VNNI and BF16 (Ice Lake servers lack BF16 and take the AVX2 table; Zen 4 and later,
// Cooper Lake, Sapphire Rapids and later have both).
#include <immintrin.h>

#include "kernels/limits.h"
#include "kernels/table.h"

namespace lmdeploy {
namespace avx512 {

#include "kernels/vec_avx512.h"
#define ISA_PAIRS 8
#include "kernels/small.inl"
//
#include "kernels/kv_cache.inl"
//
#include "kernels/attention.inl"
#include "kernels/limits_avx512.inl"
#include "kernels/matmul_dense.inl"
//
#include "kernels/matmul_bf16_avx512.inl"
//
#include "kernels/matmul_avx512.inl"

static const KernelTable table = {"avx512",  matmul,       matmul_scratch_bytes,
                                  prepare,   gather_row,   rms_norm,
                                  rope,      silu_mul,     gelu_tanh_mul,
                                  gelu_mul,  add_scaled,   rotate,
                                  store_kv,  attend,       merge,
                                  max,       sum_exp,      collect,
                                  block_max, finish_logits};

}  // namespace avx512

const KernelTable& avx512_table() { return avx512::table; }
const Limits& avx512_limits() { return avx512::limits; }

}  // namespace lmdeploy
