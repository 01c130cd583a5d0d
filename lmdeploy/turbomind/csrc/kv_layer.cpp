#include "kv_layer.h"

namespace lmdeploy {

namespace {

int key_tile_bytes(int head_dim, int bits) { return kTile * head_dim * bits / 8; }

// With 4 bits, runs of 16 dimensions lie in pairs.
int value_tile_bytes(int head_dim, int bits) {
  int unit = bits == 4 ? 2 * kTile : kTile;
  return key_tile_bytes((head_dim + unit - 1) / unit * unit, bits);
}

}  // namespace

size_t kv_head_bytes(int block_size, int head_dim, int bits) {
  size_t codes = size_t(block_size / kTile) * (key_tile_bytes(head_dim, bits) + value_tile_bytes(head_dim, bits));
  int factors = bits == 16 ? 2 : 4;
  return codes + sizeof(uint16_t) * factors * block_size;
}

KvLayer make_kv_layer(uint8_t* base, int kv_heads, int block_size, int head_dim, int bits) {
  auto head = static_cast<int64_t>(kv_head_bytes(block_size, head_dim, bits));
  return {base,
          kv_heads * head,
          head,
          block_size,
          head_dim,
          bits,
          key_tile_bytes(head_dim, bits),
          value_tile_bytes(head_dim, bits)};
}

}  // namespace lmdeploy
