// Every kernel in plain C++, one value at a time: the readable twin that the fast tables are checked against, and the
// table for machines without AVX2. Compiled for the baseline instruction set.
#include <cmath>
#include <cstring>

#include "kernels/table.h"

namespace lmdeploy {
namespace portable {

const float kInfinity = INFINITY;

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return from_bits(sign | to_bits(float(mantissa) * 0x1p-24f));
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t float_to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) return sign | uint16_t(nearbyintf(from_bits(magnitude) * 0x1p24f));
  return sign | uint16_t((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

float bf16_to_float(uint16_t b) { return from_bits(uint32_t(b) << 16); }

uint16_t float_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// ---- matmul ----

int rows_of_block(const Activations& a, int row) {
  const int left = a.rows - row / kRowBlock * kRowBlock;
  return left < kRowBlock ? left : kRowBlock;
}

// Where value k of a row lies in an int8 plane (per = 4), a bf16 plane (per = 2) or the float plane (per = 1).
size_t plane_index(const Activations& a, int row, int k, int per) {
  const int m = rows_of_block(a, row);
  return size_t(row / kRowBlock) * kRowBlock * a.k_padded + (size_t(k / per) * m + row % kRowBlock) * per + k % per;
}

// Where scale, sum, parts and second of a group of a row lie.
size_t group_entry(const Activations& a, int row, int g) {
  return size_t(row / kRowBlock) * kRowBlock * a.groups + size_t(g) * rows_of_block(a, row) + row % kRowBlock;
}

bool has_bytes(const Matrix& w) { return w.kind == kInt8 || w.kind == kInt8Min; }

// The stored code of one weight; Int8 is still offset by 128.
int code_at(const Matrix& w, int channel, int k) {
  const int per_line = has_bytes(w) ? 4 : 8;
  const size_t line = size_t(channel / kTile) * (w.k_padded / per_line) + k / per_line;
  const uint8_t byte = w.lines[line * 64 + channel % kTile * 4 + k % 4];
  if (has_bytes(w)) return byte;
  return k % 8 < 4 ? byte & 15 : byte >> 4;
}

float bf16_at(const Matrix& w, int channel, int k) {
  const size_t line = size_t(channel / kTile) * (w.k_padded / 2) + k / 2;
  uint16_t value;
  memcpy(&value, w.lines + line * 64 + channel % kTile * 4 + k % 2 * 2, 2);
  return bf16_to_float(value);
}

// Weights are (code - zero) * scale, or code * scale + min.
int32_t zero_of(const Matrix& w, size_t entry) {
  return w.kind == kW4Zero ? w.zeros[entry] : w.kind == kInt8 ? 128 : 0;
}

// One row against the 16 channels of a tile. The inner loops run over channels, which compilers turn into vectors.
void grouped_tile(const Matrix& w, const Activations& a, int tile, int row, float* out) {
  const int per_line = has_bytes(w) ? 4 : 8;
  const uint32_t mask = has_bytes(w) ? 255 : 15;
  const uint8_t* line = w.lines + size_t(tile) * (w.k_padded / per_line) * 64;
  float result[kTile] = {}, part[kTile] = {};
  for (int g = 0; g < w.groups; ++g) {
    int32_t sums[kTile] = {};
    for (int k = g * w.group; k < (g + 1) * w.group; ++k) {
      uint32_t lanes[kTile];
      memcpy(lanes, line + size_t(k / per_line) * 64, 64);
      const size_t at = plane_index(a, row, k, 4);
      const int32_t value = a.hi[at] * 128 + (a.lo != nullptr ? a.lo[at] : 0);
      const int shift = k % 4 * 8 + (k % per_line < 4 ? 0 : 4);
      for (int c = 0; c < kTile; ++c) sums[c] += int32_t(lanes[c] >> shift & mask) * value;
    }
    const size_t entry = (size_t(tile) * w.groups + g) * kTile, group = group_entry(a, row, g);
    const int32_t parts = a.parts[group], high = parts >> 16, low = int16_t(parts);
    for (int c = 0; c < kTile; ++c) {
      const int32_t whole = sums[c] - zero_of(w, entry + c) * (128 * high + low);
      part[c] += float(whole) / 128 * half_to_float(w.scales[entry + c]);
      if (w.mins != nullptr) part[c] += half_to_float(w.mins[entry + c]) * a.sum[group];
    }
    if ((g + 1) * w.group % kScaled != 0 && g + 1 != w.groups) continue;
    for (int c = 0; c < kTile; ++c) {
      result[c] += part[c] * a.scale[group];
      part[c] = 0;
    }
  }
  memcpy(out, result, sizeof result);
}

float fp16_at(const Matrix& w, int channel, int k) {
  const size_t at = (size_t(channel / kTile) * w.k_padded + k) * kTile + channel % kTile;
  uint16_t value;
  memcpy(&value, w.lines + at * 2, 2);
  return half_to_float(value);
}

float dense_at(const Matrix& w, int channel, int k) {
  return w.kind == kFp16 ? fp16_at(w, channel, k) : bf16_at(w, channel, k);
}

void dense_tile(const Matrix& w, const Activations& a, int tile, int row, float* out) {
  float result[kTile] = {};
  for (int k = 0; k < w.k_padded; ++k) {
    const size_t at = plane_index(a, row, k, 2);
    float value = 0;
    if (w.kind == kFp16) value = a.f32[plane_index(a, row, k, 1)];
    if (w.kind == kBf16) value = bf16_to_float(a.bf_hi[at]) + (a.bf_lo ? bf16_to_float(a.bf_lo[at]) : 0);
    for (int c = 0; c < kTile; ++c) result[c] += dense_at(w, tile * kTile + c, k) * value;
  }
  memcpy(out, result, sizeof result);
}

void matmul(const Matrix& w, const Activations& a, int tile_begin, int tile_end, float* out, ptrdiff_t ld_out, void*) {
  for (int tile = tile_begin; tile < tile_end; ++tile)
    for (int row = 0; row < a.rows; ++row) {
      float* to = out + row * ld_out + ptrdiff_t(tile - tile_begin) * kTile;
      w.group == 0 ? dense_tile(w, a, tile, row, to) : grouped_tile(w, a, tile, row, to);
    }
}

size_t matmul_scratch_bytes(int) { return 64; }

// ---- activations ----

// What the groups of one span are multiplied by.
struct SpanScale {
  float inverse, scale;
  bool second;
};
SpanScale span_scale(const float* x, int count, int inputs, const Activations& a) {
  float largest = 0, squares = 0;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const float magnitude = fabsf(x[i]);
    finite = finite && magnitude < kInfinity;
    largest = magnitude > largest ? magnitude : largest;
    squares += magnitude * magnitude;
  }
  const bool zero = largest < 1e-30f;
  const bool second = a.lo != nullptr && !(largest <= a.threshold * sqrtf(squares / float(inputs)));
  const float inverse = zero || !finite ? 0 : (second ? 16256.0f : 127.0f) / largest;
  return {inverse, !finite ? NAN : zero ? 0 : largest / 127.0f, second};
}

void prepare_group(const float* x, int count, const Activations& a, int row, int g, const SpanScale& s) {
  int32_t high_sum = 0, low_sum = 0;
  for (int i = 0; i < a.group; ++i) {
    const int value = i < count && s.inverse != 0 ? int(nearbyintf(x[i] * s.inverse)) : 0;
    const int high = s.second ? (value + 64) >> 7 : value, low = s.second ? value - high * 128 : 0;
    const size_t at = plane_index(a, row, g * a.group + i, 4);
    a.hi[at] = int8_t(high);
    if (a.lo != nullptr) a.lo[at] = int8_t(low);
    high_sum += high;
    low_sum += low;
  }
  const size_t entry = group_entry(a, row, g);
  a.scale[entry] = s.scale;
  a.sum[entry] = float(high_sum * 128 + low_sum) / 128;
  a.parts[entry] = high_sum * 65536 + (low_sum & 0xffff);
  if (a.lo != nullptr) a.second[entry] = s.second;
}

int clamped(int n, int most) { return n < 0 ? 0 : n < most ? n : most; }

void prepare(const float* x, const Activations& a, int row, int k_begin, int count) {
  const int end = k_begin + count == a.k ? a.k_padded : k_begin + count;
  if (a.hi)
    for (int span = k_begin; span < end; span += kScaled) {
      const int stop = span + kScaled < end ? span + kScaled : end, filled = k_begin + count;
      const SpanScale scale = span_scale(x + (span - k_begin), clamped(filled - span, kScaled), stop - span, a);
      for (int k = span; k < stop; k += a.group)
        prepare_group(x + (k - k_begin), clamped(filled - k, a.group), a, row, k / a.group, scale);
    }
  if (a.f32)
    for (int k = k_begin; k < end; ++k) a.f32[plane_index(a, row, k, 1)] = k < k_begin + count ? x[k - k_begin] : 0;
  if (a.bf_hi)
    for (int k = k_begin; k < end; ++k) {
      const float value = k < k_begin + count ? x[k - k_begin] : 0;
      const uint16_t high = float_to_bf16(value);
      const size_t at = plane_index(a, row, k, 2);
      a.bf_hi[at] = high;
      if (a.bf_lo) a.bf_lo[at] = float_to_bf16(value - bf16_to_float(high));
    }
}

void gather_row(const Matrix& w, int row, float* out) {
  for (int k = 0; k < w.k; ++k) {
    if (w.group == 0) {
      out[k] = dense_at(w, row, k);
      continue;
    }
    const size_t entry = (size_t(row / kTile) * w.groups + k / w.group) * kTile + row % kTile;
    const float scale = half_to_float(w.scales[entry]);
    const int code = code_at(w, row, k);
    if (w.kind == kW4Zero) out[k] = float(code - w.zeros[entry]) * scale;
    if (w.mins != nullptr) out[k] = float(code) * scale + half_to_float(w.mins[entry]);
    if (w.kind == kInt8) out[k] = float(code - 128) * scale;
  }
}

// ---- small operations ----

void rms_norm(const float* x, const float* weight, float offset, float eps, int n, float* y) {
  float squares = 0;
  for (int i = 0; i < n; ++i) squares += x[i] * x[i];
  const float factor = std::isfinite(squares) ? 1.0f / sqrtf(squares / float(n) + eps) : NAN;
  for (int i = 0; i < n; ++i) y[i] = x[i] * factor * (offset + weight[i]);
}

void rope(float* head, const float* cos, const float* sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int d = 0; d < half; ++d) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cos[d] - b * sin[d];
    head[d + half] = b * cos[d] + a * sin[d];
  }
}

