// Weights on the device: matrices as the checkpoint stores them, row-major, and vectors.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
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

// Loads allocate and take note; Finish brings all the data, so that reads of all matrices share the
// threads: each reads a few MB into page-locked memory of a ring, from where they are copied while
// it reads the next. What is stored in another type is read and copied as it is stored, and
// converted on the device; made-up weights are made there. Thread rule: one thread calls; those of
// the pool talk to CUDA, too, while Finish runs.
class DeviceWeightLoader {
 public:
  // The references must outlive the loader.
  DeviceWeightLoader(const Checkpoint& checkpoint, ThreadPool& threads, CudaStream stream);
  ~DeviceWeightLoader();
  DeviceWeightLoader(const DeviceWeightLoader&) = delete;
  DeviceWeightLoader& operator=(const DeviceWeightLoader&) = delete;

  // Rectangles of equal width, one below the other, as `dtype`. An empty list gives no matrix.
  absl::StatusOr<DeviceMatrix> Load(const std::vector<Rectangle>& parts, DType dtype);
  // Vectors (1 row), one behind the other.
  absl::StatusOr<DeviceMatrix> LoadVector(const std::vector<Rectangle>& parts, DType dtype);

  // Once, after the last load. When it returns, the weights are there. The first error of a read
  // ends it; what has not been read then is undefined.
  absl::Status Finish();
  // After Finish: "15.2 GB in 0.81 s, 18.8 GB/s", since it was made.
  std::string Summary() const;

 private:
  struct Piece;    // consecutive rows of a rectangle, and where they go
  class Transfer;  // the ring, and what a thread does with a piece

  absl::Status LoadPart(const Rectangle& part, DType dtype, char* to);

  const Checkpoint& checkpoint_;
  ThreadPool& threads_;
  CudaStream stream_;
  std::chrono::steady_clock::time_point start_;
  int64_t piece_bytes_ = 0;
  std::vector<Piece> pieces_;
  int64_t read_bytes_ = 0;
  int64_t made_up_bytes_ = 0;
  double seconds_ = 0;
};

}  // namespace lockstep
