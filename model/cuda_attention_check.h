// --check-attention on a GPU: every layer's attention once more in plain float32 arithmetic, and
// the largest difference. The steps are launched kernel by kernel then, and the host waits for each
// layer.
//
// What is compared: every element of every row of the output. The output is NaN beforehand, so a
// row that is left out shows. What both read, queries and the KV cache, is what the step's kernels
// wrote; that they wrote the right thing is not looked at. A fused kernel that holds attention is
// not run, hence not compared.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_batch.h"
#include "attention/cuda_attention.h"
#include "model/cuda_ops.h"
#include "runtime/core/buffer.h"
#include "runtime/core/status.h"

namespace lockstep {

// Of one row: its largest difference, relative to the largest magnitude of the expected row.
struct CudaRowDifference {
  float relative = 0;  // infinite where one side alone is no number
  int32_t column = 0;
  float value = 0;
  float expected = 0;
};

// differences[t], device memory, of rows t of two matrices of one shape and dtype.
absl::Status CompareRows(const MatrixView& value, const MatrixView& expected,
                         CudaRowDifference* differences, const CudaContext& context);

class CudaAttentionCheck {
 public:
  // `width`: Hq_local * D. ResourceExhausted when the device has no room for a second output.
  static absl::StatusOr<std::unique_ptr<CudaAttentionCheck>> Create(DType dtype, int64_t max_tokens,
                                                                    int64_t width);

  // Before the layers of a step.
  void BeginStep(const AttentionBatch& batch);
  // Runs `layer` into `out` and compares. Waits. Internal, naming step, layer, request, position,
  // head and both values, when they differ by more than rounding explains (AttentionTolerance).
  absl::Status Forward(int64_t layer_index, const CudaAttentionLayer& layer,
                       const CudaAttentionBatch& batch, CudaAttentionWorkspace& workspace,
                       const CudaRows& query, const KvCacheView& cache, const MatrixView& out,
                       const CudaContext& context);
  // How much was compared, and the largest difference.
  std::string Summary() const;

 private:
  CudaAttentionCheck() = default;
  std::string Describe(int64_t layer_index, int64_t row, const CudaRowDifference& difference,
                       int64_t head_dim) const;

  DType dtype_ = DType::kBF16;
  DeviceBuffer expected_;     // [T, width]
  DeviceBuffer differences_;  // CudaRowDifference [T]
  std::vector<CudaRowDifference> on_host_;
  std::vector<int32_t> query_start_loc_;
  std::vector<int32_t> seq_lens_;
  int64_t steps_ = 0;
  int64_t rows_ = 0;  // all layers
  float largest_ = 0;
  std::string where_;
};

}  // namespace lockstep
