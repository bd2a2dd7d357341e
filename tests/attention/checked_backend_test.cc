// The check of a backend against the reference: silent on a right backend, and it names what a
// faulty one did.
#include "attention/checked_backend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "tests/attention/attention_scenario.h"

namespace lockstep {
namespace {

// A right backend whose inputs or outputs are tampered with.
class FaultyBackend : public AttentionBackend {
 public:
  struct Faults {
    std::function<void(AttentionGeometry&)> geometry = {};
    std::function<void(std::vector<int32_t>& seq_lens, std::vector<int32_t>& tables)> batch = {};
    std::function<void(int64_t layer, const MatrixView& out)> output = {};
    std::function<void(const KvCacheView& cache)> written = {};
  };
  FaultyBackend(ThreadPool& pool, Faults faults)
      : right_(CpuBackend::Create(pool)), faults_(std::move(faults)) {}

  std::string name() const override { return "faulty"; }
  const AttentionCapabilities& capabilities() const override { return right_->capabilities(); }
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override {
    layer_ = 0;
    seq_lens_.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    tables_.assign(batch.block_tables.begin(), batch.block_tables.end());
    if (faults_.batch) faults_.batch(seq_lens_, tables_);
    AttentionBatch changed = batch;
    changed.seq_lens = seq_lens_;
    changed.block_tables = tables_;
    return right_->BuildMetadata(changed, block_size);
  }
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override {
    right_->WriteKv(keys, values, slots, cache);
    if (faults_.written) faults_.written(cache);
  }
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override {
    AttentionGeometry changed = geometry;
    if (faults_.geometry) faults_.geometry(changed);
    right_->Forward(changed, metadata, query, cache, out);
    if (faults_.output) faults_.output(layer_, out);
    ++layer_;
  }

 private:
  std::unique_ptr<CpuBackend> right_;
  Faults faults_;
  mutable int64_t layer_ = 0;
  mutable std::vector<int32_t> seq_lens_;
  mutable std::vector<int32_t> tables_;
};

std::unique_ptr<CheckedBackend> Checked(std::unique_ptr<AttentionBackend> backend) {
  auto checked = CheckedBackend::Create(std::move(backend));
  EXPECT_TRUE(checked.ok()) << checked.status();
  return *std::move(checked);
}

std::string Message(const CheckedBackend& checked) {
  return std::string(checked.status().message());
}

class CheckedBackendTest : public testing::Test {
 protected:
  std::unique_ptr<CheckedBackend> CheckedFaulty(FaultyBackend::Faults faults) {
    return Checked(std::make_unique<FaultyBackend>(pool_, std::move(faults)));
  }

