#include "runtime/core/cuda_tensor_map.h"

#include <cuda_runtime.h>

#include <array>

#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

constexpr int kMaxDims = 5;

CUtensorMapDataType DataType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF8E4M3:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  LOCKSTEP_CHECK(false);
}

// The driver's function, by name: nothing links the driver's library, which a host without a GPU
// does not have.
absl::StatusOr<decltype(&cuTensorMapEncodeTiled)> FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 12000;
  LOCKSTEP_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSince,
                                                 cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    return absl::InternalError("the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

}  // namespace

absl::StatusOr<CUtensorMap> EncodeTensorMap(const void* data, DType dtype,
                                            const std::vector<TensorMapDim>& dims,
                                            TensorMapSwizzle swizzle) {
  static const auto encode = FindEncode();
  LOCKSTEP_RETURN_IF_ERROR(encode.status());
  LOCKSTEP_CHECK(!dims.empty() && dims.size() <= kMaxDims);
  std::array<cuuint64_t, kMaxDims> sizes = {}, strides = {};
  std::array<cuuint32_t, kMaxDims> box = {}, steps = {};
  for (size_t i = 0; i < dims.size(); ++i) {
    sizes[i] = static_cast<cuuint64_t>(dims[i].size);
    box[i] = static_cast<cuuint32_t>(dims[i].box);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(dims[i].stride_bytes);
  }
  CUtensorMap map;
  const CUresult code = (*encode)(
      &map, DataType(dtype), static_cast<cuuint32_t>(dims.size()), const_cast<void*>(data),
      sizes.data(), strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == TensorMapSwizzle::k128Bytes ? CU_TENSOR_MAP_SWIZZLE_128B
                                             : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    return absl::InternalError(
        absl::StrFormat("cuTensorMapEncodeTiled: error %d of the driver (%d dimensions of %s)",
                        static_cast<int>(code), dims.size(), std::string(Name(dtype))));
  }
  return map;
}

}  // namespace lockstep
