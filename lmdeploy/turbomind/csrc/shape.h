// What the native engine computes, as numbers: sizes, flags and limits. No weights, no memory.
//
// Mirrors lmdeploy/models/spec.py; a flag describes mathematics, never a family.
#pragma once
#include <cstdint>
#include <vector>

namespace lmdeploy {

// How matrices that share an input want it: int8 planes of `group` (0: none), bfloat16 planes, floats, or several.
struct InputFormat {
  int k = 0;
  int group = 0;
  int bf16 = 0;  // planes
  bool f32 = false;
  float threshold = 0;  // of Activations
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

struct LayerShape {
  int heads = 0, kv_heads = 0, head_dim = 0;
  int rotary_dim = 0, rope = -1;  // index into ModelShape::rope; -1: no rotation
  int window = 0;                 // 0: none
  float scale = 1, softcap = 0;
  bool qk_norm = false, qk_norm_across = false;  // across: all heads of a token as one vector
  bool pre_norm = true, post_norm = false;
  float residual_scale = 1;
  int intermediate = 0;
  int activation = kSilu;
  InputFormat qkv_input, o_input, gate_up_input, down_input;

  int q_dim() const { return heads * head_dim; }
  int kv_dim() const { return kv_heads * head_dim; }
};

struct ModelShape {
  int hidden = 0, vocab = 0;
  float norm_eps = 0, norm_offset = 0;
  float embedding_scale = 1, logit_scale = 1, logit_softcap = 0;
  InputFormat head_input;
  std::vector<LayerShape> layers;
  std::vector<std::vector<double>> rope;  // inverse frequencies [rotary_dim / 2]
  std::vector<double> rope_scale;         // what cosines and sines are multiplied by, one for each of `rope`
};

struct Limits {
  int max_step_tokens = 0, max_rows = 0;
  int max_context = 0;  // tokens; longer sequences work, but few of them are not spread over threads
  int block_size = 0, num_blocks = 0;
  int threads = 1;
  int kv_bits = 16;  // of a code in the cache: 16, 8 or 4
};

}  // namespace lmdeploy
