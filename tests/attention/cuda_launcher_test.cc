// The CUDA launchers as the model uses them: arrays that stay on the device, padded batches,
// graphs, fused rows. Skipped where there is no device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "attention/reference_backend.h"
#include "runtime/core/cuda_errors.h"
#include "tests/attention/cuda_test_device.h"

namespace lockstep {
namespace {

constexpr int64_t kBlockSize = 16;
constexpr int64_t kBlocks = 400;
constexpr int64_t kMaxBlocks = 120;
constexpr int64_t kMaxRequests = 8;
constexpr int64_t kMaxTokens = 300;
constexpr DType kDType = DType::kBF16;

// Rows of a step as the engine lays them out; blocks are drawn at random, all of them hold data.
struct Step {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> tables;      // [kMaxRequests, kMaxBlocks]
  std::vector<int32_t> table_rows;  // another order than the requests'
  std::vector<int64_t> slots;
  std::vector<float> qkv;  // [T, (Hq + 2 Hkv) * D], rounded to kDType

  int64_t num_tokens() const { return std::ssize(slots); }
};

class CudaLauncherTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no CUDA device";
    ASSERT_TRUE(SelectCudaDevice(0).ok());
    auto stream = OwnedCudaStream::Create();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
    const int64_t elements = kBlocks * 2 * kBlockSize * kDim;
    for (std::vector<char>* cache : {&keys_, &values_}) {
      const std::vector<float> floats = Random(elements);
      cache->resize(elements * SizeOf(kDType));
      Convert(DType::kF32, floats.data(), kDType, cache->data(), elements);
    }
    device_keys_ = ToDevice(keys_);
    device_values_ = ToDevice(values_);
    workspace_ = MakeWorkspace(false);
    auto layer = CudaAttentionLayer::Create(geometry_, kDType, kDType, *DefaultCudaPrefill(kDType));
    ASSERT_TRUE(layer.ok()) << layer.status();
    layer_ = *std::move(layer);
    query_start_loc_ = PoisonedDevice((kMaxRequests + 1) * 4);
    seq_lens_ = PoisonedDevice(kMaxRequests * 4);
    tables_ = PoisonedDevice(kMaxRequests * kMaxBlocks * 4);
    table_rows_ = PoisonedDevice(kMaxRequests * 4);
    slots_ = PoisonedDevice(kMaxTokens * 8);
    qkv_ = PoisonedDevice(kMaxTokens * kQkvWidth * 2);
    out_ = PoisonedDevice(kMaxTokens * kOutStride * 2);
  }
  void TearDown() override {
    if (stream_.get() == nullptr) return;
    EXPECT_TRUE(Synchronize(stream_.get()).ok());
  }

  CudaAttentionWorkspace MakeWorkspace(bool programmatic, int64_t window = 0) {
    auto workspace = CudaAttentionWorkspace::Create({.max_num_requests = kMaxRequests,
                                                     .max_num_tokens = kMaxTokens,
                                                     .max_model_len = kMaxBlocks * kBlockSize,
                                                     .num_query_heads = geometry_.num_query_heads,
                                                     .num_kv_heads = 2,
                                                     .head_dim = kDim,
                                                     .sliding_windows = {window},
                                                     .programmatic_launch = programmatic},
                                                    stream_.get());
    LOCKSTEP_CHECK(workspace.ok());
    return *std::move(workspace);
  }

  std::vector<float> Random(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(rng_);
    return RoundedTo(values, kDType);
  }

