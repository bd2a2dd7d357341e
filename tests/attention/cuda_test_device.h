// Device memory for tests, and a host's face for the CUDA backend, so that what runs on host
// backends runs on it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/cuda_backend.h"
#include "tests/attention/attention_scenario.h"

namespace lockstep {

// Of host bytes. The device is selected and the copy is done when it returns.
DeviceBuffer ToDevice(const void* data, int64_t bytes);
template <typename T>
DeviceBuffer ToDevice(const std::vector<T>& values) {
  return ToDevice(values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
}
// All bytes 0xff: NaN in every floating-point dtype, -1 in integers.
DeviceBuffer PoisonedDevice(int64_t bytes);
// Waits for the device first.
void ToHost(const DeviceBuffer& buffer, void* data, int64_t bytes);

// `values` of a matrix view, row by row, in another dtype, without gaps.
std::vector<char> Packed(const MatrixView& view, DType dtype);
// Values rounded to a dtype, as float32.
std::vector<float> RoundedTo(const std::vector<float>& values, DType dtype);
// Rounds the scenario's queries, keys and values, so that only the cache's and the backend's own
// rounding is left.
void RoundData(Scenario& scenario, DType dtype);

// ||a - b|| / ||b||; infinite where a has a NaN.
double RelativeError(const std::vector<float>& a, const std::vector<double>& b);
// What rounding explains of it: see the definition.
double RelativeErrorTolerance(DType dtype);

// Takes host views as every host backend does, copies them to the device and back. Queries and
// outputs are converted to and from `activations`, outputs are NaN beforehand; keys and values
// arrive on the device as float32 when `write_float32`, else as `activations`.
class HostFacedCuda : public AttentionBackend {
 public:
  HostFacedCuda(const CudaBackend::Options& options, DType activations, bool write_float32);
  ~HostFacedCuda() override;

  std::string name() const override { return "cuda"; }
  const AttentionCapabilities& capabilities() const override { return CudaAttentionCapabilities(); }
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override;
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override;
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override;

 private:
  OwnedCudaStream stream_;
  std::unique_ptr<CudaBackend> backend_;
  DType activations_;
  bool write_float32_;
};

// A backend with room for the scenario.
CudaBackend::Options OptionsFor(const ScenarioShape& shape);
std::unique_ptr<AttentionBackend> MakeHostFacedCuda(const ScenarioShape& shape, DType activations,
                                                    CudaPrefill prefill);
// False where the device or the build has no warpgroup products.
bool HasWarpgroupPrefill();

}  // namespace lockstep
