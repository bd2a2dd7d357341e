// Which part of each tensor a rank holds, and that the split never changes the answer: 64 greedy
// ids (16 after each of 4 prompts) in float32 are the same at every rank count.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "model/checkpoint/tensor_names.h"
#include "tests/model/memory_checkpoint.h"
#include "tests/model/model_runner.h"

namespace lockstep {
namespace {

using Rectangle = MemoryCheckpoint::Rectangle;

ModelConfig Llama(int64_t query_heads, int64_t kv_heads, int64_t head_dim) {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_layers = 2;
  config.num_query_heads = query_heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.vocab_size = 120;
  config.max_position_embeddings = 512;
  config.layer_windows = {0, 0};
  return config;
}

// What one rank told.
struct RankView {
  AttentionGeometry geometry;
  int64_t kv_bytes_per_token = 0;
  std::vector<Rectangle> reads;
  std::vector<int32_t> greedy;
};

// Lets the layers outweigh the embedding they are added to. Otherwise an id depends on little but
// the id before it, and greedy output soon repeats itself whatever the layers compute.
void StrengthenLayers(MemoryCheckpoint& weights, const ModelConfig& config) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const char* suffix : {kOWeight, kDownWeight}) {
      for (float& value : weights.Values(LayerTensor(layer, suffix))) value *= 4;
    }
  }
}

std::vector<std::vector<int32_t>> RandomPrompts(int64_t vocab_size) {
  std::mt19937 random(5);
  std::vector<std::vector<int32_t>> prompts(4, std::vector<int32_t>(10));
  for (std::vector<int32_t>& prompt : prompts) {
    for (int32_t& id : prompt) id = static_cast<int32_t>(random() % vocab_size);
  }
  return prompts;
}

// `prepare` may alter the weights before they are loaded.
template <typename Prepare>
std::vector<RankView> RunModel(const ModelConfig& config, int ranks, Prepare prepare) {
  MemoryCheckpoint* weights = nullptr;
  const ModelSource source = MakeSource(config, &weights);
  StrengthenLayers(*weights, config);
  prepare(*weights);
  const std::vector<std::vector<int32_t>> prompts = RandomPrompts(config.vocab_size);
  std::vector<RankView> views(ranks);
  RunRanks(source, ranks, {}, [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
    RankView& view = views[communicator.rank()];
    view.geometry = runner.decoder().Geometry(1);
    view.kv_bytes_per_token =
        runner.pool().shape().BytesPerBlock() / runner.pool().shape().block_size;
    view.reads = weights->ReadByThisThread();
    for (size_t i = 0; i < prompts.size(); ++i) {
      LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<int32_t> greedy,
                                runner.Greedy(static_cast<int>(i), prompts[i], 4, 16));
      view.greedy.insert(view.greedy.end(), greedy.begin(), greedy.end());
    }
    return absl::OkStatus();
  });
  return views;
}
std::vector<RankView> RunModel(const ModelConfig& config, int ranks) {
  return RunModel(config, ranks, [](MemoryCheckpoint&) {});
}

void ExpectSameIds(const std::vector<RankView>& views, const std::vector<RankView>& single) {
  ASSERT_EQ(single[0].greedy.size(), 64u);
  // A model that repeats a few ids would prove little.
  const std::set<int32_t> distinct(single[0].greedy.begin(), single[0].greedy.end());
  EXPECT_GE(distinct.size(), 16u);
  for (const RankView& view : views) EXPECT_EQ(view.greedy, single[0].greedy);
}

Rectangle Only(const RankView& view, const std::string& name) {
  std::vector<Rectangle> found;
  for (const Rectangle& r : view.reads) {
    if (r.name == name) found.push_back(r);
  }
  EXPECT_EQ(found.size(), 1u) << name;
  return found.empty() ? Rectangle() : found[0];
}

