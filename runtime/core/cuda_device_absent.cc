// The same interface in a build without CUDA: nothing can be made, and every function says why.
#include "runtime/core/cuda_device.h"

namespace lockstep {

namespace {
absl::Status WithoutCuda() {
  return absl::UnimplementedError("this build of Lockstep has no CUDA: use --device cpu");
}
}  // namespace

bool BuiltWithCuda() { return false; }
int NumCudaDevices() { return 0; }
absl::Status FindCudaDevice() {
  return absl::FailedPreconditionError("this build of Lockstep has no CUDA");
}
absl::StatusOr<CudaDeviceInfo> DescribeCudaDevice(int) { return WithoutCuda(); }
absl::StatusOr<CudaDeviceInfo> SelectCudaDevice(int) { return WithoutCuda(); }
absl::StatusOr<int64_t> FreeCudaBytes() { return WithoutCuda(); }
template <CudaMemory kMemory>
absl::StatusOr<CudaBuffer<kMemory>> CudaBuffer<kMemory>::Create(int64_t, const std::string&) {
  return WithoutCuda();
}
template <CudaMemory kMemory>
CudaBuffer<kMemory>::~CudaBuffer() = default;
template class CudaBuffer<CudaMemory::kDevice>;
template class CudaBuffer<CudaMemory::kPinned>;
absl::StatusOr<OwnedCudaStream> OwnedCudaStream::Create() { return WithoutCuda(); }
absl::StatusOr<OwnedCudaStream> OwnedCudaStream::CreateUrgent() { return WithoutCuda(); }
OwnedCudaStream::~OwnedCudaStream() = default;
absl::StatusOr<OwnedCudaEvent> OwnedCudaEvent::Create() { return WithoutCuda(); }
OwnedCudaEvent::~OwnedCudaEvent() = default;
absl::Status OwnedCudaEvent::Record(CudaStream) { return WithoutCuda(); }
absl::Status OwnedCudaEvent::Wait(const std::atomic<bool>*) { return WithoutCuda(); }
absl::Status OwnedCudaEvent::HoldBack(CudaStream) const { return WithoutCuda(); }
absl::Status CopyAsync(void*, const void*, int64_t, CudaStream) { return WithoutCuda(); }
absl::Status FillBytesAsync(void*, int, int64_t, CudaStream) { return WithoutCuda(); }
absl::Status Synchronize(CudaStream, const std::atomic<bool>*) { return WithoutCuda(); }

}  // namespace lockstep
