// Where keys and values of a layer lie in the cache; see KvLayer.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace lmdeploy {

// Bytes of one KV head's share of a block. `bits` of a code: 16, 8 or 4; block_size is a multiple of 16.
size_t kv_head_bytes(int block_size, int head_dim, int bits);
KvLayer make_kv_layer(uint8_t* base, int kv_heads, int block_size, int head_dim, int bits);

}  // namespace lmdeploy