void silu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; ++i) {
    const float x = gate[i], inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    y[i] = x / (1.0f + expf(-2.0f * inner)) * up[i];
  }
}

void gelu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = 0.5f * gate[i] * (1.0f + erff(gate[i] * 0.7071067812f)) * up[i];
}

void add_scaled(float* x, const float* y, float scale, int n) {
  for (int i = 0; i < n; ++i) x[i] += scale * y[i];
}

#include "kernels/portable_attention.inl"

// ---- sampling ----

float max(const float* x, int n, int32_t* index) {
  int best = 0;
  for (int i = 0; i < n; ++i) {
    if (x[i] != x[i]) {
      *index = i;
      return x[i];
    }
    if (x[i] > x[best]) best = i;
  }
  *index = best;
  return x[best];
}

double sum_exp(const float* x, int n, float max, float scale, float* y) {
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    const float e = expf((x[i] - max) * scale);
    if (y != nullptr) y[i] = e;
    sum += double(e);
  }
  return sum;
}

int collect(const float* x, int n, float threshold, int32_t* index, int limit) {
  int count = 0;
  for (int i = 0; i < n; ++i)
    if (x[i] >= threshold) {
      if (count < limit) index[count] = i;
      ++count;
    }
  return count;
}

void block_max(const float* x, int n, int size, float* y) {
  for (int begin = 0; begin < n; begin += size, ++y) {
    *y = x[begin];
    for (int i = begin; i < n && i < begin + size; ++i) *y = x[i] > *y ? x[i] : *y;
  }
}

bool finish_logits(float* x, int n, float scale, float softcap) {
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    x[i] *= scale;
    finite = finite && std::isfinite(x[i]);
    if (softcap > 0) x[i] = softcap * tanhf(x[i] / softcap);
  }
  return finite;
}

const KernelTable table = {"portable", matmul,       matmul_scratch_bytes,
                           prepare,    gather_row,   rms_norm,
                           rope,       silu_mul,     gelu_tanh_mul,
                           gelu_mul,   add_scaled,   rotate,
                           store_kv,   attend,       merge,
                           max,        sum_exp,      collect,
                           block_max,  finish_logits};

}  // namespace portable

const KernelTable& portable_table() { return portable::table; }

}  // namespace lmdeploy