  Step MakeStep(const std::vector<RequestShape>& requests) {
    Step step;
    step.tables.resize(kMaxRequests * kMaxBlocks);
    std::vector<int32_t> blocks(kBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), rng_);
    for (size_t b = 0; b < requests.size(); ++b) {
      const int32_t row = static_cast<int32_t>(kMaxRequests - 1 - b);
      step.table_rows.push_back(row);
      const int64_t count = (requests[b].seq_len + kBlockSize - 1) / kBlockSize;
      LOCKSTEP_CHECK(count <= std::ssize(blocks));
      std::copy(blocks.end() - count, blocks.end(), step.tables.begin() + row * kMaxBlocks);
      blocks.resize(blocks.size() - count);
      step.seq_lens.push_back(static_cast<int32_t>(requests[b].seq_len));
      step.query_start_loc.push_back(step.query_start_loc.back() +
                                     static_cast<int32_t>(requests[b].query_len));
      for (int64_t i = requests[b].seq_len - requests[b].query_len; i < requests[b].seq_len; ++i) {
        step.slots.push_back(int64_t{step.tables[row * kMaxBlocks + i / kBlockSize]} * kBlockSize +
                             i % kBlockSize);
      }
    }
    step.qkv = Random(step.num_tokens() * kQkvWidth);
    return step;
  }

  // Adds padding requests of one row and length 0, then rows that are nobody's.
  static Step Padded(Step step, int64_t num_requests, int64_t num_tokens) {
    while (std::ssize(step.seq_lens) < num_requests) {
      step.seq_lens.push_back(0);
      step.table_rows.push_back(0);
      step.query_start_loc.push_back(step.query_start_loc.back() + 1);
    }
    step.slots.resize(num_tokens, kNoSlot);
    step.qkv.resize(num_tokens * kQkvWidth, NAN);
    return step;
  }

  template <typename T>
  static void Put(const DeviceBuffer& to, const std::vector<T>& values) {
    const DeviceBuffer from = ToDevice(values);
    LOCKSTEP_CHECK(
        CopyAsync(to.data(), from.data(), static_cast<int64_t>(values.size() * sizeof(T)), nullptr)
            .ok());
    LOCKSTEP_CHECK(Synchronize(nullptr).ok());
  }

  CudaAttentionBatch Batch(const Step& step) const {
    CudaAttentionBatch batch = {.query_start_loc = query_start_loc_.as<int32_t>(),
                                .seq_lens = seq_lens_.as<int32_t>(),
                                .block_tables = tables_.as<int32_t>(),
                                .table_rows = table_rows_.as<int32_t>(),
                                .slot_mapping = slots_.as<int64_t>(),
                                .max_blocks = kMaxBlocks,
                                .block_size = kBlockSize,
                                .num_requests = std::ssize(step.seq_lens),
                                .num_tokens = step.num_tokens()};
    return batch;
  }

  void Upload(const Step& step) {
    Put(query_start_loc_, step.query_start_loc);
    Put(seq_lens_, step.seq_lens);
    Put(tables_, step.tables);
    Put(table_rows_, step.table_rows);
    Put(slots_, step.slots);
    std::vector<char> packed(step.qkv.size() * SizeOf(kDType));
    Convert(DType::kF32, step.qkv.data(), kDType, packed.data(), std::ssize(step.qkv));
    Put(qkv_, packed);
    Put(out_, std::vector<char>(kMaxTokens * kOutStride * 2, '\xff'));
  }

  KvCacheView Cache(void* keys, void* values) const {
    return {.keys = keys,
            .values = values,
            .dtype = kDType,
            .num_blocks = kBlocks,
            .num_kv_heads = 2,
            .block_size = kBlockSize,
            .head_dim = kDim};
  }

  // Issues the step as a decoder does.
  absl::Status Issue(const CudaAttentionBatch& batch, CudaAttentionWorkspace& workspace,
                     bool programmatic = false) {
    const KvCacheView cache = Cache(device_keys_.data(), device_values_.data());
    LOCKSTEP_RETURN_IF_ERROR(workspace.PlanStep(batch, stream_.get()));
    char* const qkv = qkv_.as<char>();
    LOCKSTEP_RETURN_IF_ERROR(CudaWriteKv(batch,
                                         {.keys = qkv + kQueryWidth * 2,
                                          .values = qkv + (kQueryWidth + 2 * kDim) * 2,
                                          .dtype = kDType,
                                          .row_stride = kQkvWidth},
                                         cache, stream_.get(), programmatic));
    return layer_.Forward(batch, workspace, {.data = qkv, .dtype = kDType, .row_stride = kQkvWidth},
                          cache, {.data = out_.data(), .dtype = kDType, .row_stride = kOutStride},
                          stream_.get());
  }

  // [T, Hq * D] of the last step; what lies between rows must still be poisoned.
  std::vector<float> Output(int64_t num_tokens) {
    EXPECT_TRUE(Synchronize(stream_.get()).ok());
    std::vector<BF16> packed(kMaxTokens * kOutStride);
    ToHost(out_, packed.data(), std::ssize(packed) * 2);
    std::vector<float> out;
    for (int64_t t = 0; t < kMaxTokens; ++t) {
      for (int64_t i = 0; i < kOutStride; ++i) {
        const BF16 value = packed[t * kOutStride + i];
        if (t < num_tokens && i < kQueryWidth) {
          out.push_back(ToFloat(value));
        } else {
          EXPECT_EQ(value.bits, 0xffff) << t << " " << i;
        }
      }
    }
    return out;
  }

  std::vector<float> Run(const Step& step) {
    Upload(step);
    const absl::Status status = Issue(Batch(step), workspace_);
    EXPECT_TRUE(status.ok()) << status;
    return Output(step.num_tokens());
  }

  // By the reference backend over the host's copy of the cache.
  std::vector<double> Expected(const Step& step) {
    const ReferenceBackend reference;
    std::vector<char> keys = keys_;
    std::vector<char> values = values_;
    const KvCacheView cache = Cache(keys.data(), values.data());
    const auto columns = [&](int64_t first, int64_t count) {
      return MatrixView{.data = const_cast<float*>(step.qkv.data()) + first,
                        .rows = step.num_tokens(),
                        .cols = count,
                        .stride = kQkvWidth};
    };
    reference.WriteKv(columns(kQueryWidth, 2 * kDim), columns(kQueryWidth + 2 * kDim, 2 * kDim),
                      step.slots, cache);
    const AttentionBatch batch = {.query_start_loc = step.query_start_loc,
                                  .seq_lens = step.seq_lens,
                                  .block_tables = step.tables,
                                  .max_blocks = kMaxBlocks,
                                  .slot_mapping = step.slots,
                                  .table_rows = step.table_rows};
    const auto metadata = reference.BuildMetadata(batch, kBlockSize);
    EXPECT_TRUE(metadata.ok()) << metadata.status();
    std::vector<float> out(step.num_tokens() * kQueryWidth, NAN);
    reference.Forward(geometry_, **metadata, columns(0, kQueryWidth), cache,
                      {.data = out.data(),
                       .rows = step.num_tokens(),
                       .cols = kQueryWidth,
                       .stride = kQueryWidth});
    return {out.begin(), out.end()};
  }

  static constexpr int64_t kDim = 128;
  static constexpr int64_t kHeads = 12;
  static constexpr int64_t kQueryWidth = kHeads * kDim;
  static constexpr int64_t kQkvWidth = kQueryWidth + 4 * kDim;
  static constexpr int64_t kOutStride = kQueryWidth + 8;

  const AttentionGeometry geometry_ = {.num_query_heads = kHeads,
                                       .num_kv_heads = 2,
                                       .head_dim = kDim,
                                       .kv_groups = {{0, 7}, {7, 12}},
                                       .scale = 0.088f};
  std::mt19937 rng_{7};
  OwnedCudaStream stream_;
  std::vector<char> keys_;  // the cache before any step, on the host
  std::vector<char> values_;
  DeviceBuffer device_keys_;
  DeviceBuffer device_values_;
  CudaAttentionWorkspace workspace_;
  CudaAttentionLayer layer_;
  DeviceBuffer query_start_loc_, seq_lens_, tables_, table_rows_, slots_, qkv_, out_;
};

