// Kernels for ARM with NEON and its dot product (ARMv8.2 and on).
#include <arm_neon.h>

#include "kernels/table.h"

namespace lmdeploy {
namespace neon {

#include "kernels/vec_neon.h"
#define ISA_PAIRS 4
#include "kernels/small.inl"
//
#include "kernels/kv_cache.inl"
//
#include "kernels/attention.inl"
#include "kernels/matmul_neon.inl"

static const KernelTable table = {"neon",    matmul,       matmul_scratch_bytes,
                                  prepare,   gather_row,   rms_norm,
                                  rope,      silu_mul,     gelu_tanh_mul,
                                  gelu_mul,  add_scaled,   rotate,
                                  store_kv,  attend,       merge,
                                  max,       sum_exp,      collect,
                                  block_max, finish_logits};

}  // namespace neon

const KernelTable& neon_table() { return neon::table; }

}  // namespace lmdeploy
