// Owning, 64-byte aligned memory, and a typed 2-D view of it.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"
#include "runtime/core/status.h"

namespace lockstep {

// Owns `size_bytes` of host memory, aligned to a cache line. Contents start uninitialised. Movable,
// not copyable.
class Buffer {
 public:
  // ResourceExhausted, naming `what` and the size, when the memory cannot be had.
  static absl::StatusOr<Buffer> Create(int64_t size_bytes, const std::string& what);

  Buffer() = default;
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_bytes_(other.size_bytes_) {
    other.data_ = nullptr;
    other.size_bytes_ = 0;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

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

// A row-major matrix someone else owns: element (r, c) is at data + (r * stride + c) elements.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements between rows, >= cols

  template <typename T>
  T* row(int64_t r) const {
    return static_cast<T*>(data) + r * stride;
  }
};

}  // namespace lockstep
