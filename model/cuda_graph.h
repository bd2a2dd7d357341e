// A captured sequence of launches.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "runtime/core/cuda_device.h"
#include "runtime/core/cuda_errors.h"
#include "runtime/core/status.h"

namespace lockstep {

class CudaGraph {
 public:
  CudaGraph() = default;
  CudaGraph(CudaGraph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  CudaGraph& operator=(CudaGraph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  ~CudaGraph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }

  // What launch() puts on the stream; nothing of it runs.
  template <typename Launch>
  absl::Status Capture(CudaStream stream, Launch launch) {
    LOCKSTEP_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const absl::Status launched = launch();
    cudaGraph_t graph = nullptr;
    const absl::Status ended =
        CudaStatus(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    absl::Status status = launched.ok() ? ended : launched;
    if (status.ok()) {
      status = CudaStatus(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    return status;
  }
  absl::Status Replay(CudaStream stream) const {
    return CudaStatus(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace lockstep
