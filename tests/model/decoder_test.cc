// The decoder on weights of its own: against a dense double-precision transformer at several rank
// counts, and the rules that hold for every step.
#include "model/decoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "attention/cpu_backend.h"
#include "parallel/local_communicator.h"
#include "tests/model/dense_reference.h"
#include "tests/model/memory_checkpoint.h"
#include "tests/model/model_runner.h"

namespace lockstep {
namespace {

// Sizes that no rank count divides.
ModelConfig BaseConfig() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 36;
  config.intermediate_size = 37;
  config.num_layers = 2;
  config.num_query_heads = 6;
  config.num_kv_heads = 3;
  config.head_dim = 8;
  config.vocab_size = 101;
  config.max_position_embeddings = 512;
  config.layer_windows = {0, 0};
  return config;
}

struct NamedConfig {
  std::string name;
  ModelConfig config;
};
void PrintTo(const NamedConfig& named, std::ostream* out) { *out << named.name; }

std::vector<NamedConfig> Configs() {
  std::vector<NamedConfig> all;
  const auto add = [&](const std::string& name, auto change) {
    all.push_back({name, BaseConfig()});
    change(all.back().config);
  };
  using Config = ModelConfig;
  add("llama", [](Config&) {});
  add("llama_tied", [](Config& c) { c.tie_word_embeddings = true; });
  add("llama_biases", [](Config& c) { c.qkv_bias = c.o_bias = c.mlp_bias = true; });
  add("llama_9_heads", [](Config& c) { c.num_query_heads = 9; });
  add("llama_one_kv_head", [](Config& c) { c.num_kv_heads = 1; });
  add("mistral_window", [](Config& c) {
    c.model_type = "mistral";
    c.layer_windows = {5, 5};
  });
  add("qwen2_mixed_windows", [](Config& c) {
    c.model_type = "qwen2";
    c.qkv_bias = true;
    c.layer_windows = {0, 6};
  });
  add("qwen3_wide_heads", [](Config& c) {
    c.model_type = "qwen3";
    c.qk_norm = true;
    c.head_dim = 16;
  });
  add("rope_linear", [](Config& c) {
    c.rope.type = RopeType::kLinear;
    c.rope.factor = 3;
  });
  add("rope_dynamic", [](Config& c) {
    c.rope.type = RopeType::kDynamic;
    c.rope.factor = 2;
    c.rope.original_max_position_embeddings = 16;
  });
  add("rope_llama3", [](Config& c) {
    c.rope.type = RopeType::kLlama3;
    c.rope.factor = 8;
    c.rope.original_max_position_embeddings = 64;
  });
  add("rope_yarn", [](Config& c) {
    c.rope.type = RopeType::kYarn;
    c.rope.factor = 4;
    c.rope.original_max_position_embeddings = 64;
    c.rope.mscale = 0.8;
    c.rope.mscale_all_dim = 0.3;
  });
  add("rope_partial", [](Config& c) { c.rope.partial_rotary_factor = 0.5; });
  add("rope_file_factors", [](Config& c) { c.rope.freq_factors = {1, 1.5, 3, 8}; });
  return all;
}

std::vector<int32_t> Tokens(int64_t count, int64_t vocab, uint32_t seed = 5) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tokens.push_back(static_cast<int32_t>((seed >> 8) % vocab));
  }
  return tokens;
}

// The prompt in chunks of 7, then the rest a token a step, as decoding does.
absl::StatusOr<Logits> Feed(ModelRunner& runner, int request, const std::vector<int32_t>& tokens,
                            int64_t prompt_length, int64_t chunk_size) {
  const std::vector<int32_t> prompt(tokens.begin(), tokens.begin() + prompt_length);
  LOCKSTEP_ASSIGN_OR_RETURN(Logits logits, runner.Prefill(request, prompt, chunk_size));
  for (int64_t p = prompt_length; p < static_cast<int64_t>(tokens.size()); ++p) {
    LOCKSTEP_ASSIGN_OR_RETURN(Logits row, runner.Step({{request, {tokens[p]}, p, prompt_length}}));
    logits.push_back(std::move(row[0]));
  }
  return logits;
}

