// Products and operators on the GPU beside what its memory and tensor cores can do.
//
//   cuda_ops_bench [step] [ops] [linear]        default: all
//
// linear  Qwen2.5-7B's products on 1 and 2 GPUs, bfloat16: all by cuBLASLt, and ours where
// CudaLinear
//         prefers it; ours are compared with cuBLASLt's first
// ops     the operators between them
// step    all products and operators of a decode step but attention and sums over ranks, one after
//         the other, with and without programmatic launches, as in linear
//
// Each number is the median of graph launches in which the same work is done many times, each time
// on other weights, all of them together far larger than the L2 cache. The floor is what takes
// longer: weights and activations once through memory at 4.51 TB/s, or the arithmetic at 760
// TFLOP/s (a read and a product measured on an H200).
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "model/cuda_ops.h"

namespace lockstep {
namespace {

constexpr double kReadBytesPerSecond = 4.51e12;
constexpr double kFlopsPerSecond = 760e12;
constexpr int64_t kHidden = 3584, kHeads = 28, kKvHeads = 4, kHeadDim = 128, kInner = 18944;
constexpr int64_t kVocab = 152064, kLayers = 28;

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_ops_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  OrDie(value.status());
  return *std::move(value);
}
void OrDie(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "cuda_ops_bench: %s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
#define CUDA_OR_DIE(call) OrDie(call, #call)

class Bench {
 public:
  Bench() {
    const CudaDeviceInfo info = OrDie(SelectCudaDevice(0));
    stream_ = OrDie(OwnedCudaStream::Create());
    num_multiprocessors_ = info.num_multiprocessors;
    linear_ = OrDie(CudaLinear::Create());
    cublas_ = OrDie(CudaLinear::Create(CudaLinear::kDefaultWorkspaceBytes, false));
    std::printf("%s, %d multiprocessors\n", info.name.c_str(), num_multiprocessors_);
  }

  CudaStream stream() const { return stream_.get(); }
  CudaContext Context(bool programmatic) {
    return {stream(), num_multiprocessors_, *linear_, programmatic};
  }
  // All products by cuBLASLt.
  CudaContext CublasContext(bool programmatic) {
    return {stream(), num_multiprocessors_, *cublas_, programmatic};
  }

  // Random bfloat16 numbers around 0, 64 MB of them over and over.
  DeviceBuffer Random(int64_t bytes, float scale) {
    DeviceBuffer buffer = OrDie(DeviceBuffer::Create(std::max<int64_t>(16, bytes), "operands"));
    const int64_t piece = std::min<int64_t>(buffer.size_bytes(), int64_t{64} << 20);
    std::vector<BF16> numbers(piece / 2 + 1);
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-scale, scale);
    for (BF16& number : numbers) number = ToBF16(uniform(random));
    OrDie(CopyAsync(buffer.data(), numbers.data(), piece, stream()));
    for (int64_t at = piece; at < buffer.size_bytes(); at += piece) {
      const int64_t rest = std::min(piece, buffer.size_bytes() - at);
      OrDie(CopyAsync(buffer.as<char>() + at, buffer.data(), rest, stream()));
    }
    OrDie(Synchronize(stream()));
    return buffer;
  }

  // Seconds of run(0) ... run(count - 1), divided by count: the median of graph launches.
  double Seconds(int count, const std::function<absl::Status(int)>& run) {
    for (int i = 0; i < std::min(count, 2); ++i) OrDie(run(i));
    OrDie(Synchronize(stream()));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_OR_DIE(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) OrDie(run(i));
    CUDA_OR_DIE(cudaStreamEndCapture(stream(), &graph));
    CUDA_OR_DIE(cudaGraphInstantiate(&executable, graph, 0));
    cudaEvent_t begin, end;
    CUDA_OR_DIE(cudaEventCreate(&begin));
    CUDA_OR_DIE(cudaEventCreate(&end));
    for (int i = 0; i < 3; ++i) CUDA_OR_DIE(cudaGraphLaunch(executable, stream()));
    std::vector<float> times;
    for (int i = 0; i < 11; ++i) {
      CUDA_OR_DIE(cudaEventRecord(begin, stream()));
      CUDA_OR_DIE(cudaGraphLaunch(executable, stream()));
      CUDA_OR_DIE(cudaEventRecord(end, stream()));
      OrDie(Synchronize(stream()));
      float ms = 0;
      CUDA_OR_DIE(cudaEventElapsedTime(&ms, begin, end));
      times.push_back(ms);
    }
    CUDA_OR_DIE(cudaEventDestroy(begin));
    CUDA_OR_DIE(cudaEventDestroy(end));
    CUDA_OR_DIE(cudaGraphExecDestroy(executable));
    CUDA_OR_DIE(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e-3 / count;
  }

 private:
  int num_multiprocessors_ = 0;
  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_, cublas_;
};

MatrixView Matrix(void* data, int64_t rows, int64_t cols, DType dtype = DType::kBF16) {
  return {data, dtype, rows, cols, cols};
}

struct Product {
  const char* name;
  int64_t n, k;
  DType out_dtype = DType::kBF16;
  bool has_bias = false;
};

std::vector<Product> ProductsOf(int64_t ranks) {
  return {{"qkv", (kHeads + 2 * kKvHeads) * kHeadDim / ranks, kHidden, DType::kBF16, true},
          {"o", kHidden, kHeads * kHeadDim / ranks},
          {"gate_up", 2 * kInner / ranks, kHidden},
          {"down", kHidden, kInner / ranks},
          {"lm_head", kVocab / ranks, kHidden, DType::kF32}};
}

double FloorSeconds(double bytes, double flops) {
  return std::max(bytes / kReadBytesPerSecond, flops / kFlopsPerSecond);
}

std::vector<float> Download(Bench& bench, const MatrixView& y) {
  std::vector<float> values(y.rows * y.cols);
  OrDie(CopyAsync(values.data(), y.data, y.rows * y.cols * 4, bench.stream()));
  OrDie(Synchronize(bench.stream()));
  return values;
}

// Dies where float32 sums of x * weight^T are not cuBLASLt's. Both add exact products, in other
// orders: float32's rounding makes up to some 1e-5 of their size (root mean square) at K = 18944,
// while a chunk of 128 columns that is left out makes 8e-2.
void CheckSums(Bench& bench, const MatrixView& x, const MatrixView& weight, void* sums) {
  constexpr double kTolerance = 5e-5;
  const MatrixView y = Matrix(sums, x.rows, weight.rows, DType::kF32);
  OrDie(Linear(x, weight, nullptr, y, bench.CublasContext(true)));
  const std::vector<float> expected = Download(bench, y);
  OrDie(FillBytesAsync(y.data, 0xff, y.rows * y.cols * 4, bench.stream()));
  OrDie(Linear(x, weight, nullptr, y, bench.Context(true)));
  const std::vector<float> values = Download(bench, y);
  double squares = 0, differences = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double difference = double{values[i]} - expected[i];
    squares += double{expected[i]} * expected[i];
    differences += difference * difference;
  }
  const double error = std::sqrt(differences / squares);
  if (error < kTolerance) return;  // false for NaN
  std::printf("WRONG: [%d, %d] x [%d, %d]: error %g\n", static_cast<int>(x.rows),
              static_cast<int>(x.cols), static_cast<int>(weight.rows), static_cast<int>(x.cols),
              error);
  std::exit(1);
}

void BenchProduct(Bench& bench, const Product& product, int64_t ranks, const DeviceBuffer& weights,
                  const DeviceBuffer& xs, const DeviceBuffer& ys, const DeviceBuffer& biases) {
  const int64_t weight_bytes = product.n * product.k * 2;
  const int64_t copies = weights.size_bytes() / weight_bytes;
  const void* bias = product.has_bias ? biases.data() : nullptr;
  for (const int64_t rows : {1, 2, 8, 16, 32, 64, 256, 8192}) {
    const int64_t y_bytes = rows * product.n * SizeOf(product.out_dtype);
    if (y_bytes > ys.size_bytes()) continue;  // nobody wants all logits of a long prompt at once
    const MatrixView x = Matrix(xs.data(), rows, product.k);
    const MatrixView y = Matrix(ys.data(), rows, product.n, product.out_dtype);
    const auto weight = [&](int i) {
      return Matrix(weights.as<char>() + i % copies * weight_bytes, product.n, product.k);
    };
    const double floor =
        FloorSeconds(static_cast<double>(weight_bytes + rows * product.k * 2 + y_bytes),
                     2.0 * static_cast<double>(rows * product.n) * static_cast<double>(product.k));
    const int count = static_cast<int>(std::clamp(2e-3 / floor, 3.0, 200.0));
    if (rows <= 64) CheckSums(bench, x, weight(0), ys.data());
    std::printf("%-8s tp%d %6d x %5d, T %4d, floor %8.1f us", product.name, static_cast<int>(ranks),
                static_cast<int>(product.n), static_cast<int>(product.k), static_cast<int>(rows),
                floor * 1e6);
    for (const CudaContext& context : {bench.CublasContext(true), bench.Context(true)}) {
      const double time =
          bench.Seconds(count, [&](int i) { return Linear(x, weight(i), bias, y, context); });
      std::printf(" | %8.1f us %3.0f%%", time * 1e6, 100 * floor / time);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

void BenchLinear(Bench& bench) {
  const DeviceBuffer weights = bench.Random(int64_t{4} << 30, 0.03f);
  const DeviceBuffer xs = bench.Random(8192 * kInner * 2, 1);
  const DeviceBuffer biases = bench.Random(kVocab * 4, 1);
  const DeviceBuffer ys = bench.Random(int64_t{1} << 30, 1);
  std::printf("all by cuBLASLt | as CudaLinear chooses\n");
  for (const int64_t ranks : {1, 2}) {
    for (const Product& product : ProductsOf(ranks)) {
      BenchProduct(bench, product, ranks, weights, xs, ys, biases);
    }
  }
}

// Buffers are reused only after some hundred MB, or as much as there is.
class Rotation {
 public:
  Rotation(Bench& bench, int64_t bytes, float scale)
      : bytes_((bytes + 255) / 256 * 256),
        copies_(std::clamp<int64_t>((int64_t{512} << 20) / bytes_, 1, 64)),
        buffer_(bench.Random(bytes_ * copies_, scale)) {}
  void* at(int i) const { return buffer_.as<char>() + i % copies_ * bytes_; }

 private:
  int64_t bytes_, copies_;
  DeviceBuffer buffer_;
};

// A layer's cache with a slot for each of a step's tokens.
class SlotsOfStep {
 public:
  SlotsOfStep(int64_t rows, int64_t kv_heads, CudaStream stream)
      : rows_(rows), kv_heads_(kv_heads) {
    std::vector<int64_t> slots(rows);
    std::iota(slots.begin(), slots.end(), 0);
    const auto allocate = [](int64_t bytes) {
      return OrDie(DeviceBuffer::Create(bytes, "slots of a step"));
    };
    slots_ = allocate(rows * 8);
    OrDie(CopyAsync(slots_.data(), slots.data(), rows * 8, stream));
    OrDie(Synchronize(stream));
    const int64_t bytes = NumBlocks() * kBlockSize * kv_heads * kHeadDim * 2;
    keys_ = allocate(bytes);
    values_ = allocate(bytes);
  }

  const int64_t* get() const { return slots_.as<int64_t>(); }
  KvCacheView cache() const {
    return {.keys = keys_.data(),
            .values = values_.data(),
            .dtype = DType::kBF16,
            .num_blocks = NumBlocks(),
            .num_kv_heads = kv_heads_,
            .block_size = kBlockSize,
            .head_dim = kHeadDim};
  }

 private:
  static constexpr int64_t kBlockSize = 16;
  int64_t NumBlocks() const { return (rows_ + kBlockSize - 1) / kBlockSize; }

  int64_t rows_, kv_heads_;
  DeviceBuffer slots_, keys_, values_;
};

void BenchOps(Bench& bench) {
  const DeviceBuffer norm_weight = bench.Random(kHidden * 4, 1);
  for (const int64_t rows : {1, 16, 256, 8192}) {
    const Rotation hidden(bench, rows * kHidden * 2, 1), delta(bench, rows * kHidden * 2, 1);
    const Rotation normed(bench, rows * kHidden * 2, 1);
    const int64_t qkv_cols = (kHeads + 2 * kKvHeads) * kHeadDim;
    const Rotation qkv(bench, rows * qkv_cols * 2, 1);
    const Rotation gate_up(bench, rows * 2 * kInner * 2, 1), inner(bench, rows * kInner * 2, 1);
    const DeviceBuffer angles = bench.Random(rows * kHeadDim / 2 * 4, 1);
    const DeviceBuffer table = bench.Random(kVocab * kHidden * 2, 1);
    std::vector<int32_t> tokens(rows);
    std::mt19937 random(1);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
    const DeviceBuffer ids = OrDie(DeviceBuffer::Create(rows * 4, "ids"));
    OrDie(CopyAsync(ids.data(), tokens.data(), rows * 4, bench.stream()));
    OrDie(Synchronize(bench.stream()));
    const auto measure = [&](const char* name, int64_t bytes, auto run) {
      const double floor = FloorSeconds(static_cast<double>(bytes), 0);
      const int count = static_cast<int>(std::clamp(1e-3 / floor, 3.0, 100.0));
      std::printf("%-14s T %4d, floor %7.1f us", name, static_cast<int>(rows), floor * 1e6);
      for (const bool programmatic : {false, true}) {
        const CudaContext context = bench.Context(programmatic);
        const double time = bench.Seconds(count, [&](int i) { return run(i, context); });
        std::printf(" | %s %7.1f us %3.0f%%", programmatic ? "programmatic" : "plain", time * 1e6,
                    100 * floor / time);
      }
      std::printf("\n");
    };
    const float* weight = norm_weight.as<const float>();
    const SlotsOfStep slots(rows, kKvHeads, bench.stream());
    const RopeTable rope = {angles.as<const float>(), angles.as<const float>(), nullptr, kHeadDim};
    measure("AddRmsNorm", rows * kHidden * 2 * 4, [&](int i, const CudaContext& context) {
      return AddRmsNorm(Matrix(hidden.at(i), rows, kHidden), Matrix(delta.at(i), rows, kHidden),
                        weight, 1e-6f, Matrix(normed.at(i), rows, kHidden), context);
    });
    // Queries in place, keys and values to the cache.
    const int64_t rope_bytes = rows * (2 * kHeads + 4 * kKvHeads) * kHeadDim * 2;
    measure("NormRope", rope_bytes, [&](int i, const CudaContext& context) {
      return NormRopeWriteKv(Matrix(qkv.at(i), rows, qkv_cols), kHeads, {}, rope, slots.get(),
                             slots.cache(), context);
    });
    measure("with a norm", rope_bytes, [&](int i, const CudaContext& context) {
      return NormRopeWriteKv(Matrix(qkv.at(i), rows, qkv_cols), kHeads, {weight, weight, 1e-6f},
                             rope, slots.get(), slots.cache(), context);
    });
    measure("SiluMul", rows * kInner * 2 * 3, [&](int i, const CudaContext& context) {
      return SiluMul(Matrix(gate_up.at(i), rows, 2 * kInner), Matrix(inner.at(i), rows, kInner),
                     context);
    });
    measure("GatherRows", rows * kHidden * 2 * 2, [&](int i, const CudaContext& context) {
      return GatherRows(ids.as<const int32_t>(), {0, kVocab}, Matrix(table.data(), kVocab, kHidden),
                        Matrix(hidden.at(i), rows, kHidden), context);
    });
  }
}

// The products and operators of a decode step, weights read from beginning to end.
class Step {
 public:
  Step(Bench& bench, int64_t ranks, int64_t rows)
      : ranks_(ranks),
        rows_(rows),
        products_(ProductsOf(ranks)),
        slots_(rows, kKvHeads / ranks, bench.stream()) {
    int64_t layer_bytes = 0;
    for (int i = 0; i < 4; ++i) layer_bytes += products_[i].n * products_[i].k * 2;
    weight_bytes_ = kLayers * layer_bytes + products_[4].n * products_[4].k * 2;
    weights_ = bench.Random(weight_bytes_, 0.03f);
    const auto make = [&](int64_t bytes) { return bench.Random(bytes, 1); };
    hidden_ = make(rows * kHidden * 2);
    normed_ = make(rows * kHidden * 2);
    delta_ = make(rows * kHidden * 2);
    qkv_ = make(rows * products_[0].n * 2);
    gate_up_ = make(rows * products_[2].n * 2);
    inner_ = make(rows * products_[3].k * 2);
    logits_ = make(rows * products_[4].n * 4);
    floats_ = make(std::max(kHidden, rows * kHeadDim) * 4);
  }
  int64_t weight_bytes() const { return weight_bytes_; }

  absl::Status Run(const CudaContext& context) {
    next_ = weights_.as<char>();
    const int64_t heads = kHeads / ranks_;
    const float* floats = floats_.as<const float>();
    const MatrixView hidden = Matrix(hidden_.data(), rows_, kHidden);
    const MatrixView normed = Matrix(normed_.data(), rows_, kHidden);
    const MatrixView delta = Matrix(delta_.data(), rows_, kHidden);
    const MatrixView qkv = Matrix(qkv_.data(), rows_, products_[0].n);
    const MatrixView gate_up = Matrix(gate_up_.data(), rows_, products_[2].n);
    const MatrixView inner = Matrix(inner_.data(), rows_, products_[3].k);
    MatrixView queries = qkv;  // in place of what attention makes of them
    queries.cols = products_[1].k;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      LOCKSTEP_RETURN_IF_ERROR(Multiply(0, normed, qkv, context));
      LOCKSTEP_RETURN_IF_ERROR(NormRopeWriteKv(qkv, heads, {}, {floats, floats, nullptr, kHeadDim},
                                               slots_.get(), slots_.cache(), context));
      LOCKSTEP_RETURN_IF_ERROR(Multiply(1, queries, delta, context));
      LOCKSTEP_RETURN_IF_ERROR(AddRmsNorm(hidden, delta, floats, 1e-6f, normed, context));
      LOCKSTEP_RETURN_IF_ERROR(SwiGlu(normed, gate_up, inner, context));
      LOCKSTEP_RETURN_IF_ERROR(Multiply(3, inner, delta, context));
      LOCKSTEP_RETURN_IF_ERROR(AddRmsNorm(hidden, delta, floats, 1e-6f, normed, context));
    }
    return Multiply(4, normed, Matrix(logits_.data(), rows_, products_[4].n, DType::kF32), context);
  }

 private:
  MatrixView NextWeight(int product) {
    const MatrixView weight = Matrix(next_, products_[product].n, products_[product].k);
    next_ += weight.rows * weight.cols * 2;
    return weight;
  }
  absl::Status Multiply(int product, const MatrixView& x, const MatrixView& y,
                        const CudaContext& context) {
    const void* bias = products_[product].has_bias ? floats_.data() : nullptr;
    return Linear(x, NextWeight(product), bias, y, context);
  }
  // As the decoder.
  absl::Status SwiGlu(const MatrixView& x, const MatrixView& gate_up, const MatrixView& y,
                      const CudaContext& context) {
    const MatrixView weight = NextWeight(2);
    if (context.linear.TakesSwiGlu(x, weight, y)) {
      return LinearSwiGlu(x, weight, nullptr, y, context);
    }
    LOCKSTEP_RETURN_IF_ERROR(Linear(x, weight, nullptr, gate_up, context));
    return SiluMul(gate_up, y, context);
  }

  int64_t ranks_, rows_;
  std::vector<Product> products_;
  SlotsOfStep slots_;
  int64_t weight_bytes_ = 0;
  char* next_ = nullptr;
  DeviceBuffer weights_, hidden_, normed_, delta_, qkv_, gate_up_, inner_, logits_, floats_;
};

void BenchStep(Bench& bench) {
  std::printf("plain, programmatic: all by cuBLASLt | as CudaLinear chooses\n");
  for (const int64_t ranks : {1, 2}) {
    for (const int64_t rows : {1, 2, 8, 16, 32, 64}) {
      Step step(bench, ranks, rows);
      const double floor = FloorSeconds(static_cast<double>(step.weight_bytes()), 0);
      std::printf("step tp%d, T %2d, floor %.3f ms", static_cast<int>(ranks),
                  static_cast<int>(rows), floor * 1e3);
      for (const bool cublas : {true, false}) {
        std::printf(" |");
        for (const bool programmatic : {false, true}) {
          const CudaContext context =
              cublas ? bench.CublasContext(programmatic) : bench.Context(programmatic);
          const double time = bench.Seconds(1, [&](int) { return step.Run(context); });
          std::printf(" %.3f ms %.0f%%", time * 1e3, 100 * floor / time);
        }
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

int Main(int argc, char** argv) {
  const struct {
    const char* name;
    void (*run)(Bench&);
  } parts[] = {{"step", BenchStep}, {"ops", BenchOps}, {"linear", BenchLinear}};
  for (int i = 1; i < argc; ++i) {
    if (std::none_of(std::begin(parts), std::end(parts),
                     [&](const auto& part) { return std::strcmp(part.name, argv[i]) == 0; })) {
      std::fprintf(stderr, "usage: cuda_ops_bench [step] [ops] [linear]\n");
      return 2;
    }
  }
  Bench bench;
  for (const auto& part : parts) {
    const bool named = std::any_of(
        argv + 1, argv + argc, [&](const char* name) { return std::strcmp(name, part.name) == 0; });
    if (named || argc == 1) part.run(bench);
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }
