#include "model/cuda_linear.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "model/cuda_skinny.h"
#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

absl::Status CublasStatus(cublasStatus_t code, const char* call) {
  if (code == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrFormat("%s: %s (%s)", call, cublasLtGetStatusString(code),
                                              cublasLtGetStatusName(code));
  return code == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

#define LOCKSTEP_CUBLAS(call) LOCKSTEP_RETURN_IF_ERROR(CublasStatus((call), #call))

cudaDataType_t DataType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF8E4M3:
      break;
  }
  LOCKSTEP_CHECK(false);
}

// Numbers of rows that share an algorithm: the largest of them, for which it is chosen. Each number
// of a small batch has its own.
int64_t RowBucket(int64_t rows) {
  const int64_t step = rows <= 16 ? 1 : rows <= 128 ? 8 : rows <= 1024 ? 64 : 256;
  return (rows + step - 1) / step * step;
}

// The largest power of two up to 256 that divides all of them.
uint32_t CommonAlignment(const void* a, const void* b, const void* c) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                    reinterpret_cast<uintptr_t>(c) | 256;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// What an algorithm is chosen for.
struct PlanKey {
  int64_t rows, n, k;
  int64_t x_stride, weight_stride, y_stride;
  DType dtype, out_dtype;
  bool has_bias;
  uint32_t alignment;
  int32_t multiprocessors;  // 0: all

  bool operator<(const PlanKey& other) const { return Tie() < other.Tie(); }
  std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, DType, bool, uint32_t,
             int32_t>
  Tie() const {
    return {rows,  n,         k,        x_stride,  weight_stride,  y_stride,
            dtype, out_dtype, has_bias, alignment, multiprocessors};
  }
};

// cuBLASLt's matrices are column-major: a row-major [R, C] is its [C, R]. So y^T [N, T] =
// (W^T)^T [N, K] * x^T [K, T].
struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t weight, x, y;
  cublasLtMatmulAlgo_t algorithm;
};

absl::Status SetBias(const void* bias, Plan* plan) {
  LOCKSTEP_CUBLAS(cublasLtMatmulDescSetAttribute(&plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                 &bias, sizeof(bias)));
  return absl::OkStatus();
}

absl::Status Describe(const PlanKey& key, const void* bias, Plan* plan) {
  LOCKSTEP_CUBLAS(cublasLtMatmulDescInit(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  LOCKSTEP_CUBLAS(cublasLtMatmulDescSetAttribute(&plan->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                 &transposed, sizeof(transposed)));
  if (key.has_bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    LOCKSTEP_CUBLAS(cublasLtMatmulDescSetAttribute(&plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                   &epilogue, sizeof(epilogue)));
    const cudaDataType_t bias_type = DataType(key.out_dtype);
    LOCKSTEP_CUBLAS(cublasLtMatmulDescSetAttribute(
        &plan->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof(bias_type)));
    LOCKSTEP_RETURN_IF_ERROR(SetBias(bias, plan));
  }
  if (key.multiprocessors > 0) {
    LOCKSTEP_CUBLAS(
        cublasLtMatmulDescSetAttribute(&plan->product, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                                       &key.multiprocessors, sizeof(key.multiprocessors)));
  }
  const auto in = DataType(key.dtype);
  LOCKSTEP_CUBLAS(cublasLtMatrixLayoutInit(&plan->weight, in, key.k, key.n, key.weight_stride));
  LOCKSTEP_CUBLAS(cublasLtMatrixLayoutInit(&plan->x, in, key.k, key.rows, key.x_stride));
  LOCKSTEP_CUBLAS(
      cublasLtMatrixLayoutInit(&plan->y, DataType(key.out_dtype), key.n, key.rows, key.y_stride));
  return absl::OkStatus();
}

class Preference {
 public:
  static absl::StatusOr<Preference> Create(uint64_t workspace_bytes, uint32_t alignment) {
    Preference preference;
    LOCKSTEP_CUBLAS(cublasLtMatmulPreferenceInit(&preference.opaque_));
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      return CublasStatus(cublasLtMatmulPreferenceSetAttribute(&preference.opaque_, attribute,
                                                               &value, sizeof(value)),
                          "cublasLtMatmulPreferenceSetAttribute");
    };
    LOCKSTEP_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes));
    // Parts of a product that is split along K: added in float32, not in y's dtype.
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    LOCKSTEP_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      LOCKSTEP_RETURN_IF_ERROR(set(attribute, alignment));
    }
    return preference;
  }
  cublasLtMatmulPreference_t get() { return &opaque_; }

 private:
  cublasLtMatmulPreferenceOpaque_t opaque_;
};

}  // namespace

class CudaLinear::Impl {
 public:
  Impl(cublasLtHandle_t handle, DeviceBuffer workspace, int num_multiprocessors,
       std::unique_ptr<CudaSkinny> skinny)
      : handle_(handle),
        workspace_(std::move(workspace)),
        num_multiprocessors_(num_multiprocessors),
        skinny_(std::move(skinny)) {}
  ~Impl() { cublasLtDestroy(handle_); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::Status Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                   const MatrixView& y, CudaStream stream, int spare_multiprocessors);

  bool TakesSkinny(const SkinnyProduct& product) const {
    return skinny_ != nullptr && CudaSkinny::Takes(product);
  }
  absl::Status RunSkinny(const SkinnyProduct& product, const SkinnyLaunch& launch) {
    LOCKSTEP_CHECK(skinny_ != nullptr);
    return skinny_->Run(product, launch);
  }

 private:
  absl::StatusOr<Plan*> PlanOf(const PlanKey& key, const void* bias);
  cublasStatus_t Multiply(Plan* plan, const MatrixView& x, const MatrixView& weight,
                          const MatrixView& y, CudaStream stream);

  cublasLtHandle_t handle_;
  DeviceBuffer workspace_;
  int num_multiprocessors_;
  std::unique_ptr<CudaSkinny> skinny_;  // null: none on this GPU, or not wanted
  std::map<PlanKey, Plan> plans_;
};

absl::StatusOr<Plan*> CudaLinear::Impl::PlanOf(const PlanKey& key, const void* bias) {
  const auto found = plans_.find(key);
  if (found != plans_.end()) return &found->second;
  Plan plan;
  LOCKSTEP_RETURN_IF_ERROR(Describe(key, bias, &plan));
  LOCKSTEP_ASSIGN_OR_RETURN(
      Preference preference,
      Preference::Create(static_cast<uint64_t>(workspace_.size_bytes()), key.alignment));
  cublasLtMatmulHeuristicResult_t best;
  int count = 0;
  const cublasStatus_t code =
      cublasLtMatmulAlgoGetHeuristic(handle_, &plan.product, &plan.weight, &plan.x, &plan.y,
                                     &plan.y, preference.get(), 1, &best, &count);
  if (code == CUBLAS_STATUS_NOT_SUPPORTED || (code == CUBLAS_STATUS_SUCCESS && count == 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "cuBLASLt has no algorithm for a product [%d, %d] x [%d, %d]^T of %s, result %s%s",
        key.rows, key.k, key.n, key.k, Name(key.dtype), Name(key.out_dtype),
        key.has_bias ? ", with a bias" : ""));
  }
  LOCKSTEP_RETURN_IF_ERROR(CublasStatus(code, "cublasLtMatmulAlgoGetHeuristic"));
  plan.algorithm = best.algo;
  return &plans_.emplace(key, plan).first->second;
}

cublasStatus_t CudaLinear::Impl::Multiply(Plan* plan, const MatrixView& x, const MatrixView& weight,
                                          const MatrixView& y, CudaStream stream) {
  const float one = 1, zero = 0;
  const uint64_t rows = static_cast<uint64_t>(x.rows);
  for (cublasLtMatrixLayoutOpaque_t* layout : {&plan->x, &plan->y}) {
    const cublasStatus_t code =
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof(rows));
    if (code != CUBLAS_STATUS_SUCCESS) return code;
  }
  return cublasLtMatmul(handle_, &plan->product, &one, weight.data, &plan->weight, x.data, &plan->x,
                        &zero, y.data, &plan->y, y.data, &plan->y, &plan->algorithm,
                        workspace_.data(), static_cast<size_t>(workspace_.size_bytes()), stream);
}

