// A rank's decoder as the kernel of a decode step (cuda_row_step.h) wants to know it.
#pragma once

#include <vector>

#include "model/cuda_decoder.h"
#include "model/cuda_layer.h"
#include "model/cuda_row_step.h"

namespace lockstep {

// Whether decode steps of one request can be one kernel: Unimplemented, and why. The same on all
// ranks: by what all of them have, and whether they reach each other's memory (PeerWindows). Where
// it cannot, a chain of kernels makes them, as it makes all other steps.
absl::Status CheckRowSteps(const ModelConfig& config, const std::vector<RankPartition>& partition,
                           const CudaDecoderOptions& options, bool in_peer_memory);

// What is pointed to must outlive the model. `head` may be the embedding.
RowStepModel DescribeForRowSteps(const ModelConfig& config, const RankPartition& part,
                                 const CudaDecoderOptions& options,
                                 const std::vector<CudaLayer>& layers,
                                 const DeviceMatrix& final_norm, const DeviceMatrix& head);

}  // namespace lockstep
