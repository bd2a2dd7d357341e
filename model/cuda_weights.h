// Weights on the device: matrices as the checkpoint stores them, row-major, and vectors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

// Owns a matrix on the device.
struct DeviceMatrix {
  DeviceBuffer storage;
  MatrixView view;  // [rows, cols] without gaps; data null when there is none

  explicit operator bool() const { return view.data != nullptr; }
  int64_t bytes() const { return storage.size_bytes(); }
  const float* values() const { return static_cast<const float*>(view.data); }
};

// A rectangle of a named matrix.
struct Rectangle {
  std::string name;
  Range rows;
  Range cols;
};

// Reads rectangles into page-locked memory, several threads a piece, while the piece before it is
// on its way to the device. Thread rule: one thread. Destroy it after the last load: it waits for
// the stream.
class DeviceWeightLoader {
 public:
  // The references must outlive the loader.
  static absl::StatusOr<DeviceWeightLoader> Create(const Checkpoint& checkpoint,
                                                   ThreadPool& threads, CudaStream stream);

  // Rectangles of equal width, one below the other, as `dtype`. An empty list gives no matrix.
  absl::StatusOr<DeviceMatrix> Load(const std::vector<Rectangle>& parts, DType dtype);
  // Vectors (1 row), one behind the other.
  absl::StatusOr<DeviceMatrix> LoadVector(const std::vector<Rectangle>& parts, DType dtype);

 private:
  DeviceWeightLoader(const Checkpoint& checkpoint, ThreadPool& threads, CudaStream stream)
      : checkpoint_(checkpoint), threads_(threads), stream_(stream) {}

  absl::Status LoadPart(const Rectangle& part, DType dtype, char* to);
  absl::Status ReadPiece(const Rectangle& piece, DType dtype, void* to);

  const Checkpoint& checkpoint_;
  ThreadPool& threads_;
  CudaStream stream_;
  PinnedBuffer staging_[2];
  int next_ = 0;
};

}  // namespace lockstep
