#include "model/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "model/linear_kernels.h"
#include "runtime/core/status.h"

namespace lockstep {

namespace {

// std::ref: a std::function made from a large lambda would allocate.
template <typename Fn>
void ParallelFor(const OpContext& context, int64_t count, int64_t grain, const Fn& fn) {
  context.threads.ParallelFor(count, grain, std::cref(fn));
}

const LinearKernels& KernelsOf(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx2:
      return kLinearAvx2;
    case CpuIsa::kAvx512:
      return kLinearAvx512;
    case CpuIsa::kAvx512Bf16:
      return kLinearAvx512Bf16;
    case CpuIsa::kPortable:
      break;
  }
  return kLinearPortable;
}

// Below this many elements handing out the work costs more than it saves.
constexpr int64_t kMinParallelElements = 16384;

// x rounded to bfloat16 in the workspace, rows of an even number of elements.
void RoundRows(const MatrixView& x, int64_t stride, const LinearKernels& kernels,
               const OpContext& context) {
  const int64_t row_bytes = stride * kernels.rounded_bytes;
  const int64_t used_bytes = x.cols * kernels.rounded_bytes;
  char* out = context.workspace.as<char>();
  const auto round = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels.round(x.row<const float>(t), x.cols, out + t * row_bytes);
      std::memset(out + t * row_bytes + used_bytes, 0, row_bytes - used_bytes);
    }
  };
  ParallelFor(context, x.rows, std::max<int64_t>(1, kMinParallelElements / x.cols), round);
}

bool IsF32(const MatrixView& m) { return m.dtype == DType::kF32; }

void NormRow(const float* x, const float* weight, float eps, int64_t n, float* out) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) sums[l] += static_cast<double>(x[i + l]) * x[i + l];
  }
  for (int l = 0; i < n; ++i, ++l) sums[l] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (double lane : sums) sum += lane;
  const float scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + eps));
  for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

}  // namespace

int64_t LinearWorkspaceBytes(int64_t rows, int64_t cols, DType weight_dtype, CpuIsa isa) {
  if (weight_dtype == DType::kF32) return 0;
  return rows * 2 * PackedSteps(cols, weight_dtype) * KernelsOf(isa).rounded_bytes;
}

void Linear(const MatrixView& x, const PackedMatrix& weight, const float* bias, const MatrixView& y,
            const OpContext& context) {
  LOCKSTEP_CHECK(IsF32(x) && IsF32(y));
  LOCKSTEP_CHECK(x.cols == weight.cols && y.cols == weight.rows && x.rows == y.rows);
  LOCKSTEP_CHECK(x.cols > 0);
  if (x.rows == 0) return;
  const LinearKernels& kernels = KernelsOf(context.isa);
  const bool f32 = weight.dtype == DType::kF32;
  const LinearKernel& kernel = f32 ? kernels.f32 : kernels.bf16;
  LinearArgs args = {x.data,
                     x.stride,
                     weight.data,
                     bias,
                     static_cast<float*>(y.data),
                     y.stride,
                     PackedSteps(weight.cols, weight.dtype)};
  if (!f32) {
    LOCKSTEP_CHECK(context.workspace.size_bytes() >=
                   LinearWorkspaceBytes(x.rows, x.cols, weight.dtype, context.isa));
    args.x = context.workspace.data();
    args.x_stride = 2 * args.steps;
    RoundRows(x, args.x_stride, kernels, context);
  }
  // The unit of work is a block of rows times columns that are computed together. Units of the same
  // rows follow each other, so a thread's units share what is read of x.
  const int64_t row_blocks = (x.rows + kLinearRowBlock - 1) / kLinearRowBlock;
  const int64_t columns = kernel.columns_at_once(std::min(x.rows, kLinearRowBlock));
  const int64_t column_blocks = (weight.rows + columns - 1) / columns;
  const auto run = [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / column_blocks * kLinearRowBlock;
      const int64_t first = begin % column_blocks;
      const int64_t last = std::min(column_blocks, first + (end - begin));
      kernel.run(args, {row, std::min(x.rows, row + kLinearRowBlock)},
                 {first * columns, std::min(weight.rows, last * columns)});
      begin += last - first;
    }
  };
  ParallelFor(context, row_blocks * column_blocks, 1, run);
}