TEST(ShardingTest, KvHeadsAreHeldWholeWhenRanksOutnumberThem) {
  const ModelConfig config = Llama(8, 2, 16);
  const std::vector<RankView> single = RunModel(config, 1);
  for (int ranks : {2, 4, 8}) {
    const std::vector<RankView> views = RunModel(config, ranks);
    ExpectSameIds(views, single);
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t head = rank * 2 / ranks;
      const Rectangle k = Only(views[rank], LayerTensor(1, kKWeight));
      EXPECT_EQ(k.rows, (Range{head * 16, (head + 1) * 16})) << rank << " of " << ranks;
      EXPECT_EQ(Only(views[rank], LayerTensor(1, kVWeight)).rows, k.rows);
      EXPECT_EQ(views[rank].geometry.num_kv_heads, 1);
      EXPECT_EQ(views[rank].kv_bytes_per_token, 1 * 16 * 2 * config.num_layers * 4);
    }
  }
}

TEST(ShardingTest, ABorderHeadIsSharedWhenKvHeadsDoNotDivide) {
  const ModelConfig config = Llama(6, 3, 16);
  const std::vector<RankView> views = RunModel(config, 2);
  ExpectSameIds(views, RunModel(config, 1));
  EXPECT_EQ(Only(views[0], LayerTensor(0, kQWeight)).rows, (Range{0, 3 * 16}));
  EXPECT_EQ(Only(views[0], LayerTensor(0, kKWeight)).rows, (Range{0, 2 * 16}));
  EXPECT_EQ(Only(views[1], LayerTensor(0, kQWeight)).rows, (Range{3 * 16, 6 * 16}));
  EXPECT_EQ(Only(views[1], LayerTensor(0, kKWeight)).rows, (Range{1 * 16, 3 * 16}));
  EXPECT_EQ(views[0].geometry.kv_groups, (std::vector<Range>{{0, 2}, {2, 3}}));
  EXPECT_EQ(views[1].geometry.kv_groups, (std::vector<Range>{{0, 1}, {1, 3}}));
}

// Every row of head h is h + 1, gate and up row i is i, scaled small and with random signs: equal
// rows would leave each layer next to nothing to tell inputs apart by.
void FillByHead(MemoryCheckpoint& weights, const ModelConfig& config) {
  std::mt19937 random(2);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const char* suffix : {kQWeight, kKWeight, kVWeight, kGateWeight, kUpWeight}) {
      const std::string name = LayerTensor(layer, suffix);
      const bool heads = suffix != kGateWeight && suffix != kUpWeight;
      const int64_t cols = weights.Find(name)->cols();
      std::vector<float>& values = weights.Values(name);
      for (size_t i = 0; i < values.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i) / cols;
        const float number = static_cast<float>(heads ? row / config.head_dim + 1 : row);
        values[i] = number / (heads ? 64 : 256) * (random() % 2 == 0 ? 1.0f : -1.0f);
      }
    }
  }
}

double Checksum(const MemoryCheckpoint& weights, const Rectangle& r) {
  const DoubleMatrix tensor = weights.Tensor(r.name);
  double sum = 0;
  for (int64_t row = r.rows.begin; row < r.rows.end; ++row) {
    for (int64_t col = r.cols.begin; col < r.cols.end; ++col) sum += tensor[row][col];
  }
  return sum;
}

