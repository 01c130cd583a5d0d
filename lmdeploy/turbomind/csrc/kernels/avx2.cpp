#include "kernels/table.h"
namespace lmdeploy {
const KernelTable& avx2_table() { return portable_table(); }
}  // namespace lmdeploy
