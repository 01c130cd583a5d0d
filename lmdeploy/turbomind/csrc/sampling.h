// From one row of raw logits to a token and its log-probabilities.
//
// The rules are those of lmdeploy/engine/request.py (SamplingParams). A result depends on the row, its parameters,
// its seed and its position only. Knows nothing of models, threads or sequences; allocates nothing.
#pragma once
#include "batch.h"
#include "kernels/table.h"

namespace lmdeploy {

// Private to a thread.
struct SampleScratch {
  int32_t* index;   // [vocab]
  float* original;  // [vocab]
  float* weight;    // [vocab]
};

// Fills entry `sample` of `out` (all but `logits`). `logits` [vocab] is changed during the call and restored.
// `finite` tells whether the row holds only finite numbers.
void sample_row(const KernelTable& kernels, const SampleColumns& columns, int sample, float* logits, int vocab,
                bool finite, const SampleScratch& scratch, const StepOutput& out);

}  // namespace lmdeploy