// Leaves what Put made of the cache behind: each step of a test writes other slots.
TEST_F(CudaLauncherTest, FusedRowsOfAMixedStep) {
  const Step step = MakeStep({{.query_len = 1, .seq_len = 900},
                              {.query_len = 150, .seq_len = 700},
                              {.query_len = 1, .seq_len = 3},
                              {.query_len = 0, .seq_len = 10},
                              {.query_len = 33, .seq_len = 33}});
  EXPECT_LT(RelativeError(Run(step), Expected(step)), RelativeErrorTolerance(kDType));
}

TEST_F(CudaLauncherTest, PaddingChangesNoBits) {
  for (const int64_t rows : {1, 20}) {
    const Step step = MakeStep({{.query_len = 1, .seq_len = 900},
                                {.query_len = rows, .seq_len = 400},
                                {.query_len = 1, .seq_len = 130}});
    const std::vector<float> expected = Run(step);
    for (const int64_t requests : {3, 5, 8}) {
      const Step padded = Padded(step, requests, step.num_tokens() + requests - 3 + 4);
      const std::vector<float> out = Run(padded);
      ASSERT_EQ(std::ssize(out), padded.num_tokens() * kQueryWidth);
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), expected.size() * 4), 0) << requests;
      for (size_t i = expected.size(); i < out.size(); ++i) ASSERT_EQ(out[i], 0.0f) << i;
    }
  }
}

