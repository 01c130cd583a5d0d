// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
#pragma once
#include <cstdint>

namespace lmdeploy {

struct PhiloxBlock {
  uint32_t word[4];
};

inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t{0xD2511F53} * counter.word[0];
    uint64_t p1 = uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// One number in [0, 1) with 53 random bits: a function of the seed and the position only.
inline double uniform(uint64_t seed, uint64_t position) {
  PhiloxBlock counter = {{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}};
  PhiloxBlock x = philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  uint64_t bits = (uint64_t{x.word[0]} << 32 | x.word[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace lmdeploy