absl::Status CudaLinear::Impl::Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                                   const MatrixView& y, CudaStream stream,
                                   int spare_multiprocessors) {
  const int32_t multiprocessors =
      spare_multiprocessors == 0 ? 0 : std::max(num_multiprocessors_ - spare_multiprocessors, 1);
  // The distance of one row from the next is of no matter where there is one.
  PlanKey key = {RowBucket(x.rows),
                 weight.rows,
                 x.cols,
                 x.rows == 1 ? x.cols : x.stride,
                 weight.rows == 1 ? x.cols : weight.stride,
                 x.rows == 1 ? y.cols : y.stride,
                 x.dtype,
                 y.dtype,
                 bias != nullptr,
                 CommonAlignment(x.data, weight.data, y.data),
                 multiprocessors};
  LOCKSTEP_ASSIGN_OR_RETURN(Plan * plan, PlanOf(key, bias));
  if (bias != nullptr) LOCKSTEP_RETURN_IF_ERROR(SetBias(bias, plan));
  cublasStatus_t code = Multiply(plan, x, weight, y, stream);
  const bool refused = code == CUBLAS_STATUS_NOT_SUPPORTED || code == CUBLAS_STATUS_INVALID_VALUE;
  if (refused && key.rows != x.rows) {
    // An algorithm for more rows may not suit fewer.
    key.rows = x.rows;
    LOCKSTEP_ASSIGN_OR_RETURN(plan, PlanOf(key, bias));
    if (bias != nullptr) LOCKSTEP_RETURN_IF_ERROR(SetBias(bias, plan));
    code = Multiply(plan, x, weight, y, stream);
  }
  return CublasStatus(code, "cublasLtMatmul");
}

absl::StatusOr<std::unique_ptr<CudaLinear>> CudaLinear::Create(int64_t workspace_bytes,
                                                               bool has_skinny) {
  LOCKSTEP_ASSIGN_OR_RETURN(DeviceBuffer workspace,
                            DeviceBuffer::Create(workspace_bytes, "workspace of products"));
  int device = 0, num_multiprocessors = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(
      cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device));
  std::unique_ptr<CudaSkinny> skinny;
  if (has_skinny) {
    LOCKSTEP_ASSIGN_OR_RETURN(skinny, CudaSkinny::Create(num_multiprocessors));
  }
  cublasLtHandle_t handle = nullptr;
  LOCKSTEP_CUBLAS(cublasLtCreate(&handle));
  return std::unique_ptr<CudaLinear>(new CudaLinear(std::make_unique<Impl>(
      handle, std::move(workspace), num_multiprocessors, std::move(skinny))));
}

CudaLinear::CudaLinear(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaLinear::~CudaLinear() = default;

absl::Status CudaLinear::Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                             const MatrixView& y, CudaStream stream, int spare_multiprocessors,
                             bool programmatic) {
  LOCKSTEP_CHECK(spare_multiprocessors >= 0);
  LOCKSTEP_CHECK(x.cols == weight.cols && y.cols == weight.rows && y.rows == x.rows);
  LOCKSTEP_CHECK(x.dtype == weight.dtype && (y.dtype == x.dtype || y.dtype == DType::kF32));
  LOCKSTEP_CHECK(x.cols > 0);
  if (y.rows == 0 || y.cols == 0) return absl::OkStatus();
  const SkinnyProduct product = {x, weight, bias, y};
  if (impl_->TakesSkinny(product)) {
    return impl_->RunSkinny(product, {stream, programmatic, spare_multiprocessors});
  }
  return impl_->Run(x, weight, bias, y, stream, spare_multiprocessors);
}

bool CudaLinear::TakesSwiGlu(const MatrixView& x, const MatrixView& weight,
                             const MatrixView& y) const {
  return impl_->TakesSkinny({x, weight, nullptr, y, true});
}

absl::Status CudaLinear::RunSwiGlu(const MatrixView& x, const MatrixView& weight, const void* bias,
                                   const MatrixView& y, CudaStream stream,
                                   int spare_multiprocessors, bool programmatic) {
  return impl_->RunSkinny({x, weight, bias, y, true},
                          {stream, programmatic, spare_multiprocessors});
}

}  // namespace lockstep
