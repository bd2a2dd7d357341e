// Sums over ranks beside products, under mpirun with a GPU a rank: layers without attention give
// what they give on one stream, step after step, while ranks lag behind each other at random and
// what a step leaves behind is overwritten.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cmath>

#include "model/cuda_overlap.h"
#include "parallel/nccl_communicator.h"
#include "parallel/peer_windows.h"
#include "tests/model/cuda_spin.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {
namespace {

constexpr int64_t kLayers = 4, kHidden = 512, kMaxTokens = 3000, kMinTokens = 16;
// Sums of more tokens are NCCL's; those of fewer are one-shot up to 2 MiB, then two-shot.
constexpr int64_t kWindowTokens = 2500;
// Of a rank.
constexpr int64_t kQuery = 256, kQkv = kQuery + 2 * 128, kIntermediate = 768;

ModelConfig Config() {
  ModelConfig config;
  config.hidden_size = kHidden;
  config.num_layers = kLayers;
  config.num_query_heads = 8;
  config.num_kv_heads = 4;
  config.head_dim = 64;
  config.intermediate_size = 2 * kIntermediate;
  return config;
}

struct Layer {
  DeviceMatrix input_norm, qkv, qkv_bias, o, post_norm, gate_up, down;
};

class OverlapTest : public testing::Test, public testing::WithParamInterface<DType> {
 protected:
  void SetUp() override {
    if (!GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
    const CudaBinding binding = VALUE_OR_ABORT(BindCudaDevice(*job));
    stream_ = VALUE_OR_ABORT(OwnedCudaStream::Create());
    linear_ = VALUE_OR_ABORT(CudaLinear::Create());
    nccl_ = VALUE_OR_ABORT(NcclCommunicator::Create(*job, binding.device));
    peers_ =
        VALUE_OR_ABORT(PeerWindows::Create(*job, kWindowTokens * kHidden * SizeOf(GetParam())));
    const CudaRankContext rank{
        .stream = stream(), .nccl = nccl_.get(), .peers = peers_.get(), .info = binding.info};
    context_.emplace(CudaContext{stream(), binding.info.num_multiprocessors, *linear_, true});
    const CudaRankSumsOptions options{.dtype = GetParam(),
                                      .hidden_size = kHidden,
                                      .num_layers = kLayers,
                                      .max_tokens = kMaxTokens,
                                      .max_rows = kMaxTokens,
                                      .norm_eps = 1e-5f};
    sums_ = VALUE_OR_ABORT(CudaRankSums::Create(options, rank, observation_.emplace(stream())));
    overlap_ = VALUE_OR_ABORT(CudaOverlap::Create(Config(), kMinTokens, 24, sums_));
    for (int64_t l = 0; l < kLayers; ++l) layers_.push_back(MakeLayer(l));
    final_norm_ = Norm(1000);
    qkv_ = Activations(kQkv);
    attended_ = Activations(kQuery);
    gate_up_ = Activations(2 * kIntermediate);
    activated_ = Activations(kIntermediate);
    std::vector<int32_t> rows(kMaxTokens);
    for (int64_t r = 0; r < kMaxTokens; ++r) rows[r] = static_cast<int32_t>(r);
    rows_ = VALUE_OR_ABORT(DeviceBuffer::Create(kMaxTokens * 4, "rows"));
    OR_ABORT(CopyAsync(rows_.data(), rows.data(), kMaxTokens * 4, stream()));
    OR_ABORT(Synchronize(stream()));
    random_.seed(4711);  // what all ranks do alike
    lagging_.seed(99 + job->rank());
  }
  void TearDown() override {
    if (nccl_ == nullptr) return;
    OR_ABORT(Synchronize(stream()));
    OR_ABORT(overlap_.WaitIdle());
    OR_ABORT(job->Barrier());
    OR_ABORT(peers_->Close(*job));
  }

  CudaStream stream() const { return stream_.get(); }
  const CudaContext& context() const { return *context_; }

  DeviceMatrix Matrix(const std::vector<float>& numbers, int64_t rows, int64_t cols, DType dtype) {
    const int64_t count = rows * cols, bytes = count * SizeOf(dtype);
    std::vector<char> converted(bytes);
    Convert(DType::kF32, numbers.data(), dtype, converted.data(), count);
    DeviceMatrix matrix;
    matrix.storage = VALUE_OR_ABORT(DeviceBuffer::Create(bytes, "a test's matrix"));
    matrix.view = {matrix.storage.data(), dtype, rows, cols, cols};
    OR_ABORT(CopyAsync(matrix.view.data, converted.data(), bytes, stream()));
    OR_ABORT(Synchronize(stream()));
    return matrix;
  }
  // This rank's; products of normed rows are about as large as those.
  DeviceMatrix Weight(int64_t rows, int64_t cols, uint32_t seed) {
    std::vector<float> numbers = Numbers(job->rank(), rows * cols, DType::kF32, seed);
    for (float& number : numbers) number /= std::sqrt(static_cast<float>(cols));
    return Matrix(numbers, rows, cols, GetParam());
  }
  DeviceMatrix Norm(uint32_t seed) {  // the same on all ranks
    std::vector<float> numbers = Numbers(0, kHidden, DType::kF32, seed);
    for (float& number : numbers) number = 1 + 0.1f * number;
    return Matrix(numbers, 1, kHidden, DType::kF32);
  }
  Layer MakeLayer(int64_t l) {
    const uint32_t seed = 100 + 10 * static_cast<uint32_t>(l);
    Layer layer;
    layer.input_norm = Norm(seed);
    layer.qkv = Weight(kQkv, kHidden, seed + 1);
    layer.qkv_bias = Weight(1, kQkv, seed + 2);
    layer.o = Weight(kHidden, kQuery, seed + 3);
    layer.post_norm = Norm(seed + 4);
    layer.gate_up = Weight(2 * kIntermediate, kHidden, seed + 5);
    layer.down = Weight(kHidden, kIntermediate, seed + 6);
    return layer;
  }
  DeviceBuffer Activations(int64_t cols) {
    return VALUE_OR_ABORT(DeviceBuffer::Create(kMaxTokens * cols * SizeOf(GetParam()), "a step's"));
  }
  MatrixView View(const DeviceBuffer& buffer, int64_t rows, int64_t cols) const {
    return {buffer.data(), GetParam(), rows, cols, cols};
  }

  // Now and then this rank, or its GPU, is late.
  void Lag() {
    if (!lags_) return;
    if (lagging_() % 16 == 0) usleep(lagging_() % 200);
    if (lagging_() % 8 == 0) OR_ABORT(SpinOnDevice(lagging_() % 100000, stream()));
  }
  // In attention's place: rows of both slices get what rows of the other one have.
  void Exchange(const MatrixView& qkv, const MatrixView& attended) {
    const int64_t first = qkv.rows / 2;
    const auto copy = [&](Range from, Range to) {
      const MatrixView source = RowsOf(qkv, from), target = RowsOf(attended, to);
      const size_t bytes = static_cast<size_t>(SizeOf(qkv.dtype));
      ASSERT_EQ(
          cudaMemcpy2DAsync(target.data, target.stride * bytes, source.data, source.stride * bytes,
                            target.cols * bytes, target.rows, cudaMemcpyDeviceToDevice, stream()),
          cudaSuccess);
    };
    copy({0, first}, {qkv.rows - first, qkv.rows});
    copy({first, qkv.rows}, {0, qkv.rows - first});
  }
  // Normed rows of the last sum go to `out`, [T, E].
  void Step(const DeviceMatrix& input, int64_t tokens, bool overlaps, void* out);
  void RunLayer(int64_t l, int64_t tokens, bool overlaps);

  std::vector<float> Host(const void* device, int64_t count) {
    std::vector<char> bytes(count * SizeOf(GetParam()));
    OR_ABORT(CopyAsync(bytes.data(), device, std::ssize(bytes), stream()));
    OR_ABORT(Synchronize(stream()));
    std::vector<float> numbers(count);
    Convert(GetParam(), bytes.data(), DType::kF32, numbers.data(), count);
    return numbers;
  }

  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_;
  std::unique_ptr<NcclCommunicator> nccl_;
  std::unique_ptr<PeerWindows> peers_;
  std::optional<CudaContext> context_;
  std::optional<CudaObservation> observation_;  // nobody looks
  CudaRankSums sums_;
  CudaOverlap overlap_;
  std::vector<Layer> layers_;
  DeviceMatrix final_norm_;
  const DeviceMatrix no_bias_;
  DeviceBuffer qkv_, attended_, gate_up_, activated_, rows_;
  std::mt19937 random_, lagging_;
  bool lags_ = false;
};

void OverlapTest::RunLayer(int64_t l, int64_t tokens, bool overlaps) {
  const Layer& layer = layers_[l];
  const int64_t o_sum = 2 * l + 1;
  const MatrixView qkv = View(qkv_, tokens, kQkv), attended = View(attended_, tokens, kQuery);
  const MatrixView gate_up = View(gate_up_, tokens, 2 * kIntermediate);
  const MatrixView activated = View(activated_, tokens, kIntermediate);
  OR_ABORT(overlap_.ProductOfNorm(o_sum - 1, layer.qkv, layer.qkv_bias, qkv, overlaps, context()));
  Lag();
  Exchange(qkv, attended);
  OR_ABORT(overlap_.ProductAndSum(attended, layer.o, no_bias_, o_sum, layer.post_norm, overlaps,
                                  context()));
  Lag();
  OR_ABORT(overlap_.ProductOfNorm(o_sum, layer.gate_up, no_bias_, gate_up, overlaps, context()));
  OR_ABORT(SiluMul(gate_up, activated, context()));
  Lag();
  if (l + 1 < kLayers) {
    OR_ABORT(overlap_.ProductAndSum(activated, layer.down, no_bias_, o_sum + 1,
                                    layers_[l + 1].input_norm, overlaps, context()));
    Lag();
    return;
  }
  OR_ABORT(
      Linear(activated, layer.down.view, nullptr, sums_.Partial(tokens, o_sum + 1), context()));
  OR_ABORT(
      sums_.LastSumAndNorm(tokens, rows_.as<int32_t>(), tokens, final_norm_.values(), context()));
}

void OverlapTest::Step(const DeviceMatrix& input, int64_t tokens, bool overlaps, void* out) {
  const int64_t bytes = tokens * kHidden * SizeOf(GetParam());
  OR_ABORT(CopyAsync(sums_.Partial(tokens, 0).data, input.view.data, bytes, stream()));
  OR_ABORT(sums_.SumAndNorm(tokens, 0, layers_[0].input_norm.values(), context()));
  for (int64_t l = 0; l < kLayers; ++l) RunLayer(l, tokens, overlaps);
  OR_ABORT(CopyAsync(out, sums_.LastNormed(tokens, tokens).data, bytes, stream()));
  // What the next step takes before it has made it is not a number. Nobody reads windows 0 and 1:
  // the ranks have met in the last sum, which had another.
  OR_ABORT(FillBytesAsync(sums_.Partial(tokens, 1).data, 0xff, bytes, stream()));
  OR_ABORT(FillBytesAsync(sums_.Normed(tokens, 0).data, 0xff, bytes, stream()));
  OR_ABORT(FillBytesAsync(sums_.Residual(tokens).data, 0xff, bytes, stream()));
  OR_ABORT(FillBytesAsync(qkv_.data(), 0xff, qkv_.size_bytes(), stream()));
  OR_ABORT(FillBytesAsync(gate_up_.data(), 0xff, gate_up_.size_bytes(), stream()));
}

TEST_P(OverlapTest, StepsGiveWhatOneStreamGives) {
  constexpr int kInputs = 12, kBatch = 8, kNumBatches = 50;
  const int64_t out_bytes = kMaxTokens * kHidden * SizeOf(GetParam());
  const DeviceBuffer outs = VALUE_OR_ABORT(DeviceBuffer::Create(kBatch * out_bytes, "outs"));
  // One-shot twice, two-shot, NCCL: with either type.
  const Range ranges[] = {{kMinTokens, 300},
                          {300, 1024},
                          {2049, kWindowTokens + 1},
                          {kWindowTokens + 1, kMaxTokens + 1}};
  std::vector<DeviceMatrix> inputs;
  std::vector<int64_t> tokens;
  std::vector<std::vector<float>> expected;
  for (uint32_t i = 0; i < kInputs; ++i) {
    const std::vector<float> numbers =
        Numbers(job->rank(), kMaxTokens * kHidden, DType::kF32, 2000 + i);
    inputs.push_back(Matrix(numbers, kMaxTokens, kHidden, GetParam()));
    const Range some = ranges[i % std::size(ranges)];
    tokens.push_back(some.begin + static_cast<int64_t>(random_()) % some.size());
    Step(inputs[i], tokens[i], false, outs.data());
    expected.push_back(Host(outs.data(), tokens[i] * kHidden));
  }
  // Products of other numbers of rows are added in another order; what is wrong is off by about 1.
  const double tolerance = GetParam() == DType::kF32 ? 1e-3 : 0.4;
  double largest = 0;
  lags_ = true;
  for (int batch = 0; batch < kNumBatches; ++batch) {
    std::vector<size_t> made;
    for (int i = 0; i < kBatch; ++i) {
      made.push_back(random_() % kInputs);
      // Steps of one stream in between: what comes before and after is ordered, too.
      const bool overlaps = random_() % 4 != 0;
      Step(inputs[made[i]], tokens[made[i]], overlaps, outs.as<char>() + i * out_bytes);
    }
    for (int i = 0; i < kBatch; ++i) {
      const std::vector<float>& wanted = expected[made[i]];
      const std::vector<float> got = Host(outs.as<char>() + i * out_bytes, std::ssize(wanted));
      for (size_t e = 0; e < wanted.size(); ++e) {
        const double difference = std::abs(double{got[e]} - wanted[e]);
        largest = std::max(largest, difference);
        if (difference <= tolerance) continue;
        ADD_FAILURE() << "rank " << job->rank() << ", batch " << batch << ", step " << i << " of "
                      << tokens[made[i]] << " tokens, row " << e / kHidden << ", column "
                      << e % kHidden << ": " << got[e] << ", not " << wanted[e];
        OR_ABORT(absl::InternalError("wrong sums"));
      }
    }
  }
  if (job->rank() == 0)
    std::printf("%s: differences up to %.2e\n", Name(GetParam()).data(), largest);
}

INSTANTIATE_TEST_SUITE_P(Types, OverlapTest, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
