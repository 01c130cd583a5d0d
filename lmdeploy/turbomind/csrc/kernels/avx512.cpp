#include "kernels/table.h"
namespace lmdeploy {
const KernelTable& avx512_table() { return portable_table(); }
}  // namespace lmdeploy
