#include "runtime/core/cuda_device.h"

#include <chrono>
#include <cstdlib>
#include <thread>

#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

// As cudaEventSynchronize, which spins: a decode step is over within milliseconds. What takes
// longer may be seen a little late.
template <typename Query>
absl::Status PollUntilReady(Query query, const char* call, const std::atomic<bool>& stopped) {
  constexpr std::chrono::milliseconds kSpinFor(20);
  constexpr std::chrono::microseconds kSleep(50);
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const cudaError_t code = query();
    if (code != cudaErrorNotReady) return CudaStatus(code, call);
    cudaGetLastError();  // being not ready counts as one
    if (stopped) return absl::AbortedError("the job ends: no longer waiting for the GPU");
    if (std::chrono::steady_clock::now() - start > kSpinFor) std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace

bool BuiltWithCuda() { return true; }

absl::Status FindCudaDevice() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count > 0) return absl::OkStatus();
  cudaGetLastError();
  // What a machine without a driver answers speaks of versions.
  int version = 0;
  if (code == cudaErrorInsufficientDriver &&
      (cudaDriverGetVersion(&version) != cudaSuccess || version == 0)) {
    return absl::FailedPreconditionError("no GPU is visible: there is no CUDA driver");
  }
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return absl::FailedPreconditionError(
      absl::StrFormat("no GPU is visible: %s; CUDA_VISIBLE_DEVICES is %s",
                      cudaGetErrorString(code == cudaSuccess ? cudaErrorNoDevice : code),
                      visible == nullptr ? "not set" : absl::StrCat("\"", visible, "\"")));
}

int NumCudaDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<CudaDeviceInfo> SelectCudaDevice(int index) {
  LOCKSTEP_CUDA(cudaSetDevice(index));
  return DescribeCudaDevice(index);
}

absl::StatusOr<CudaDeviceInfo> DescribeCudaDevice(int index) {
  cudaDeviceProp properties;
  LOCKSTEP_CUDA(cudaGetDeviceProperties(&properties, index));
  CudaDeviceInfo info;
  info.name = properties.name;
  for (const char byte : properties.uuid.bytes) {
    absl::StrAppend(&info.uuid, absl::Hex(static_cast<uint8_t>(byte), absl::kZeroPad2));
  }
  info.compute_major = properties.major;
  info.compute_minor = properties.minor;
  info.num_multiprocessors = properties.multiProcessorCount;
  info.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return info;
}

absl::StatusOr<int64_t> FreeCudaBytes() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  LOCKSTEP_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return static_cast<int64_t>(free_bytes);
}

template <CudaMemory kMemory>
absl::StatusOr<CudaBuffer<kMemory>> CudaBuffer<kMemory>::Create(int64_t size_bytes,
                                                                const std::string& what) {
  LOCKSTEP_CHECK(size_bytes >= 0);
  CudaBuffer buffer;
  if (size_bytes == 0) return buffer;
  const size_t size = static_cast<size_t>(size_bytes);
  const double mib = static_cast<double>(size_bytes) / 1048576.0;
  std::string wanted = absl::StrFormat("%s: %.1f MiB", what, mib);
  absl::Status status;
  if constexpr (kMemory == CudaMemory::kDevice) {
    status = CudaStatus(cudaMalloc(&buffer.data_, size), "cudaMalloc");
    if (!status.ok()) {
      const double free_mib = static_cast<double>(FreeCudaBytes().value_or(0)) / 1048576.0;
      absl::StrAppend(&wanted, absl::StrFormat(" of device memory, %.1f MiB are free", free_mib));
    }
  } else {
    status = CudaStatus(cudaMallocHost(&buffer.data_, size), "cudaMallocHost");
    if (!status.ok()) absl::StrAppend(&wanted, " of page-locked host memory");
  }
  if (!status.ok()) {
    buffer.data_ = nullptr;
    return Annotate(status, wanted);
  }
  buffer.size_bytes_ = size_bytes;
  return buffer;
}

template <CudaMemory kMemory>
CudaBuffer<kMemory>::~CudaBuffer() {
  if (data_ == nullptr) return;
  if constexpr (kMemory == CudaMemory::kDevice) {
    cudaFree(data_);
  } else {
    cudaFreeHost(data_);
  }
}

template class CudaBuffer<CudaMemory::kDevice>;
template class CudaBuffer<CudaMemory::kPinned>;

absl::StatusOr<OwnedCudaStream> OwnedCudaStream::Create() {
  OwnedCudaStream stream;
  LOCKSTEP_CUDA(cudaStreamCreateWithFlags(&stream.stream_, cudaStreamNonBlocking));
  return stream;
}

absl::StatusOr<OwnedCudaStream> OwnedCudaStream::CreateUrgent() {
  int least = 0, greatest = 0;
  LOCKSTEP_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  OwnedCudaStream stream;
  LOCKSTEP_CUDA(cudaStreamCreateWithPriority(&stream.stream_, cudaStreamNonBlocking, greatest));
  return stream;
}

OwnedCudaStream::~OwnedCudaStream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::StatusOr<OwnedCudaEvent> OwnedCudaEvent::Create() {
  OwnedCudaEvent event;
  LOCKSTEP_CUDA(cudaEventCreateWithFlags(&event.event_, cudaEventDisableTiming));
  return event;
}

OwnedCudaEvent::~OwnedCudaEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

absl::Status OwnedCudaEvent::Record(CudaStream stream) {
  return CudaStatus(cudaEventRecord(event_, stream), "cudaEventRecord");
}

absl::Status OwnedCudaEvent::Wait(const std::atomic<bool>* stopped) {
  if (stopped != nullptr) {
    return PollUntilReady([this] { return cudaEventQuery(event_); }, "cudaEventQuery", *stopped);
  }
  return CudaStatus(cudaEventSynchronize(event_), "cudaEventSynchronize");
}

absl::Status OwnedCudaEvent::HoldBack(CudaStream stream) const {
  return CudaStatus(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

absl::Status CopyAsync(void* to, const void* from, int64_t bytes, CudaStream stream) {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
      "cudaMemcpyAsync");
}

absl::Status FillBytesAsync(void* data, int value, int64_t bytes, CudaStream stream) {
  if (bytes == 0) return absl::OkStatus();
  return CudaStatus(cudaMemsetAsync(data, value, static_cast<size_t>(bytes), stream),
                    "cudaMemsetAsync");
}

absl::Status Synchronize(CudaStream stream, const std::atomic<bool>* stopped) {
  if (stopped != nullptr) {
    return PollUntilReady([stream] { return cudaStreamQuery(stream); }, "cudaStreamQuery",
                          *stopped);
  }
  return CudaStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace lockstep
