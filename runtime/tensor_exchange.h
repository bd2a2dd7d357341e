// The tensors of a forward pass as a rank had them, kept and brought to rank 0: a part of
// tp_check.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model/tensor_observer.h"
#include "parallel/communicator.h"

namespace lockstep {

// Of a tensor with more rows, the first and the last half of so many are kept.
inline constexpr int64_t kCheckedRows = 256;

inline int64_t NumKept(int64_t rows) { return std::min(rows, kCheckedRows); }
// Row of a tensor of `rows` rows that is the i-th kept one.
inline int64_t KeptRow(int64_t i, int64_t rows) {
  return i < kCheckedRows / 2 || rows <= kCheckedRows ? i : rows - kCheckedRows + i;
}
// The rows between are those from here on.
inline constexpr int64_t kFirstRowBetween = kCheckedRows / 2;

struct TensorHeader {
  int64_t layer = kNoLayer;
  int64_t kind = -1;  // a TensorKind; -1: the rank had no such tensor
  int64_t rows = 0;   // kept ones
  int64_t cols = 0;
  int64_t size = 0;  // floats, of KeptTensor::values

  bool operator==(const TensorHeader&) const = default;
};

struct KeptTensor {
  TensorHeader header;
  // [rows, cols]; of qkv then [rows between, kv_cols], the k and v of those rows: others attend to
  // them.
  std::vector<float> values;
};

// Keeps the tensors of one step, in the order of the forward pass.
class TensorRecorder : public TensorObserver {
 public:
  // kv_cols: of k and v together on this rank, the last ones of its qkv.
  explicit TensorRecorder(int64_t kv_cols) : kv_cols_(kv_cols) {}

  void Observe(int64_t layer, TensorKind kind, const MatrixView& local) override;

  // ResourceExhausted when the memory could not be had; nothing is kept from then on.
  const absl::Status& status() const { return status_; }
  // An empty one beyond the last.
  const KeptTensor& Get(int64_t index) const;
  // For the next step; keeps the memory.
  void Clear() { count_ = 0; }
  void Release();

 private:
  const int64_t kv_cols_;
  absl::Status status_;
  std::vector<KeptTensor> tensors_;
  size_t count_ = 0;
};

// COLLECTIVE. Every rank's header to all, then the values to `received` of rank 0, in rank order.
absl::Status Exchange(Communicator& communicator, const KeptTensor& mine,
                      std::vector<TensorHeader>& headers, std::vector<float>& received);

}  // namespace lockstep