// Table entries of blocks before the window may name any block.
TEST_F(CudaLauncherTest, BlocksBeforeTheWindowMayBeGone) {
  constexpr int64_t kWindow = 70;
  AttentionGeometry windowed = geometry_;
  windowed.sliding_window = kWindow;
  auto layer = CudaAttentionLayer::Create(windowed, kDType, kDType, *DefaultCudaPrefill(kDType));
  ASSERT_TRUE(layer.ok()) << layer.status();
  layer_ = *std::move(layer);
  workspace_ = MakeWorkspace(false, kWindow);
  Step step = MakeStep({{.query_len = 150, .seq_len = 700},
                        {.query_len = 1, .seq_len = 500},
                        {.query_len = 20, .seq_len = 1600}});
  const std::vector<float> expected = Run(step);
  const std::set<int32_t> used(step.tables.begin(), step.tables.end());
  int32_t of_nan = 0;
  while (used.contains(of_nan)) ++of_nan;
  constexpr int64_t kBlockBytes = 2 * kBlockSize * kDim * 2;
  for (const DeviceBuffer* cache : {&device_keys_, &device_values_}) {
    ASSERT_TRUE(
        FillBytesAsync(cache->as<char>() + of_nan * kBlockBytes, 0xff, kBlockBytes, stream_.get())
            .ok());
  }
  for (size_t b = 0; b < step.seq_lens.size(); ++b) {
    const int64_t query_len = step.query_start_loc[b + 1] - step.query_start_loc[b];
    const int64_t first_visible = step.seq_lens[b] - query_len - kWindow + 1;
    const auto row = step.tables.begin() + step.table_rows[b] * kMaxBlocks;
    std::fill(row, row + first_visible / kBlockSize, of_nan);
  }
  EXPECT_TRUE(SameBits(Run(step), expected));
}

// One graph of a bucket of 8 serves steps of other lengths, with fewer requests.
class CudaLauncherGraphTest : public CudaLauncherTest, public testing::WithParamInterface<bool> {};

TEST_P(CudaLauncherGraphTest, OneGraphServesABucket) {
  const bool programmatic = GetParam();
  CudaAttentionWorkspace workspace = MakeWorkspace(programmatic);
  const auto shapes =
      std::vector<std::vector<RequestShape>>{{{.seq_len = 5}},
                                             {{.seq_len = 1900}, {.seq_len = 1}, {.seq_len = 640}},
                                             {{.seq_len = 128},
                                              {.seq_len = 129},
                                              {.seq_len = 300},
                                              {.seq_len = 17},
                                              {.seq_len = 1000},
                                              {.seq_len = 64},
                                              {.seq_len = 31},
                                              {.seq_len = 1200}}};
  cudaGraphExec_t graph = nullptr;
  for (const auto& requests : shapes) {
    const Step step = MakeStep(requests);
    const std::vector<float> expected = Run(step);
    const Step padded = Padded(step, kMaxRequests, kMaxRequests);
    Upload(padded);
    if (graph == nullptr) {
      CudaAttentionBatch batch = Batch(padded);
      batch.may_have_prefill = false;
      cudaGraph_t captured = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
                cudaSuccess);
      // Several layers' worth, so that there is a kernel before each to overlap with.
      absl::Status status;
      for (int layer = 0; layer < 3 && status.ok(); ++layer) {
        status = Issue(batch, workspace, programmatic);
      }
      ASSERT_EQ(cudaStreamEndCapture(stream_.get(), &captured), cudaSuccess);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
      cudaGraphDestroy(captured);
    }
    ASSERT_EQ(cudaGraphLaunch(graph, stream_.get()), cudaSuccess);
    const std::vector<float> out = Output(kMaxRequests);
    EXPECT_EQ(std::memcmp(out.data(), expected.data(), expected.size() * 4), 0) << requests.size();
    for (size_t i = expected.size(); i < out.size(); ++i) ASSERT_EQ(out[i], 0.0f) << i;
  }
  cudaGraphExecDestroy(graph);
}

INSTANTIATE_TEST_SUITE_P(Launch, CudaLauncherGraphTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "programmatic" : "plain"; });

