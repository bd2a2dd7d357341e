// A decode step of one request in one kernel: Qwen2.5-7B's layers on one GPU, and one rank's part
// of them on two (without the other rank).
//
//   cuda_row_step_bench
//
// Medians of graph launches. The floor is the read of the weights and of the context's keys and
// values at 4.51 TB/s. Context 0 is a step without attention.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "model/cuda_graph.h"
#include "model/cuda_row_step.h"

namespace lockstep {
namespace {

constexpr double kReadBytesPerSecond = 4.51e12;
constexpr int64_t kHidden = 3584, kHeads = 28, kKvHeads = 4, kHeadDim = 128, kInner = 18944;
constexpr int64_t kVocab = 152064, kLayers = 28, kBlockSize = 16, kMaxLength = 32768;

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_row_step_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  OrDie(value.status());
  return *std::move(value);
}

class Bench {
 public:
  Bench() : info_(OrDie(SelectCudaDevice(0))), stream_(OrDie(OwnedCudaStream::Create())) {
    std::printf("%s\n", info_.name.c_str());
    weights_ = Random(int64_t{15} << 30, 0.02f);
    cache_ = Random(2 * kLayers * kKvHeads * kMaxLength * kHeadDim * 2, 1);
    floats_ = Random(int64_t{1} << 20, 1);
    logits_ = Random(kVocab * 4, 1);
    std::vector<int32_t> table(kMaxLength / kBlockSize);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    table_ = Array(table);
    zero_ = Array(std::vector<int64_t>{0});
  }

  double Milliseconds(int64_t ranks, int64_t layers, int64_t context, int in_flight) {
    RowStepModel model{.dtype = DType::kBF16,
                       .num_layers = layers,
                       .hidden_size = kHidden,
                       .head_dim = kHeadDim,
                       .kv_groups = {},
                       .intermediate = kInner / ranks,
                       .vocab = kVocab / ranks,
                       .norm_eps = 1e-6f,
                       .attention_scale = 0.08f,
                       .block_size = kBlockSize,
                       .max_blocks = kMaxLength / kBlockSize,
                       .final_norm = floats_.as<float>(),
                       .layers = {},
                       .num_in_flight = in_flight};
    const int64_t group = kHeads / kKvHeads;
    for (int64_t h = 0; h < kKvHeads / ranks; ++h) {
      model.kv_groups.push_back({h * group, (h + 1) * group});
    }
    int64_t at = 0;
    const auto take = [&](int64_t rows, int64_t cols) {
      return weights_.as<char>() + std::exchange(at, at + rows * cols * 2);
    };
    std::vector<KvCacheView> caches;
    for (int64_t l = 0; l < layers; ++l) {
      RowStepLayer layer;
      layer.input_norm = layer.post_attention_norm = floats_.as<float>();
      layer.qkv = take((kHeads + 2 * kKvHeads) * kHeadDim / ranks, kHidden);
      layer.qkv_bias = floats_.data();
      layer.o = take(kHidden, kHeads * kHeadDim / ranks);
      layer.gate_up = take(2 * kInner / ranks, kHidden);
      layer.down = take(kHidden, kInner / ranks);
      model.layers.push_back(layer);
      const int64_t bytes = kKvHeads * kMaxLength * kHeadDim * 2;
      caches.push_back({.keys = cache_.as<char>() + 2 * l * bytes,
                        .values = cache_.as<char>() + (2 * l + 1) * bytes,
                        .dtype = DType::kBF16,
                        .num_blocks = kMaxLength / kBlockSize,
                        .num_kv_heads = kKvHeads / ranks,
                        .block_size = kBlockSize,
                        .head_dim = kHeadDim});
    }
    model.head = take(kVocab / ranks, kHidden);
    floor_seconds_ = (static_cast<double>(at) +
                      static_cast<double>(layers * context * kKvHeads / ranks * kHeadDim * 4)) /
                     kReadBytesPerSecond;
    RowStep step = OrDie(RowStep::Create(model, nullptr, info_.num_multiprocessors, stream_.get()));
    OrDie(step.SetCaches(caches, stream_.get()));
    const DeviceBuffer seq_len = Array(std::vector<int32_t>{static_cast<int32_t>(context)});
    const DeviceBuffer slot = Array(std::vector<int64_t>{context - 1});
    const RowStepInputs inputs{
        .hidden = floats_.data(),
        .rope = {floats_.as<float>(), floats_.as<float>(), zero_.as<int32_t>(), kHeadDim},
        .seq_len = seq_len.as<int32_t>(),
        .block_tables = table_.as<int32_t>(),
        .table_row = zero_.as<int32_t>(),
        .slot = slot.as<int64_t>(),
        .logits = logits_.as<float>()};
    return Measure([&] { return step.Launch(inputs, stream_.get()); });
  }
  double floor_ms() const { return floor_seconds_ * 1e3; }

 private:
  // 64 MB of random bfloat16 over and over.
  DeviceBuffer Random(int64_t bytes, float scale) {
    DeviceBuffer buffer = OrDie(DeviceBuffer::Create(bytes, "operands"));
    const int64_t piece = std::min<int64_t>(bytes, int64_t{64} << 20);
    std::vector<BF16> numbers(piece / 2 + 1);
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-scale, scale);
    for (BF16& number : numbers) number = ToBF16(uniform(random));
    OrDie(CopyAsync(buffer.data(), numbers.data(), piece, stream_.get()));
    for (int64_t at = piece; at < bytes; at += piece) {
      OrDie(CopyAsync(buffer.as<char>() + at, buffer.data(), std::min(piece, bytes - at),
                      stream_.get()));
    }
    OrDie(Synchronize(stream_.get()));
    return buffer;
  }
  template <typename T>
  DeviceBuffer Array(const std::vector<T>& values) {
    const int64_t bytes = std::ssize(values) * static_cast<int64_t>(sizeof(T));
    DeviceBuffer buffer = OrDie(DeviceBuffer::Create(bytes, "indices"));
    OrDie(CopyAsync(buffer.data(), values.data(), bytes, stream_.get()));
    OrDie(Synchronize(stream_.get()));
    return buffer;
  }
  template <typename Launch>
  double Measure(Launch launch) {
    CudaGraph graph;
    OrDie(launch());
    OrDie(graph.Capture(stream_.get(), launch));
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    std::vector<float> times;
    for (int i = 0; i < 15; ++i) {
      cudaEventRecord(begin, stream_.get());
      OrDie(graph.Replay(stream_.get()));
      cudaEventRecord(end, stream_.get());
      OrDie(Synchronize(stream_.get()));
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 3) times.push_back(ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  CudaDeviceInfo info_;
  OwnedCudaStream stream_;
  DeviceBuffer weights_, cache_, floats_, logits_, table_, zero_;
  double floor_seconds_ = 0;
};

int Main() {
  Bench bench;
  for (const int64_t ranks : {1, 2}) {
    for (const auto& [layers, context] : {std::pair<int64_t, int64_t>{1, 0},
                                          {kLayers, 0},
                                          {kLayers, 512},
                                          {kLayers, 4096},
                                          {kLayers, 32768}}) {
      std::printf("part of %d, %2d layers, context %5d:", static_cast<int>(ranks),
                  static_cast<int>(layers), static_cast<int>(context));
      for (const int in_flight : {1, 2, 3, 4}) {
        const double ms = bench.Milliseconds(ranks, layers, context, in_flight);
        std::printf(" | %d: %.3f ms %3.0f%%", in_flight, ms, 100 * bench.floor_ms() / ms);
      }
      std::printf(" | floor %.3f ms\n", bench.floor_ms());
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main() { return lockstep::Main(); }