TEST(ShardingTest, SlicesCoverEachTensorExactlyOnce) {
  for (const ModelConfig& config : {Llama(8, 8, 8), Llama(8, 2, 8), Llama(7, 7, 8)}) {
    MemoryCheckpoint weights(config);
    FillByHead(weights, config);
    const auto prepare = [&](MemoryCheckpoint& w) { FillByHead(w, config); };
    const std::vector<RankView> single = RunModel(config, 1, prepare);
    for (int ranks : {2, 4}) {
      const std::vector<RankView> views = RunModel(config, ranks, prepare);
      ExpectSameIds(views, single);
      for (const TensorSpec& spec : RequiredTensors(config)) {
        const bool is_vector = spec.shape.size() == 1;
        const bool is_kv = spec.name.find("k_proj") != std::string::npos ||
                           spec.name.find("v_proj") != std::string::npos;
        if (is_vector || (is_kv && ranks > config.num_kv_heads)) continue;  // on several ranks
        double sum = 0;
        int64_t covered = 0;
        Range next_rows = {0, 0};
        Range next_cols = {0, 0};
        for (const RankView& view : views) {
          const Rectangle r = Only(view, spec.name);
          sum += Checksum(weights, r);
          covered += r.rows.size() * r.cols.size();
          if (r.rows.size() < spec.shape[0]) {
            EXPECT_EQ(r.rows.begin, next_rows.end) << spec.name;  // in rank order, no gap
          } else {
            EXPECT_EQ(r.cols.begin, next_cols.end) << spec.name;
          }
          next_rows = r.rows;
          next_cols = r.cols;
        }
        EXPECT_EQ(covered, spec.shape[0] * spec.shape[1]) << spec.name;
        const Rectangle whole = {spec.name, {0, spec.shape[0]}, {0, spec.shape[1]}, DType::kF32};
        EXPECT_NEAR(sum, Checksum(weights, whole), 1e-6) << spec.name;
      }
      for (const RankView& view : views) {
        const Rectangle gate = Only(view, LayerTensor(0, kGateWeight));
        EXPECT_EQ(Only(view, LayerTensor(0, kUpWeight)).rows, gate.rows);
        EXPECT_EQ(Only(view, LayerTensor(0, kDownWeight)).cols, gate.rows);
        EXPECT_EQ(Only(view, LayerTensor(0, kOWeight)).cols,
                  Only(view, LayerTensor(0, kQWeight)).rows);
      }
    }
  }
}

TEST(ShardingTest, HeadDimOfTheConfigWinsAndHeadNormsAreWhole) {
  ModelConfig config = Llama(4, 2, 32);  // 4 * 32 = 128, twice the hidden size
  config.model_type = "qwen3";
  config.qk_norm = true;
  const std::vector<RankView> single = RunModel(config, 1);
  const std::vector<RankView> views = RunModel(config, 2);
  ExpectSameIds(views, single);
  EXPECT_EQ(Only(single[0], LayerTensor(0, kQWeight)).rows, (Range{0, 128}));
  EXPECT_EQ(Only(single[0], LayerTensor(0, kKWeight)).rows, (Range{0, 64}));
  EXPECT_EQ(Only(single[0], LayerTensor(0, kOWeight)).cols, (Range{0, 128}));
  for (const RankView& view : views) {
    EXPECT_FLOAT_EQ(view.geometry.scale, 1 / std::sqrt(32.0f));
    EXPECT_EQ(Only(view, LayerTensor(0, kQNorm)).cols, (Range{0, 32}));
    EXPECT_EQ(Only(view, LayerTensor(0, kKNorm)).cols, (Range{0, 32}));
  }
}

TEST(ShardingTest, TiedEmbeddingsAndRankZerosBiasAreReadOnce) {
  ModelConfig config = Llama(8, 2, 8);
  config.tie_word_embeddings = true;
  config.o_bias = true;
  config.mlp_bias = true;
  const std::vector<RankView> views = RunModel(config, 2);
  ExpectSameIds(views, RunModel(config, 1));
  for (int rank : {0, 1}) {
    Only(views[rank], kEmbedTokens);
    int64_t biases = 0;
    for (const Rectangle& r : views[rank].reads) {
      EXPECT_NE(r.name, kLmHead);
      biases += r.name.ends_with("o_proj.bias") || r.name.ends_with("down_proj.bias") ? 1 : 0;
    }
    EXPECT_EQ(biases, rank == 0 ? 2 * config.num_layers : 0);
  }
}

}  // namespace
}  // namespace lockstep