  ThreadPool pool_{2};
};

ScenarioShape RandomShape(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> values) {
    return *(values.begin() + random() % values.size());
  };
  ScenarioShape shape;
  shape.seed = random();
  shape.head_dim = pick({7, 8, 16, 64, 80});
  shape.block_size = pick({1, 4, 16});
  shape.sliding_window = pick({0, 0, 5, 100});
  shape.logit_softcap = static_cast<float>(pick({0, 0, 2}));
  shape.kv_dtype = static_cast<DType>(pick({0, 1, 2}));
  shape.padding_rows = pick({0, 2});
  shape.group_sizes.clear();
  for (int64_t i = pick({1, 2, 3}); i > 0; --i) shape.group_sizes.push_back(pick({1, 2, 3}));
  for (int64_t i = pick({1, 2, 4}); i > 0; --i) {
    const int64_t seq_len = 1 + static_cast<int64_t>(random() % pick({4, 40, 300}));
    shape.requests.push_back(
        {.query_len = std::min(seq_len, pick({1, 2, 17})), .seq_len = seq_len});
  }
  return shape;
}

TEST_F(CheckedBackendTest, TheCpuBackendIsRightAndItsResultsAreUnchanged) {
  std::random_device device;
  const uint32_t seed = device();
  std::mt19937 random(seed);
  const auto plain = CpuBackend::Create(pool_);
  const auto checked = Checked(CpuBackend::Create(pool_));
  for (int i = 0; i < 40; ++i) {
    const ScenarioShape shape = RandomShape(random);
    Scenario scenario(shape);
    const std::vector<float> expected = scenario.RunStep(*plain);
    EXPECT_TRUE(SameBits(scenario.RunStep(*checked), expected)) << Describe(shape);
    ASSERT_TRUE(checked->status().ok())
        << checked->status() << " " << Describe(shape) << " seed " << seed;
  }
  EXPECT_LT(checked->largest().relative, AttentionTolerance(DType::kF32)) << seed;
  EXPECT_NE(checked->Summary().find("\"cpu\" against \"reference\": 40 steps, 40 layers"),
            std::string::npos)
      << checked->Summary();
}

// Three requests of one, two and three new rows; 2 KV heads with 2 and 1 query heads.
ScenarioShape ThreeRequests(DType kv_dtype = DType::kF32) {
  return {.requests = {{.query_len = 1, .seq_len = 9},
                       {.query_len = 2, .seq_len = 30},
                       {.query_len = 3, .seq_len = 21}},
          .group_sizes = {2, 1},
          .head_dim = 16,
          .block_size = 4,
          .kv_dtype = kv_dtype,
          .padding_rows = 1};
}

void ExpectNames(const CheckedBackend& checked, const std::string& place) {
  const absl::Status status = checked.status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_NE(Message(checked).find("attention backend \"faulty\" is wrong: "), std::string::npos)
      << status;
  EXPECT_NE(Message(checked).find(place), std::string::npos) << status << "\nshould name " << place;
}

TEST_F(CheckedBackendTest, AWrongHeadIsNamed) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // Query head 1 reads KV head 1 instead of 0.
    const auto checked = CheckedFaulty({.geometry = [](AttentionGeometry& geometry) {
      geometry.kv_groups = {{0, 1}, {1, 3}};
    }});
    Scenario(ThreeRequests(dtype)).RunStep(*checked);
    ExpectNames(*checked, "step 1, layer 0, request 0, position 8 (row 0), local query head 1, ");
  }
}

TEST_F(CheckedBackendTest, ASkippedLastKeyIsNamed) {
  const auto checked = CheckedFaulty({.batch = [](std::vector<int32_t>& seq_lens, auto&) {
    --seq_lens[1];  // every row of request 1 sees one key less
  }});
  Scenario scenario(ThreeRequests());
  scenario.RunStep(*checked);
  ExpectNames(*checked, "request 1, position 28 (row 1), local query head ");
}

TEST_F(CheckedBackendTest, AWrongBlockIsNamed) {
  const auto checked = CheckedFaulty({.batch = [](auto&, std::vector<int32_t>& tables) {
    // The scenario keeps request 2's table in row 1 of 6.
    int32_t* const table = tables.data() + tables.size() / 6;
    std::swap(table[0], table[5]);  // positions 0-3 and 20
  }});
  Scenario(ThreeRequests()).RunStep(*checked);
  // Block 5 of request 2 holds one token; the rest of it is NaN, which row 3 (position 18) reads.
  ExpectNames(*checked, "request 2, position 18 (row 3), local query head 0, element 0: nan, ");
  EXPECT_TRUE(std::isinf(checked->largest().relative));
}

