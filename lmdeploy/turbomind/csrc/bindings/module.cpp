// The extension module _turbomind: gathers what the other binding files register.
#include <nanobind/nanobind.h>

void register_kernels(nanobind::module_& m);
void register_model(nanobind::module_& m);

NB_MODULE(_turbomind, m) {
  m.doc() = "Native part of the turbomind executor.";
  register_kernels(m);
  register_model(m);
}
