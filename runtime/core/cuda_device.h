// One rank's CUDA device: memory, a stream, errors. The interface needs no CUDA header, so host
// code may include it everywhere; a build without CUDA has the same functions, which say so.
//
// Thread rule: the engine's thread of the rank selects the device and makes everything on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "runtime/core/status.h"

// cudaStream_t and cudaEvent_t are pointers to these.
struct CUstream_st;
struct CUevent_st;

namespace lockstep {

using CudaStream = CUstream_st*;

// "built without CUDA" where there is none.
bool BuiltWithCuda();
// Devices this process may see; 0 without a driver, without a device, or built without CUDA.
int NumCudaDevices();
// OK when there is at least one of them; FailedPrecondition says why not, with CUDA's text. Makes
// no context: it takes milliseconds where there is no driver.
absl::Status FindCudaDevice();

struct CudaDeviceInfo {
  std::string name;
  std::string uuid;  // identifies the GPU on its host, whatever CUDA_VISIBLE_DEVICES says
  int compute_major = 0;
  int compute_minor = 0;
  int num_multiprocessors = 0;
  int64_t total_bytes = 0;
};

// What device `index` is; needs no context on it. Internal with CUDA's text when that fails.
absl::StatusOr<CudaDeviceInfo> DescribeCudaDevice(int index);
// Selects `index` for this thread, makes its context, and reads what it is; errors as above.
absl::StatusOr<CudaDeviceInfo> SelectCudaDevice(int index);
// Free bytes of the selected device.
absl::StatusOr<int64_t> FreeCudaBytes();

// What a CudaBuffer owns.
enum class CudaMemory {
  kDevice,  // of the selected device, 256-byte aligned
  kPinned,  // page-locked, of the host: the device copies from and to it without the host waiting
};

// Owns bytes that CUDA has given, uninitialised. Movable, not copyable.
template <CudaMemory kMemory>
class CudaBuffer {
 public:
  // ResourceExhausted, naming `what` and the size, and of a device the free memory, when it cannot
  // be had.
  static absl::StatusOr<CudaBuffer> Create(int64_t size_bytes, const std::string& what);
  CudaBuffer() = default;
  CudaBuffer(CudaBuffer&& other) noexcept { *this = std::move(other); }
  CudaBuffer& operator=(CudaBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~CudaBuffer();

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

extern template class CudaBuffer<CudaMemory::kDevice>;
extern template class CudaBuffer<CudaMemory::kPinned>;
using DeviceBuffer = CudaBuffer<CudaMemory::kDevice>;
using PinnedBuffer = CudaBuffer<CudaMemory::kPinned>;

// Owns a stream of the selected device that does not wait for the default stream.
class OwnedCudaStream {
 public:
  static absl::StatusOr<OwnedCudaStream> Create();
  // Where the GPU has no room for blocks of all streams, those of this one come first.
  static absl::StatusOr<OwnedCudaStream> CreateUrgent();
  OwnedCudaStream() = default;
  OwnedCudaStream(OwnedCudaStream&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)) {}
  OwnedCudaStream& operator=(OwnedCudaStream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~OwnedCudaStream();
  CudaStream get() const { return stream_; }

 private:
  CudaStream stream_ = nullptr;
};

// Owns a mark in a stream.
class OwnedCudaEvent {
 public:
  static absl::StatusOr<OwnedCudaEvent> Create();
  OwnedCudaEvent() = default;
  OwnedCudaEvent(OwnedCudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  OwnedCudaEvent& operator=(OwnedCudaEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~OwnedCudaEvent();

  // Behind everything that was issued to the stream so far; a later Record moves it.
  absl::Status Record(CudaStream stream);
  // Until the stream has come to the last Record; at once where there was none. An error of a
  // kernel before it shows here. With `stopped`, Aborted soon after that becomes true.
  absl::Status Wait(const std::atomic<bool>* stopped = nullptr);
  // The host goes on; what is issued to `stream` behind this call begins when the last Record
  // before it has been come to.
  absl::Status HoldBack(CudaStream stream) const;

 private:
  CUevent_st* event_ = nullptr;
};

// In stream order; the host does not wait when its side is a PinnedBuffer. Unified addresses: any
// of the two may be host or device memory.
absl::Status CopyAsync(void* to, const void* from, int64_t bytes, CudaStream stream);
absl::Status FillBytesAsync(void* data, int value, int64_t bytes, CudaStream stream);
// Waits for everything that was issued to the stream; an error of a kernel shows here. With
// `stopped`, Aborted soon after that becomes true.
absl::Status Synchronize(CudaStream stream, const std::atomic<bool>* stopped = nullptr);

}  // namespace lockstep