TEST_F(CheckedBackendTest, TheLayerIsTheNumberOfForwardCalls) {
  const auto checked = CheckedFaulty({.output = [](int64_t layer, const MatrixView& out) {
    if (layer == 2) out.row<float>(0)[17] *= 1.01f;  // head 1, element 1
  }});
  std::vector<float> query(48, 0.5f), kv(32, 0.25f), out(48);
  auto pool = KvPool::Create(
      {.num_layers = 1, .num_kv_heads = 2, .head_dim = 16, .block_size = 4, .dtype = DType::kF32},
      1);
  ASSERT_TRUE(pool.ok());
  const std::vector<int32_t> starts = {0, 1}, seq_lens = {1}, table = {0};
  const std::vector<int64_t> slots = {0};
  const AttentionBatch batch = {starts, seq_lens, table, 1, slots};
  const AttentionGeometry geometry = {.num_query_heads = 3,
                                      .num_kv_heads = 2,
                                      .head_dim = 16,
                                      .kv_groups = {{0, 2}, {2, 3}},
                                      .scale = 0.25f};
  const auto view = [](std::vector<float>& data) {
    const int64_t size = static_cast<int64_t>(data.size());
    return MatrixView{data.data(), DType::kF32, 1, size, size};
  };
  for (int step = 1; step <= 2; ++step) {
    const auto metadata = checked->BuildMetadata(batch, 4);
    ASSERT_TRUE(metadata.ok()) << metadata.status();
    for (int layer = 0; layer < 3; ++layer) {
      EXPECT_EQ(checked->status().ok(), step == 1) << checked->status();
      checked->WriteKv(view(kv), view(kv), slots, pool->Layer(0));
      checked->Forward(geometry, **metadata, view(query), pool->Layer(0), view(out));
    }
  }
  ExpectNames(*checked,
              "step 1, layer 2, request 0, position 0 (row 0), local query head 1, element 1: "
              "0.252499998, the reference gives 0.25:");
}

TEST_F(CheckedBackendTest, ARowLeftOutAndPaddingThatIsNotZeroAreNamed) {
  const auto left_out = CheckedFaulty({.output = [](int64_t, const MatrixView& out) {
    out.row<float>(4)[0] = NAN;  // what a row that was not written holds
  }});
  Scenario(ThreeRequests()).RunStep(*left_out);
  ExpectNames(*left_out, "request 2, position 19 (row 4), local query head 0, element 0: nan, ");
  const auto padding = CheckedFaulty(
      {.output = [](int64_t, const MatrixView& out) { out.row<float>(6)[20] = 1e-30f; }});
  Scenario(ThreeRequests()).RunStep(*padding);
  ExpectNames(*padding, "layer 0, row 6, local query head 1, element 4: ");
}

TEST_F(CheckedBackendTest, NanThatTheFormulaGivesIsNoDifference) {
  const auto checked = Checked(CpuBackend::Create(pool_));
  Scenario scenario(ThreeRequests());
  scenario.data()[0].queries[8 * scenario.query_width()] = NAN;
  scenario.RunStep(*checked);
  EXPECT_TRUE(checked->status().ok()) << checked->status();
  EXPECT_NE(checked->Summary().find("NaN in 1 rows of both"), std::string::npos)
      << checked->Summary();
}

TEST_F(CheckedBackendTest, AWrongWriteIsNamed) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Scenario scenario(ThreeRequests(dtype));
    const KvCacheView cache = scenario.cache();
    // The last bit of one value of slot 6: block 1, offset 2.
    const int64_t element = cache.Offset(1, /*head=*/1, 2) + 3;
    const auto checked = CheckedFaulty({.written = [element](const KvCacheView& written) {
      static_cast<char*>(written.values)[element * SizeOf(written.dtype)] ^= 1;
    }});
    std::vector<float> keys(32, 1.0f), values(32, 2.0f);
    const MatrixView key_view{keys.data(), DType::kF32, 1, 32, 32};
    const MatrixView value_view{values.data(), DType::kF32, 1, 32, 32};
    checked->WriteKv(key_view, value_view, std::vector<int64_t>{7}, cache);
    EXPECT_TRUE(checked->status().ok()) << checked->status();  // another slot
    checked->WriteKv(key_view, value_view, std::vector<int64_t>{6}, cache);
    ExpectNames(*checked, "row 0, local KV head 1, element 3: slot 6 holds the value 2.");
  }
}

TEST_F(CheckedBackendTest, TheReferenceIsNotCheckedAgainstItself) {
  const auto checked = CheckedBackend::Create(std::make_unique<ReferenceBackend>());
  EXPECT_TRUE(absl::IsInvalidArgument(checked.status())) << checked.status();
}

}  // namespace
}  // namespace lockstep