TEST_F(CudaLauncherTest, ProgrammaticLaunchChangesNoBits) {
  CudaAttentionWorkspace programmatic = MakeWorkspace(true);
  const Step step = MakeStep({{.query_len = 1, .seq_len = 1500},
                              {.query_len = 100, .seq_len = 400},
                              {.query_len = 1, .seq_len = 700}});
  const std::vector<float> expected = Run(step);
  for (int i = 0; i < 20; ++i) {
    Upload(step);
    // Several steps in a row, so that there is a kernel before each to overlap with.
    for (int repeat = 0; repeat < 5; ++repeat) {
      const absl::Status status = Issue(Batch(step), programmatic, true);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(SameBits(Output(step.num_tokens()), expected)) << i;
  }
}

TEST_F(CudaLauncherTest, RefusesWhatDoesNotFit) {
  const Step step = MakeStep({{.query_len = 1, .seq_len = 20}});
  Upload(step);
  CudaAttentionBatch batch = Batch(step);
  const KvCacheView cache = Cache(device_keys_.data(), device_values_.data());
  const CudaRows rows = {.data = qkv_.data(), .dtype = kDType, .row_stride = kQkvWidth};
  const auto forward = [&](const CudaAttentionBatch& b, const CudaRows& query,
                           const KvCacheView& c) {
    return layer_.Forward(b, workspace_, query, c, rows, stream_.get()).code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  CudaAttentionBatch changed = batch;
  changed.num_requests = kMaxRequests + 1;
  EXPECT_EQ(forward(changed, rows, cache), kInvalid);
  EXPECT_EQ(workspace_.PlanStep(changed, stream_.get()).code(), kInvalid);
  changed = batch;
  changed.block_size = 32;
  EXPECT_EQ(forward(changed, rows, cache), kInvalid);
  CudaRows query = rows;
  query.data = qkv_.as<char>() + 2;
  EXPECT_EQ(forward(batch, query, cache), kInvalid);
  query = rows;
  query.dtype = DType::kF32;
  EXPECT_EQ(forward(batch, query, cache), kInvalid);
  query = rows;
  query.row_stride = 8;
  EXPECT_EQ(forward(batch, query, cache), kInvalid);
  KvCacheView other = cache;
  other.num_kv_heads = 3;
  EXPECT_EQ(forward(batch, rows, other), kInvalid);
  AttentionGeometry windowed = geometry_;
  windowed.sliding_window = 5;
  const auto layer =
      CudaAttentionLayer::Create(windowed, kDType, kDType, *DefaultCudaPrefill(kDType));
  ASSERT_TRUE(layer.ok());
  EXPECT_EQ(layer->Forward(batch, workspace_, rows, cache, rows, stream_.get()).code(), kInvalid);
}

TEST(CudaAttentionLayerTest, RefusesGeometriesAndTypesByName) {
  const AttentionGeometry good = {
      .num_query_heads = 2, .num_kv_heads = 1, .head_dim = 8, .kv_groups = {{0, 2}}, .scale = 1};
  const auto create = [](const AttentionGeometry& geometry, DType dtype = DType::kF32,
                         DType kv_dtype = DType::kF32, CudaPrefill prefill = CudaPrefill::kMma) {
    return CudaAttentionLayer::Create(geometry, dtype, kv_dtype, prefill).status();
  };
  const auto code = [&](const AttentionGeometry& geometry) { return create(geometry).code(); };
  EXPECT_TRUE(create(good).ok());
  EXPECT_TRUE(create(good, DType::kF32, DType::kF8E4M3).ok());
  EXPECT_EQ(create(good, DType::kF32, DType::kBF16).message(),
            "CUDA attention: queries of float32 with a cache of bfloat16");
  EXPECT_EQ(create(good, DType::kF8E4M3, DType::kF8E4M3).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(create(good, DType::kBF16, DType::kF8E4M3, CudaPrefill::kWarpgroup).message(),
            "CUDA attention: warpgroup products with an fp8 cache");
  AttentionGeometry changed = good;
  changed.head_dim = 513;
  EXPECT_EQ(code(changed), absl::StatusCode::kUnimplemented);
  changed = good;
  changed.kv_groups = {{0, 1}};
  EXPECT_EQ(code(changed), absl::StatusCode::kInvalidArgument);
  changed = good;
  changed.scale = 0;
  EXPECT_EQ(code(changed), absl::StatusCode::kInvalidArgument);
  changed = good;
  changed.num_query_heads = 300;
  changed.num_kv_heads = 300;
  changed.kv_groups.clear();
  for (int64_t h = 0; h < 300; ++h) changed.kv_groups.push_back({h, h + 1});
  EXPECT_EQ(code(changed), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace lockstep
