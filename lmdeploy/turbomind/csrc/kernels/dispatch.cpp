#include "kernels/dispatch.h"

#include <cstdlib>
#include <stdexcept>

#ifdef LMDEPLOY_X86
#include <cpuid.h>
#endif
#ifdef LMDEPLOY_ARM
#include <sys/auxv.h>
#endif

namespace lmdeploy {
namespace {

struct Features {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;
  bool avx512_vnni = false, avx512_bf16 = false, avx_vnni = false;
  bool asimddp = false;
};

#ifdef LMDEPLOY_X86
// Register state that the operating system saves: bit 1 xmm, 2 ymm, 5..7 opmask and zmm.
uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

Features query() {
  Features f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return f;
  const uint64_t state = saved_state();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  f.fma = ymm && (c & (1u << 12));
  f.f16c = ymm && (c & (1u << 29));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const uint32_t sub_leaves = a;
  f.avx2 = ymm && (b & (1u << 5));
  f.avx512f = zmm && (b & (1u << 16));
  f.avx512dq = zmm && (b & (1u << 17));
  f.avx512bw = zmm && (b & (1u << 30));
  f.avx512vl = zmm && (b & (1u << 31));
  f.avx512_vnni = zmm && (c & (1u << 11));
  if (sub_leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    f.avx_vnni = ymm && (a & (1u << 4));
    f.avx512_bf16 = zmm && (a & (1u << 5));
  }
  return f;
}
#elif defined(LMDEPLOY_ARM)
Features query() {
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  Features f;
  f.asimddp = (getauxval(AT_HWCAP) & kDotProduct) != 0;
  return f;
}
#else
Features query() { return {}; }
#endif

const Features& features() {
  static const Features value = query();
  return value;
}

std::vector<const KernelTable*> supported() {
  std::vector<const KernelTable*> tables{&portable_table()};
#ifdef LMDEPLOY_X86
  const Features& f = features();
  const bool avx2 = f.avx2 && f.fma && f.f16c;
  if (avx2) tables.push_back(&avx2_table());
  if (avx2 && f.avx512f && f.avx512dq && f.avx512bw && f.avx512vl && f.avx512_vnni && f.avx512_bf16)
    tables.push_back(&avx512_table());
#endif
#ifdef LMDEPLOY_ARM
  if (features().asimddp) tables.push_back(&neon_table());
#endif
  return tables;
}

const KernelTable& choose() {
  const char* name = std::getenv("LMDEPLOY_KERNELS");
  return name && *name ? table_by_name(name) : *supported().back();
}

}  // namespace

std::vector<std::string> supported_tables() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported()) names.emplace_back(table->name);
  return names;
}

const KernelTable& table_by_name(const std::string& name) {
  std::string known;
  for (const KernelTable* table : supported()) {
    if (name == table->name) return *table;
    known += known.empty() ? "" : ", ";
    known += table->name;
  }
  throw std::invalid_argument("LMDEPLOY_KERNELS: no kernels named '" + name + "' on this machine; supported: " + known);
}

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

std::vector<std::string> detect() {
  const Features& f = features();
  const std::pair<const char*, bool> all[] = {
      {"avx2", f.avx2},
      {"fma", f.fma},
      {"f16c", f.f16c},
      {"avx_vnni", f.avx_vnni},
      {"avx512f", f.avx512f},
      {"avx512bw", f.avx512bw},
      {"avx512dq", f.avx512dq},
      {"avx512vl", f.avx512vl},
      {"avx512_vnni", f.avx512_vnni},
      {"avx512_bf16", f.avx512_bf16},
      {"asimddp", f.asimddp},
  };
  std::vector<std::string> names;
  for (const auto& [name, present] : all)
    if (present) names.emplace_back(name);
  return names;
}

}  // namespace lmdeploy
