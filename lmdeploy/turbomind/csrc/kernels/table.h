// The kernels of one instruction set, as a table of functions, and the plain structs they work on.
//
// Knows layouts and arithmetic; knows nothing of models, threads, sequences or Python. Included by kernel sources
// that are compiled with wider instruction sets than the host code, so: plain structs only, no STL, no inline
// functions, no constructors.
//
// Invariance: a row's result never depends on how many other rows there are. Every sum over k is either exact
// (int32 within a group) or has one fixed order (groups of a span, then spans, ascending; k ascending in float paths),
// the same at every number of rows and for every way a matrix is cut into tiles.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lmdeploy {

constexpr int kTile = 16;     // output channels of a weight tile, tokens of a key tile
constexpr int kRowBlock = 8;  // rows that share one activation block
constexpr int kChunk = 128;   // tokens of one softmax chunk
constexpr int kSplit = 512;   // tokens of one attention split: ranges start at its multiples
constexpr int kMaxHeadDim = 512;
constexpr int kScaled = 128;  // inputs of a row that share a scale: one or more whole groups of weights

enum WeightKind : int32_t {
  kW4Zero = 0,  // w = (code - zero) * scale
  kW4Min = 1,   // w = code * scale + min
  kInt8 = 2,    // w = code * scale, stored as code + 128
  kBf16 = 3,
  kInt8Min = 4,  // w = code * scale + min, code u8
  kFp16 = 5,
};

// A packed matrix [n, k]. Tiles of 16 output channels follow each other; inside a tile lines of 64 bytes run along k.
//   W4   ("N16K8"): line = 16 channels x 8 k; the 4 bytes of lane c hold k 0..3 in low and k 4..7 in high nibbles
//   Int8 and Int8Min ("N16K4"): line = 16 channels x 4 k, u8
//   Bf16 ("N16K2"): line = 16 channels x 2 k
//   Fp16: line = 16 channels of an even k, then of the next
// k is padded with zero codes to a multiple of `group` (16 bits: of 2), n with channels of scale 0 to a multiple of 16.
struct Matrix {
  WeightKind kind;
  int32_t n, k;   // logical
  int32_t tiles;  // ceil(n / 16)
  int32_t k_padded;
  int32_t group, groups;   // inputs per scale: 16 (k a multiple of 32), 32, 64, 128 (16 bits: 0); k_padded / group
  const uint8_t* lines;    // 64-byte aligned
  const uint16_t* scales;  // fp16 [tiles][groups][16]
  const uint8_t* zeros;    // [tiles][groups][16], kW4Zero
  const uint16_t* mins;    // fp16 [tiles][groups][16], kW4Min and kInt8Min
};

// Rows of activations prepared for a matmul. Row r lives in block r / 8; a block with m rows (8, or the rest in the
// last one) holds [k / 4][m][4] int8 values (bf16: [k / 2][m][2], f32: [k][m]) and starts at value (r / 8) * 8 *
// k_padded.
//   int8 planes: a = scale * (hi + lo / 128), scale = absmax / 127, per row and span: kScaled inputs, or what is left
//   bf16 planes: a = bf_hi + bf_lo, or a = bf_hi alone when bf_lo is null
//   f32: as it is, for Fp16
// Which planes are present follows from the weight kinds that will read them; absent ones are null.
// A span of a row has a second plane, lo, when its absmax is more than `threshold` times its root mean square; else
// its values are rounded to multiples of scale and its lo is 0 wherever there is one. This rule looks at nothing
// but the span itself, and skipping a plane of zeros changes no bit, so that no row sees its neighbours.
struct Activations {
  int32_t rows, k, k_padded;
  int32_t group, groups;
  float threshold;  // 0: every span has a second plane; infinity: none, and lo may be null
  int8_t *hi, *lo;
  // Of each group, [groups][m] for each block:
  uint8_t* second;  // 1: its span has a second plane; null with lo
  float* scale;     // of its span
  float* sum;       // sum(hi + lo / 128)
  int32_t* parts;   // sum(hi) in the upper 16 bits, sum(lo) in the lower
  uint16_t *bf_hi, *bf_lo;
  float* f32;
};

// One layer's share of the paged cache. Keys and values are stored rotated (see `rotate` below) as whole numbers with
// one scale per token and KV head; `bits` of a code, and what a value is:
//   16   scale * code, code within +-16383
//    8   scale * code + offset, code 0..255
//    4   scale * code + offset, code 0..15
// A block holds, per KV head: key codes, value codes, then bfloat16 [block_size] scales of keys, scales of values and,
// below 16 bits, offsets of keys and offsets of values. Codes lie in lines of 32:
//   keys    [block_size / 16][head_dim / 2] lines of [16 tokens][2 dimensions]
//   values  [block_size / 16][head_dim / 16][8] lines of [16 dimensions][2 tokens]         (head_dim: a multiple of 16)
// A line takes 64 bytes, 32 with 8 bits; with 4 bits two lines share 32 bytes, the first in the low nibbles: of keys
// two neighbours, of values the same tokens of two neighbouring runs of 16 dimensions (the last odd run has no
// neighbour).
struct KvLayer {
  uint8_t* base;
  int64_t block_stride, head_stride;  // bytes between blocks of this layer, and between KV heads of a block
  int32_t block_size, head_dim, bits;
  int32_t key_tile, value_tile;  // bytes of 16 tokens' codes
};