void GatherRows(std::span<const int32_t> ids, Range vocab, const PackedMatrix& table,
                const MatrixView& out, const OpContext& context) {
  LOCKSTEP_CHECK(static_cast<int64_t>(ids.size()) == out.rows && table.cols == out.cols);
  LOCKSTEP_CHECK(table.rows == vocab.size() && IsF32(out));
  const auto gather = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (vocab.begin <= ids[t] && ids[t] < vocab.end) {
        UnpackRow(table, ids[t] - vocab.begin, out.row<float>(t));
      } else {
        std::memset(out.row<float>(t), 0, out.cols * sizeof(float));
      }
    }
  };
  ParallelFor(context, out.rows, 8, gather);
}

void RmsNorm(const MatrixView& x, const float* weight, float eps, const MatrixView& out,
             const OpContext& context) {
  LOCKSTEP_CHECK(x.rows == out.rows && x.cols == out.cols && IsF32(x) && IsF32(out));
  const auto norm = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      NormRow(x.row<const float>(t), weight, eps, x.cols, out.row<float>(t));
    }
  };
  ParallelFor(context, x.rows, 1, norm);
}

void AddRmsNorm(const MatrixView& residual, const MatrixView& delta, const float* weight, float eps,
                const MatrixView& out, const OpContext& context) {
  LOCKSTEP_CHECK(residual.rows == out.rows && residual.cols == out.cols);
  LOCKSTEP_CHECK(residual.rows == delta.rows && residual.cols == delta.cols);
  const auto norm = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* sum = residual.row<float>(t);
      const float* add = delta.row<const float>(t);
      for (int64_t i = 0; i < out.cols; ++i) sum[i] += add[i];
      NormRow(sum, weight, eps, out.cols, out.row<float>(t));
    }
  };
  ParallelFor(context, out.rows, 1, norm);
}

void AddRmsNormRows(const MatrixView& residual, const MatrixView& delta,
                    std::span<const int32_t> rows, const float* weight, float eps,
                    const MatrixView& out, const OpContext& context) {
  LOCKSTEP_CHECK(static_cast<int64_t>(rows.size()) == out.rows && residual.cols == out.cols);
  const auto norm = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* a = residual.row<const float>(rows[r]);
      const float* b = delta.row<const float>(rows[r]);
      float* sum = out.row<float>(r);
      for (int64_t i = 0; i < out.cols; ++i) sum[i] = a[i] + b[i];
      NormRow(sum, weight, eps, out.cols, sum);
    }
  };
  ParallelFor(context, out.rows, 1, norm);
}

void RmsNormHeads(const MatrixView& x, int64_t head_dim, const float* weight, float eps,
                  const OpContext& context) {
  LOCKSTEP_CHECK(x.cols % head_dim == 0 && IsF32(x));
  const auto norm = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (float* head = x.row<float>(t); head < x.row<float>(t) + x.cols; head += head_dim) {
        NormRow(head, weight, eps, head_dim, head);
      }
    }
  };
  ParallelFor(context, x.rows, 1, norm);
}

void ApplyRope(const MatrixView& x, int64_t head_dim, int64_t rotary_dim, const float* cos,
               const float* sin, const OpContext& context) {
  LOCKSTEP_CHECK(x.cols % head_dim == 0 && rotary_dim <= head_dim && IsF32(x));
  const int64_t half = rotary_dim / 2;
  const auto rotate = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* c = cos + t * half;
      const float* s = sin + t * half;
      for (float* head = x.row<float>(t); head < x.row<float>(t) + x.cols; head += head_dim) {
        for (int64_t i = 0; i < half; ++i) {
          const float a = head[i];
          const float b = head[i + half];
          head[i] = a * c[i] - b * s[i];
          head[i + half] = b * c[i] + a * s[i];
        }
      }
    }
  };
  ParallelFor(context, x.rows, 1, rotate);
}

void SiluMul(const MatrixView& gate_up, const MatrixView& out, const OpContext& context) {
  LOCKSTEP_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows);
  const LinearKernels& kernels = KernelsOf(context.isa);
  const auto silu = [&](int64_t begin, int64_t end) {
    while (begin < end) {  // [begin, end) of the T * F elements, a row's part at a time
      const int64_t t = begin / out.cols;
      const int64_t first = begin % out.cols;
      const int64_t last = std::min(out.cols, first + (end - begin));
      const float* gate = gate_up.row<const float>(t);
      const float* up = gate + out.cols;
      kernels.silu_mul(gate + first, up + first, last - first, out.row<float>(t) + first);
      begin += last - first;
    }
  };
  const int64_t count = out.rows * out.cols;
  ParallelFor(context, count, count < kMinParallelElements / 4 ? count : 512, silu);
}

}  // namespace lockstep
