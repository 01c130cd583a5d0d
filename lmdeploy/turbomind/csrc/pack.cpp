#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace lmdeploy {
namespace {

constexpr size_t kLine = 64;
constexpr int kLinesAtOnce = 64;  // 4 KiB of a tile stay in L1 while 16 rows are spread over them

bool is_w4(WeightKind kind) { return kind == kW4Zero || kind == kW4Min; }
bool has_mins(WeightKind kind) { return kind == kW4Min || kind == kInt8Min; }
size_t align(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
int inputs_per_line(WeightKind kind) { return is_w4(kind) ? 8 : is_dense(kind) ? 2 : 4; }
int code_bytes(WeightKind kind) { return is_dense(kind) ? 2 : 1; }

void check(WeightKind kind, int32_t n, int32_t k, int32_t group) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a packed matrix needs at least one row and one column");
  // The vector kernels take 32 inputs at a time, so that groups of 16 must come in pairs.
  const bool grouped = group == 32 || group == 64 || group == 128 || (group == 16 && k % 32 == 0);
  if (is_dense(kind) ? group != 0 : !grouped)
    throw std::invalid_argument("group size " + std::to_string(group) +
                                " cannot be packed; use 32, 64, 128, or 16 with a multiple of 32 columns");
}

// The 4 bytes of one lane for the next inputs_per_line inputs.
uint32_t lane_w4(const uint8_t* codes) {
  uint32_t low, high;
  std::memcpy(&low, codes, 4);
  std::memcpy(&high, codes + 4, 4);
  return low | high << 4;
}
uint32_t lane_int8(const uint8_t* codes) {
  uint32_t value;
  std::memcpy(&value, codes, 4);
  return value ^ 0x80808080u;
}
uint32_t lane_plain(const uint8_t* codes) {
  uint32_t value;
  std::memcpy(&value, codes, 4);
  return value;
}

template <uint32_t (*Lane)(const uint8_t*), int Stride>
void spread(const uint8_t* codes, int lines, uint8_t* out) {
  for (int i = 0; i < lines; ++i) {
    const uint32_t value = Lane(codes + i * Stride);
    std::memcpy(out + i * kLine, &value, 4);
  }
}

// The two halves of a line are 16 channels each: `out` is the lane's place in the first of them.
void spread_halves(const uint8_t* codes, int lines, uint8_t* out) {
  for (int i = 0; i < lines; ++i) {
    std::memcpy(out + i * kLine, codes + i * 4, 2);
    std::memcpy(out + i * kLine + kLine / 2, codes + i * 4 + 2, 2);
  }
}

// Writes `lines` lanes from lines * inputs_per_line codes; `out` is the lane's place in the first line.
void spread_codes(WeightKind kind, const uint8_t* codes, int lines, uint8_t* out) {
  if (is_w4(kind))
    spread<lane_w4, 8>(codes, lines, out);
  else if (kind == kFp16)
    spread_halves(codes, lines, out);
  else if (kind == kInt8)
    spread<lane_int8, 4>(codes, lines, out);
  else
    spread<lane_plain, 4>(codes, lines, out);
}

uint8_t* tile_lines(const Matrix& m, int tile) {
  const size_t lines = m.k_padded / inputs_per_line(m.kind);
  return const_cast<uint8_t*>(m.lines) + static_cast<size_t>(tile) * lines * kLine;
}

// Rows [src_row, src_row + count) into lanes [lane, lane + count) of one tile, lines [begin, begin + lines).
void pack_lines(const PackSource& src, int src_row, int count, const Matrix& dst, int tile, int lane, int begin,
                int lines) {
  const int per_line = inputs_per_line(src.kind), bytes = code_bytes(src.kind);
  const auto* codes = static_cast<const uint8_t*>(src.codes);
  const int whole = std::clamp(src.k / per_line - begin, 0, lines);
  const int rest = whole < lines && begin + whole == src.k / per_line ? src.k % per_line : 0;
  for (int i = 0; i < count; ++i) {
    const uint8_t* row = codes + (static_cast<size_t>(src_row + i) * src.k + begin * per_line) * bytes;
    uint8_t* out = tile_lines(dst, tile) + begin * kLine + (lane + i) * (src.kind == kFp16 ? 2 : 4);
    spread_codes(src.kind, row, whole, out);
    if (rest > 0) {
      uint8_t tail[8] = {};
      std::memcpy(tail, row + static_cast<size_t>(whole) * per_line * bytes, rest * bytes);
      spread_codes(src.kind, tail, 1, out + whole * kLine);
    }
  }
}

void pack_groups(const PackSource& src, int src_row, int count, const Matrix& dst, int tile, int lane) {
  const int src_groups = (src.k + src.group - 1) / src.group;
  for (int g = 0; g < dst.groups; ++g) {
    const size_t out = (static_cast<size_t>(tile) * dst.groups + g) * kTile + lane;
    for (int i = 0; i < count; ++i) {
      const size_t in = static_cast<size_t>(src_row + i) * src_groups + g * dst.group / src.group;
      const_cast<uint16_t*>(dst.scales)[out + i] = src.scales[in];
      if (dst.kind == kW4Zero) const_cast<uint8_t*>(dst.zeros)[out + i] = src.zeros[in];
      if (has_mins(dst.kind)) const_cast<uint16_t*>(dst.mins)[out + i] = src.mins[in];
    }
  }
}

void pack_tile(const PackSource& src, int src_row, int count, const Matrix& dst, int tile, int lane) {
  const int lines = dst.k_padded / inputs_per_line(dst.kind);
  for (int begin = 0; begin < lines; begin += kLinesAtOnce)
    pack_lines(src, src_row, count, dst, tile, lane, begin, std::min(kLinesAtOnce, lines - begin));
  if (!is_dense(dst.kind)) pack_groups(src, src_row, count, dst, tile, lane);
}

}  // namespace