double LargestDifference(const Logits& a, const DoubleMatrix& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t r = 0; r < a.size(); ++r) {
    if (a[r].size() != b[r].size()) return INFINITY;
    for (size_t c = 0; c < a[r].size(); ++c) {
      const double difference = std::abs(a[r][c] - b[r][c]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
    }
  }
  return largest;
}

class DecoderDenseTest : public testing::TestWithParam<NamedConfig> {};

TEST_P(DecoderDenseTest, EqualsTheDenseTransformerAtEveryRankCount) {
  const ModelConfig& config = GetParam().config;
  MemoryCheckpoint* weights = nullptr;
  const ModelSource source = MakeSource(config, &weights);
  const std::vector<int32_t> tokens = Tokens(30, config.vocab_size);
  const DoubleMatrix expected = DenseLogits(
      config, [&](const std::string& name) { return weights->Tensor(name); }, tokens, 20);
  for (int ranks : {1, 2, 3, 5}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      RunnerOptions options;
      options.dtype = dtype;
      options.num_threads = ranks == 1 ? 2 : 1;
      RunRanks(source, ranks, options,
               [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
                 LOCKSTEP_ASSIGN_OR_RETURN(const Logits logits, Feed(runner, 0, tokens, 20, 7));
                 const double difference = LargestDifference(logits, expected);
                 const double tolerance = dtype == DType::kF32 ? 2e-5 : 0.08;
                 EXPECT_LE(difference, tolerance)
                     << ranks << " ranks, rank " << communicator.rank() << ", " << Name(dtype);
                 return absl::OkStatus();
               });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Configs, DecoderDenseTest, testing::ValuesIn(Configs()),
                         [](const auto& info) { return info.param.name; });

void ExpectSameBits(const Logits& a, const Logits& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t r = 0; r < a.size(); ++r) {
    ASSERT_EQ(std::memcmp(a[r].data(), b[r].data(), a[r].size() * 4), 0) << what << ", row " << r;
  }
}

Chunk Whole(int request, const std::vector<int32_t>& tokens) {
  return {request, tokens, 0, static_cast<int64_t>(tokens.size())};
}

class DecoderBatchTest : public testing::TestWithParam<DType> {};

