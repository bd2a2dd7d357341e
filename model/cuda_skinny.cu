#include <algorithm>
#include <type_traits>

#include "model/cuda_skinny.h"
#include "model/cuda_skinny_kernel.cuh"
#include "runtime/core/cuda_tensor_map.h"

namespace lockstep {

namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// fn(T(), columns) for a product's type and rows of x.
template <typename Fn>
absl::Status WithKernel(DType dtype, int64_t rows, const Fn& fn) {
  const auto with_columns = [&](auto element) {
    if (rows <= 8) return fn(element, std::integral_constant<int, 8>());
    if (rows <= 16) return fn(element, std::integral_constant<int, 16>());
    if (rows <= 24) return fn(element, std::integral_constant<int, 24>());
    return fn(element, std::integral_constant<int, 32>());
  };
  LOCKSTEP_CHECK(dtype == DType::kBF16 || dtype == DType::kF16);
  return dtype == DType::kBF16 ? with_columns(__nv_bfloat16()) : with_columns(__half());
}

absl::StatusOr<CUtensorMap> WeightMap(const SkinnyProduct& product) {
  const MatrixView& w = product.weight;
  const int64_t row_bytes = w.stride * SizeOf(w.dtype);
  std::vector<TensorMapDim> dims = {{w.cols, 0, kPanelColumns}};
  if (product.gated) {
    // 8 gate rows, then the 8 up rows of the same outputs.
    const int64_t outputs = product.y.cols;
    dims.push_back({8, row_bytes, 8});
    dims.push_back({2, outputs * row_bytes, 2});
    dims.push_back({outputs / 8, 8 * row_bytes, kWgmmaRows / 16});
  } else {
    dims.push_back({w.rows, row_bytes, kWgmmaRows});
  }
  return EncodeTensorMap(w.data, w.dtype, dims, TensorMapSwizzle::k128Bytes);
}

absl::StatusOr<CUtensorMap> XMap(const MatrixView& x, int columns) {
  // The distance of one row from the next is of no matter where there is one.
  const int64_t stride = x.rows == 1 ? CeilDiv(x.cols, 8) * 8 : x.stride;
  return EncodeTensorMap(x.data, x.dtype,
                         {{x.cols, 0, kPanelColumns}, {x.rows, stride * SizeOf(x.dtype), columns}},
                         TensorMapSwizzle::k128Bytes);
}

bool HasKernels(int major, int minor) {
#ifdef LOCKSTEP_SM90A
  return major == 9 && minor == 0;
#else
  return false;
#endif
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSkinny>> CudaSkinny::Create(int num_multiprocessors) {
  int device = 0, major = 0, minor = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (!HasKernels(major, minor)) return std::unique_ptr<CudaSkinny>();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (int64_t rows = 8; rows <= kMaxRows; rows += 8) {
      LOCKSTEP_RETURN_IF_ERROR(WithKernel(dtype, rows, [](auto element, auto columns) {
        constexpr int kColumns = decltype(columns)::value;
        const auto kernel = SkinnyKernel<decltype(element), kColumns>;
        constexpr int kBytes = SkinnyRing<kColumns>::kBytes;
        LOCKSTEP_CUDA(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
        return absl::OkStatus();
      }));
    }
  }
  LOCKSTEP_ASSIGN_OR_RETURN(
      DeviceBuffer parts,
      DeviceBuffer::Create(int64_t{2} * num_multiprocessors * kWgmmaRows * kMaxRows * 4,
                           "parts of products"));
  const int64_t counter_bytes = int64_t{num_multiprocessors} * 4;
  LOCKSTEP_ASSIGN_OR_RETURN(DeviceBuffer counters,
                            DeviceBuffer::Create(counter_bytes, "counters of products"));
  LOCKSTEP_CUDA(cudaMemset(counters.data(), 0, static_cast<size_t>(counter_bytes)));
  LOCKSTEP_CUDA(cudaDeviceSynchronize());
  return std::unique_ptr<CudaSkinny>(
      new CudaSkinny(num_multiprocessors, std::move(parts), std::move(counters)));
}

bool CudaSkinny::Takes(const SkinnyProduct& product) {
  const MatrixView &x = product.x, &w = product.weight, &y = product.y;
  const bool types = (x.dtype == DType::kBF16 || x.dtype == DType::kF16) && w.dtype == x.dtype &&
                     (y.dtype == x.dtype || (y.dtype == DType::kF32 && !product.gated));
  constexpr int64_t kMaxSize = int64_t{1} << 30;  // the kernel's numbers are 32 bits wide
  return types && x.rows >= 1 && x.rows <= kMaxRows && x.cols >= 1 && x.cols < kMaxSize &&
         w.rows < kMaxSize && w.rows / 64 * (x.cols / 64) < kMaxSize && RowsAligned16(x) &&
         RowsAligned16(w) && w.stride % 8 == 0 && (!product.gated || y.cols % 8 == 0);
}

absl::Status CudaSkinny::Run(const SkinnyProduct& product, const SkinnyLaunch& launch) const {
  LOCKSTEP_CHECK(Takes(product));
  const MatrixView &x = product.x, &w = product.weight, &y = product.y;
  LOCKSTEP_CHECK(x.cols == w.cols && y.rows == x.rows);
  LOCKSTEP_CHECK(w.rows == (product.gated ? 2 * y.cols : y.cols));
  if (y.cols == 0) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const CUtensorMap weight_map, WeightMap(product));
  const int64_t num_tiles = CeilDiv(w.rows, kWgmmaRows);
  const int64_t num_chunks = CeilDiv(x.cols, kSkinnyChunkCols);
  const int64_t blocks = std::min<int64_t>(
      std::max(num_multiprocessors_ - launch.spare_multiprocessors, 1), num_tiles * num_chunks);
  return WithKernel(x.dtype, x.rows, [&](auto element, auto columns) -> absl::Status {
    constexpr int kColumns = decltype(columns)::value;
    LOCKSTEP_ASSIGN_OR_RETURN(const CUtensorMap x_map, XMap(x, kColumns));
    const SkinnyParams params = {.weight = weight_map,
                                 .x = x_map,
                                 .bias = product.bias,
                                 .y = y.data,
                                 .y_stride = y.stride,
                                 .parts = parts_.as<float4>(),
                                 .counters = counters_.as<uint32_t>(),
                                 .num_rows = static_cast<int32_t>(x.rows),
                                 .num_outputs = static_cast<int32_t>(y.cols),
                                 .num_tiles = static_cast<int32_t>(num_tiles),
                                 .num_chunks = static_cast<int32_t>(num_chunks),
                                 .gated = product.gated,
                                 .float_out = y.dtype == DType::kF32};
    return LaunchKernel("launch of a product of few rows",
                        SkinnyKernel<decltype(element), kColumns>, blocks, kSkinnyThreads,
                        SkinnyRing<kColumns>::kBytes, {launch.stream, launch.programmatic}, params);
  });
}

}  // namespace lockstep
