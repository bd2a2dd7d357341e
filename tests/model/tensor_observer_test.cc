// Which tensors a forward pass shows, in which order, and that the ranks' columns put together are
// the tensors of one rank.
#include "model/tensor_observer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/model/memory_checkpoint.h"
#include "tests/model/model_runner.h"

namespace lockstep {
namespace {

// 9 query heads over 3 KV heads: on 2 ranks (5 + 4) KV head 1 is on both. F and V split unevenly.
ModelConfig NineHeads() {
  ModelConfig config;
  config.model_type = "qwen3";
  config.hidden_size = 40;
  config.intermediate_size = 100;
  config.num_layers = 2;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 8;
  config.vocab_size = 121;
  config.max_position_embeddings = 512;
  config.qk_norm = true;
  config.qkv_bias = true;
  config.layer_windows = {0, 0};
  return config;
}

struct Tensor {
  int64_t layer = 0;
  TensorKind kind = TensorKind::kEmbedding;
  std::vector<std::vector<float>> rows;
};

class Recorder : public TensorObserver {
 public:
  void Observe(int64_t layer, TensorKind kind, const MatrixView& local) override {
    Tensor tensor{layer, kind, {}};
    for (int64_t r = 0; r < local.rows; ++r) {
      tensor.rows.emplace_back(local.row<float>(r), local.row<float>(r) + local.cols);
    }
    tensors.push_back(std::move(tensor));
  }

  std::vector<Tensor> tensors;
};

// What each rank shows of one step of two requests.
std::vector<std::vector<Tensor>> Observed(const ModelSource& source, int ranks) {
  std::vector<std::vector<Tensor>> tensors(ranks);
  RunRanks(source, ranks, {}, [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
    Recorder recorder;
    runner.decoder().set_observer(&recorder);
    const std::vector<Chunk> chunks = {{0, {3, 50, 120, 7}, 0, 4}, {1, {9, 9}, 0, 2}};
    LOCKSTEP_RETURN_IF_ERROR(runner.Step(chunks).status());
    tensors[communicator.rank()] = recorder.tensors;
    runner.decoder().set_observer(nullptr);
    return runner.Step({{2, {1}, 0, 1}}).status();
  });
  return tensors;
}

TEST(TensorObserverTest, ShowsEveryTensorOnceInOrder) {
  using enum TensorKind;
  const std::vector<Tensor> tensors = Observed(MakeSource(NineHeads()), 1)[0];
  std::vector<std::pair<int64_t, TensorKind>> expected = {{kNoLayer, kEmbedding}};
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (const TensorKind kind : {kInputNorm, kQkv, kAttention, kOProj, kPostAttentionNorm, kGateUp,
                                  kActivated, kDownProj}) {
      expected.emplace_back(layer, kind);
    }
  }
  expected.emplace_back(kNoLayer, kFinalNorm);
  expected.emplace_back(kNoLayer, kLogits);
  ASSERT_EQ(tensors.size(), expected.size());  // the step without an observer added none
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(tensors[i].layer, expected[i].first) << i;
    EXPECT_EQ(Name(tensors[i].kind), Name(expected[i].second)) << i;
    EXPECT_EQ(tensors[i].rows.size(), 6u) << i;
  }
}

TEST(TensorObserverTest, RanksHoldTheColumnsThatThePartitionSays) {
  const ModelConfig config = NineHeads();
  const ModelSource source = MakeSource(config);
  const std::vector<Tensor> whole = Observed(source, 1)[0];
  for (const int ranks : {2, 3, 7}) {
    const auto partition = PartitionModel(config.Dims(), ranks);
    ASSERT_TRUE(partition.ok());
    const std::vector<std::vector<Tensor>> parts = Observed(source, ranks);
    for (size_t i = 0; i < whole.size(); ++i) {
      const auto& [layer, kind, rows] = whole[i];
      std::vector<bool> covered(rows[0].size());
      for (int rank = 0; rank < ranks; ++rank) {
        const Tensor& part = parts[rank].at(i);
        ASSERT_EQ(part.kind, kind);
        ASSERT_EQ(part.layer, layer);
        int64_t local = 0;
        for (const ColumnRun& run : LocalColumns(kind, config, (*partition)[rank])) {
          ASSERT_EQ(run.local, local);
          local += run.count;
          for (int64_t c = 0; c < run.count; ++c) {
            covered.at(run.full + c) = true;
            for (size_t r = 0; r < rows.size(); ++r) {
              ASSERT_NEAR(part.rows.at(r).at(run.local + c), rows[r][run.full + c], 2e-5)
                  << ranks << " ranks, rank " << rank << ", " << Name(kind) << " " << layer << ", "
                  << DescribeColumn(kind, config, run.full + c);
            }
          }
        }
        ASSERT_EQ(local, static_cast<int64_t>(part.rows[0].size())) << Name(kind);
      }
      EXPECT_EQ(std::count(covered.begin(), covered.end(), false), 0) << Name(kind);
    }
  }
}

TEST(TensorObserverTest, ColumnsAreNamed) {
  const ModelConfig config = NineHeads();  // 72 query, 24 key and 24 value columns
  const auto describe = [&](TensorKind kind, int64_t column) {
    return DescribeColumn(kind, config, column);
  };
  EXPECT_EQ(describe(TensorKind::kQkv, 71), "query head 8, element 7");
  EXPECT_EQ(describe(TensorKind::kQkv, 72), "key head 0, element 0");
  EXPECT_EQ(describe(TensorKind::kQkv, 96 + 9), "value head 1, element 1");
  EXPECT_EQ(describe(TensorKind::kAttention, 16), "query head 2, element 0");
  EXPECT_EQ(describe(TensorKind::kGateUp, 99), "gate row 99");
  EXPECT_EQ(describe(TensorKind::kGateUp, 100), "up row 0");
  EXPECT_EQ(describe(TensorKind::kLogits, 120), "token id 120");
  EXPECT_EQ(describe(TensorKind::kOProj, 39), "column 39");
}

}  // namespace
}  // namespace lockstep
