#pragma once
#include <nanobind/nanobind.h>

void register_bench(nanobind::module_& m);
