// Choice of the kernel table for this machine. Knows CPU features; knows nothing of what the kernels compute.
#pragma once
#include <string>
#include <vector>

#include "kernels/table.h"

namespace lmdeploy {

// Names of the tables this machine can run, slowest first.
std::vector<std::string> supported_tables();

// The table of that name. Throws std::invalid_argument, naming what is supported.
const KernelTable& table_by_name(const std::string& name);

// The table in use: the fastest one supported, or the one named by the environment variable LMDEPLOY_KERNELS.
// Chosen at the first call. Throws std::invalid_argument when the variable names no supported table.
const KernelTable& kernels();

// CPU features of interest that this machine and its operating system offer, for reports.
std::vector<std::string> detect();

}  // namespace lmdeploy