// Attention of `rows` consecutive tokens of one sequence, one KV head and its `heads` query heads, over cached tokens
// [kv_begin, kv_end) where kv_begin is a multiple of kSplit and kv_end <= kv_begin + kSplit. Row i may see tokens
// <= position + i, and > position + i - window when window > 0. Writes unnormalised partial results.
struct AttentionItem {
  const KvLayer* kv;
  int32_t kv_head;
  const int32_t* blocks;  // the sequence's block ids
  int32_t kv_begin, kv_end;
  int32_t kv_ahead;  // a hint: the caller goes on with the tokens from kv_end to this one; kv_end when it does not
  int32_t position;
  int32_t rows, heads;
  const float* q;  // [rows][q_stride], heads of this KV head contiguous, already scaled and rotated
  int64_t q_stride;
  int32_t window;  // 0: none
  float softcap;   // 0: none
  float* out;      // [rows][heads][head_dim] sum of exp(s - max) * v
  float* max;      // [rows][heads]; -inf when nothing is visible
  float* sum;      // [rows][heads]
};

struct KernelTable {
  const char* name;  // "portable", "avx2", "avx512", "neon"

  // out[r * ld_out + (tile - tile_begin) * 16 + c] for all rows of `a` and tiles [tile_begin, tile_end).
  // `scratch` is private to the calling thread, 64-byte aligned, matmul_scratch_bytes(k_padded) long.
  void (*matmul)(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out,
                 void* scratch);
  size_t (*matmul_scratch_bytes)(int k_padded);
  // Prepares values [k_begin, k_begin + count) of one row; k_begin is a multiple of kScaled (or 2 for bf16 alone) and
  // they end at k or at such a multiple. Writes the planes that are present; zero-pads up to k_padded.
  // NaN and infinity in x make the group's scale NaN, so that they surface in the result.
  void (*prepare)(const float* x, const Activations& a, int row, int k_begin, int count);
  // Row `row` of a packed matrix (an embedding) as float [k].
  void (*gather_row)(const Matrix& w, int row, float* out);

  // Values whose sum of squares overflows give NaN: dividing by infinity would hide them as zeros.
  void (*rms_norm)(const float* x, const float* weight, float offset, float eps, int n, float* y);
  // Rotates pairs (d, d + rotary_dim / 2) of one head in place; cos, sin are [rotary_dim / 2].
  void (*rope)(float* head, const float* cos, const float* sin, int rotary_dim);
  void (*silu_mul)(const float* gate, const float* up, int n, float* y);
  void (*gelu_tanh_mul)(const float* gate, const float* up, int n, float* y);
  void (*gelu_mul)(const float* gate, const float* up, int n, float* y);  // erf form
  void (*add_scaled)(float* x, const float* y, float scale, int n);       // x += scale * y

  // Multiplies one head [head_dim] by a fixed orthogonal matrix (signs, then Hadamard blocks): products of two rotated
  // vectors are those of the vectors, and what one strong channel holds is spread over all.
  void (*rotate)(float* head, int head_dim);
  // Stores one token's key and value of one KV head (float [head_dim] each) at slot `slot` of block `block`.
  void (*store_kv)(const KvLayer& kv, int kv_head, int block, int slot, const float* key, const float* value);
  void (*attend)(const AttentionItem& item);
  // Combines `splits` partial results (ascending ranges, [splits][heads][...]) of one row into out [heads][head_dim],
  // rotated back.
  void (*merge)(const float* out_parts, const float* max_parts, const float* sum_parts, int splits, int heads,
                int head_dim, float* out);

  // Sampling helpers over n logits.
  float (*max)(const float* x, int n, int32_t* index);  // first index of the largest; NaN anywhere gives NaN
  // Sum of y[i] = exp((x[i] - max) * scale); y may be null.
  double (*sum_exp)(const float* x, int n, float max, float scale, float* y);
  // Indices with x >= threshold, ascending, at most `limit`; returns how many there are in all.
  int (*collect)(const float* x, int n, float threshold, int32_t* index, int limit);
  // y[i] = the largest of x[i * size, (i + 1) * size), which ends at n; size is a multiple of 16.
  void (*block_max)(const float* x, int n, int size, float* y);
  // Logits before sampling, in place: x = softcap * tanh(scale * x / softcap), or scale * x when softcap is 0. Returns
  // whether all of scale * x is finite: a cap would hide infinity.
  bool (*finish_logits)(float* x, int n, float scale, float softcap);
};

const KernelTable& portable_table();
const KernelTable& avx2_table();
const KernelTable& avx512_table();
const KernelTable& neon_table();

}  // namespace lmdeploy