Matrix layout_matrix(WeightKind kind, int32_t n, int32_t k, int32_t group, void* memory) {
  check(kind, n, k, group);
  const int unit = is_dense(kind) ? 2 : group;
  Matrix m{};
  m.kind = kind;
  m.n = n;
  m.k = k;
  m.tiles = (n + kTile - 1) / kTile;
  m.k_padded = (k + unit - 1) / unit * unit;
  m.group = group;
  m.groups = is_dense(kind) ? 0 : m.k_padded / group;
  auto* at = static_cast<uint8_t*>(memory);
  m.lines = at;
  at += static_cast<size_t>(m.tiles) * (m.k_padded / inputs_per_line(kind)) * kLine;
  const size_t entries = static_cast<size_t>(m.tiles) * m.groups * kTile;
  if (is_dense(kind)) return m;
  m.scales = reinterpret_cast<const uint16_t*>(at);
  at += align(entries * 2);
  if (kind == kW4Zero) m.zeros = at;
  if (has_mins(kind)) m.mins = reinterpret_cast<const uint16_t*>(at);
  return m;
}

size_t packed_bytes(WeightKind kind, int32_t n, int32_t k, int32_t group) {
  const Matrix m = layout_matrix(kind, n, k, group, nullptr);
  const size_t lines = static_cast<size_t>(m.tiles) * (m.k_padded / inputs_per_line(kind)) * kLine;
  const size_t entries = static_cast<size_t>(m.tiles) * m.groups * kTile;
  const size_t offsets = kind == kW4Zero ? entries : has_mins(kind) ? entries * 2 : 0;
  return lines + align(entries * 2) + align(offsets);
}

void pack_rows(const PackSource& src, int32_t src_row, int32_t count, const Matrix& dst, int32_t dst_row) {
  if (src.kind != dst.kind || src.k != dst.k) throw std::invalid_argument("source and packed matrix differ in form");
  if (src_row < 0 || count < 0 || src_row + count > src.n || dst_row < 0 || dst_row + count > dst.n)
    throw std::invalid_argument("rows outside the matrix");
  if (!is_dense(src.kind) && (src.group <= 0 || src.group % dst.group != 0))
    throw std::invalid_argument("a packed group must divide the source's group");
  while (count > 0) {
    const int lane = dst_row % kTile, rows = std::min(count, kTile - lane);
    pack_tile(src, src_row, rows, dst, dst_row / kTile, lane);
    src_row += rows;
    dst_row += rows;
    count -= rows;
  }
}

void unpack_codes(const Matrix& src, int32_t channel, void* codes) {
  const int width = src.kind == kFp16 ? 2 : 4;
  const uint8_t* lane = tile_lines(src, channel / kTile) + channel % kTile * width;
  auto* bytes = static_cast<uint8_t*>(codes);
  for (int k = 0; k < src.k; ++k) {
    const uint8_t* line = lane + static_cast<size_t>(k / inputs_per_line(src.kind)) * kLine;
    if (is_w4(src.kind))
      bytes[k] = k % 8 < 4 ? line[k % 4] & 15 : line[k % 4] >> 4;
    else if (src.kind == kInt8)
      bytes[k] = line[k % 4] ^ 0x80;
    else if (src.kind == kInt8Min)
      bytes[k] = line[k % 4];
    else
      std::memcpy(bytes + 2 * k, line + k % 2 * (src.kind == kFp16 ? kLine / 2 : 2), 2);
  }
}

}  // namespace lmdeploy