TEST_P(DecoderBatchTest, ARequestsBitsDoNotDependOnItsBatch) {
  ModelConfig config = BaseConfig();
  config.layer_windows = {0, 6};
  config.qkv_bias = true;
  const ModelSource source = MakeSource(config);
  const std::vector<int32_t> tokens = Tokens(40, config.vocab_size);
  const std::vector<int32_t> other = Tokens(33, config.vocab_size, 77);
  Logits alone;
  for (int ranks : {1, 2}) {
    for (int num_threads : {1, 2}) {
      for (int64_t padding : {0, 3}) {
        RunnerOptions options;
        options.dtype = GetParam();
        options.kv_dtype = GetParam();
        options.num_threads = num_threads;
        options.padding = padding;
        RunRanks(source, ranks, options,
                 [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
                   LOCKSTEP_ASSIGN_OR_RETURN(const Logits whole, runner.Step({Whole(0, tokens)}));
                   LOCKSTEP_ASSIGN_OR_RETURN(const Logits both,
                                             runner.Step({Whole(1, other), Whole(2, tokens)}));
                   LOCKSTEP_ASSIGN_OR_RETURN(const Logits fed, Feed(runner, 3, tokens, 40, 7));
                   LOCKSTEP_ASSIGN_OR_RETURN(const Logits single, Feed(runner, 4, tokens, 40, 1));
                   if (communicator.rank() != 0) return absl::OkStatus();
                   if (num_threads == 1 && padding == 0) alone = whole;
                   ExpectSameBits(whole, alone, "whole");
                   ExpectSameBits(Logits(both.begin() + other.size(), both.end()), alone,
                                  "batched");
                   ExpectSameBits(fed, alone, "in chunks of 7");
                   ExpectSameBits(single, alone, "a token a step");
                   return absl::OkStatus();
                 });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, DecoderBatchTest, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

// Dynamic RoPE: the base belongs to one sequence (here trained on 64 instead of 4096 tokens).
TEST(DecoderTest, DynamicRopeOfAShortRequestIgnoresItsLongNeighbour) {
  ModelConfig config = BaseConfig();
  const ModelSource plain = MakeSource(config);
  config.rope.type = RopeType::kDynamic;
  config.rope.factor = 2;
  config.rope.original_max_position_embeddings = 64;
  const ModelSource dynamic = MakeSource(config);
  const std::vector<int32_t> brief = Tokens(20, config.vocab_size);
  const std::vector<int32_t> lengthy = Tokens(150, config.vocab_size, 9);
  std::vector<int32_t> edge = lengthy;
  edge.resize(64);
  Logits unscaled_brief, unscaled_edge, unscaled_lengthy;
  RunRanks(plain, 1, {}, [&](ModelRunner& runner, Communicator&) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(unscaled_brief, runner.Step({Whole(0, brief)}));
    LOCKSTEP_ASSIGN_OR_RETURN(unscaled_edge, runner.Step({Whole(1, edge)}));
    LOCKSTEP_ASSIGN_OR_RETURN(unscaled_lengthy, runner.Step({Whole(2, lengthy)}));
    return absl::OkStatus();
  });
  RunRanks(dynamic, 1, {}, [&](ModelRunner& runner, Communicator&) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(const Logits both, runner.Step({Whole(0, lengthy), Whole(1, brief)}));
    ExpectSameBits(Logits(both.begin() + 150, both.end()), unscaled_brief, "beside a long one");
    LOCKSTEP_ASSIGN_OR_RETURN(const Logits trained, runner.Step({Whole(2, edge)}));
    ExpectSameBits(trained, unscaled_edge, "of the trained length");
    LOCKSTEP_ASSIGN_OR_RETURN(const Logits chunked, Feed(runner, 3, lengthy, 150, 16));
    ExpectSameBits(chunked, Logits(both.begin(), both.begin() + 150), "long, in chunks");
    double largest = 0;
    for (size_t c = 0; c < both[149].size(); ++c) {
      EXPECT_FALSE(std::isnan(both[149][c]));
      largest = std::max<double>(largest, std::abs(both[149][c] - unscaled_lengthy[149][c]));
    }
    EXPECT_GT(largest, 1e-3) << "scaling must change a long sequence";
    return absl::OkStatus();
  });
}

// The last layer leaves out rows without logits: neither the others' bits nor what later steps read
// of the cache may change.
TEST(DecoderTest, LogitsOfSomeRowsAreThoseOfAllRows) {
  const ModelSource source = MakeSource(BaseConfig());
  const std::vector<int32_t> a = Tokens(30, 101, 1), b = Tokens(20, 101, 2);
  const std::vector<Chunk> first = {{0, {a.begin(), a.begin() + 29}, 0, 30}, {1, b, 0, 20}};
  const std::vector<Chunk> second = {{0, {a[29]}, 29, 30}, {1, {7, 8, 9}, 20, 20}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (int ranks : {1, 2, 3}) {
      std::vector<Logits> seen;
      for (const bool last_rows_only : {false, true}) {
        RunnerOptions options;
        options.dtype = dtype;
        options.last_rows_only = last_rows_only;
        options.num_threads = 2;
        options.padding = 2;
        RunRanks(source, ranks, options,
                 [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
                   LOCKSTEP_ASSIGN_OR_RETURN(Logits one, runner.Step(first));
                   LOCKSTEP_ASSIGN_OR_RETURN(Logits two, runner.Step(second));
                   if (communicator.rank() != 0) return absl::OkStatus();
                   if (!last_rows_only) {
                     one = {one[28], one[48]};
                     two = {two[0], two[3]};
                   }
                   seen.push_back(std::move(one));
                   seen.push_back(std::move(two));
                   return absl::OkStatus();
                 });
      }
      ASSERT_EQ(seen.size(), 4u);
      EXPECT_EQ(seen[0], seen[2]) << ranks << " ranks";
      EXPECT_EQ(seen[1], seen[3]) << ranks << " ranks";
    }
  }
}

TEST(DecoderTest, EmptyStepsAreNoWork) {
  for (int ranks : {1, 2}) {
    RunRanks(MakeSource(BaseConfig()), ranks, {}, [](ModelRunner& runner, Communicator&) {
      const absl::StatusOr<Logits> logits = runner.Step({});
      EXPECT_TRUE(!logits.ok() || logits->empty());
      return logits.status();
    });
  }
}

TEST(DecoderTest, RefusesIdsAndPositionsOutOfRangeOnEveryRank) {
  RunRanks(MakeSource(BaseConfig()), 2, {}, [](ModelRunner& runner, Communicator&) {
    const absl::Status id = runner.Step({{0, {3, 101}, 0, 2}}).status();
    EXPECT_EQ(id.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(id.message(), "token id 101 is not in [0, 101)");
    EXPECT_EQ(runner.Step({{0, {3}, 512, 1}}).status().message(),
              "position 512 is not in [0, 512)");
    return runner.Step({{1, {3}, 0, 1}}).status();  // and all go on
  });
}

// A communicator of one rank that gives up at its n-th sum.
class FailingCommunicator : public Communicator {
 public:
  explicit FailingCommunicator(int sums) : sums_(sums) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string host() const override { return "here"; }
  int ranks_on_host() const override { return 1; }
  int first_rank_on_host() const override { return rank(); }
  absl::Status AllReduceSum(float*, int64_t) override {
    return sums_-- > 0 ? absl::OkStatus() : absl::AbortedError("rank 1 is gone");
  }
  absl::Status AllGather(const void*, int64_t, void*) override { return absl::OkStatus(); }
  absl::Status AllGatherV(const void*, std::span<const int64_t>, void*) override {
    return absl::OkStatus();
  }
  absl::Status GatherV(const void*, std::span<const int64_t>, void*, int) override {
    return absl::OkStatus();
  }
  absl::Status Broadcast(void*, int64_t, int) override { return absl::OkStatus(); }
  absl::Status Barrier() override { return absl::OkStatus(); }

 private:
  int sums_;
};

TEST(DecoderTest, ReturnsTheErrorOfACollective) {
  const ModelSource source = MakeSource(BaseConfig());
  for (int sums = 0; sums < 5; ++sums) {  // embedding, and two of each layer
    FailingCommunicator communicator(sums);
    auto runner = ModelRunner::Create(source, {}, communicator);
    ASSERT_TRUE(runner.ok()) << runner.status();
    EXPECT_EQ((*runner)->Step({{0, {1}, 0, 1}}).status(), absl::AbortedError("rank 1 is gone"));
  }
}

absl::Status LoadStatus(const ModelSource& source, DType dtype) {
  FailingCommunicator communicator(0);
  RunnerOptions options;
  options.dtype = dtype;
  return ModelRunner::Create(source, options, communicator).status();
}

TEST(DecoderTest, LoadErrorsNameWhatIsWrong) {
  MemoryCheckpoint* weights = nullptr;
  const ModelSource source = MakeSource(BaseConfig(), &weights);
  EXPECT_EQ(LoadStatus(source, DType::kF16).message(),
            "float16 is not supported on cpu; use bfloat16 or float32");
  weights->Remove("model.layers.1.mlp.down_proj.weight");
  const absl::Status status = LoadStatus(source, DType::kF32);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(status.message()).find("model.layers.1.mlp.down_proj.weight"),
            std::string::npos)
      << status;
}

TEST(DecoderTest, WeightBytesAreThoseRead) {
  for (const NamedConfig& named : Configs()) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      MemoryCheckpoint* weights = nullptr;
      const ModelSource source = MakeSource(named.config, &weights);
      RunnerOptions options;
      options.dtype = dtype;
      RunRanks(source, 3, options, [&](ModelRunner& runner, Communicator&) {
        int64_t bytes = 0;
        for (const MemoryCheckpoint::Rectangle& r : weights->ReadByThisThread()) {
          bytes += r.rows.size() * r.cols.size() * SizeOf(r.dtype);
          const bool is_matrix = weights->Find(r.name)->shape.size() == 2;
          EXPECT_EQ(r.dtype, is_matrix ? dtype : DType::kF32) << r.name;
        }
        EXPECT_EQ(runner.decoder().weight_bytes(), bytes) << named.name;
        return absl::OkStatus();
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
