// The whole engine on GPUs, one a rank, under mpirun: the reference checkpoints, and random request
// mixes against the engine on the CPU.
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>

#include "model/checkpoint/tensor_names.h"
#include "parallel/local_communicator.h"
#include "tests/model/golden_files.h"
#include "tests/model/memory_checkpoint.h"
#include "tests/parallel/gpu_job.h"
#include "tests/runtime/random_schedule.h"

namespace lockstep {
namespace {

// COLLECTIVE. Rank 0 runs `lead` and stops; the others follow.
void RunOnGpus(const ModelSource& source, EngineOptions options,
               const std::function<absl::Status(Engine&)>& lead) {
  options.device = DeviceKind::kCuda;
  {
    const std::unique_ptr<Engine> engine = VALUE_OR_ABORT(Engine::Create(source, options, *job));
    if (job->rank() == 0) {
      OR_ABORT(lead(*engine));
      OR_ABORT(engine->Stop());
    } else {
      OR_ABORT(engine->Follow());
    }
  }
  OR_ABORT(job->Barrier());
}

class CudaEngineTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
  }
};

// The largest difference of a logit, and how many greedy ids are the reference's.
struct GoldenResult {
  double difference = 0;
  int64_t equal = 0;
  int64_t compared = 0;
};

GoldenResult Compare(const Golden& golden, const std::vector<Result>& scored,
                     const std::vector<Result>& greedy, double min_margin) {
  GoldenResult result;
  for (size_t i = 0; i < golden.prompts.size(); ++i) {
    const size_t vocab = golden.logits[i][0].size();
    Logits logits;
    for (size_t row = 0; row * vocab < scored[i].logits.size(); ++row) {
      const auto begin = scored[i].logits.begin() + static_cast<int64_t>(row * vocab);
      logits.emplace_back(begin, begin + static_cast<int64_t>(vocab));
    }
    result.difference = std::max(result.difference, LargestDifference(logits, golden.logits[i]));
    const std::vector<int32_t>& ids = greedy[i].tokens;
    EXPECT_EQ(ids.size(), golden.greedy[i].size());
    for (size_t t = 0; t < ids.size() && golden.margins[i][t] >= min_margin; ++t) {
      ++result.compared;
      if (ids[t] != golden.greedy[i][t]) break;
      ++result.equal;
    }
  }
  return result;
}

GoldenResult RunGolden(const ModelSource& source, const Golden& golden, EngineOptions options,
                       double min_margin) {
  GoldenResult result;
  options.kv_cache_memory_bytes = 32 << 20;
  options.max_num_seqs = 8;
  RunOnGpus(source, options, [&](Engine& engine) -> absl::Status {
    std::vector<Result> scored(golden.prompts.size()), greedy(golden.prompts.size());
    for (size_t i = 0; i < golden.prompts.size(); ++i) {
      SamplingParams sampling;
      sampling.temperature = 0;
      sampling.ignore_eos = true;
      sampling.max_tokens = std::ssize(golden.greedy[i]);
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(golden.prompts[i], sampling, &greedy[i])).status());
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Scored(golden.prompts[i], source.config.vocab_size, &scored[i])).status());
    }
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
    result = Compare(golden, scored, greedy, min_margin);
    return absl::OkStatus();
  });
  return result;
}

class CudaGoldenTest : public CudaEngineTest, public testing::WithParamInterface<DType> {};

TEST_P(CudaGoldenTest, MatchesTheReference) {
  const bool exact = GetParam() == DType::kF32;
  // In bfloat16 every activation is rounded to 8 bits: the logits of these models, up to 4 or so,
  // move by some hundredths. The parts of a sum over ranks are rounded, too, before they are added.
  const double tolerance = exact ? 1e-4 : job->size() == 1 ? 0.15 : 0.2;
  if (!std::filesystem::exists(GoldenFolder())) GTEST_SKIP() << "no " << GoldenFolder();
  for (const char* const name : kGoldenCases) {
    const std::string folder = GoldenFolder() + name;
    const Golden golden = VALUE_OR_ABORT(ReadGolden(folder));
    const ModelSource source = VALUE_OR_ABORT(OpenModel(folder, LoadFormat::kAuto));
    if (source.config.num_query_heads < job->size()) continue;
    for (const auto& [small, overlap_min_tokens] :
         {std::pair<bool, int64_t>{false, 0}, {true, 0}, {false, 2}, {true, 5}}) {
      if (overlap_min_tokens > 0 && job->size() == 1) continue;
      EngineOptions options;
      options.dtype = GetParam();
      options.max_num_batched_tokens = small ? 7 : 2048;  // chunked prefill
      options.cuda_graphs = !small;
      options.overlap_min_tokens = overlap_min_tokens;
      options.check_attention = small && !exact;  // fails the run where kernels disagree
      const GoldenResult result = RunGolden(source, golden, options, exact ? 1e-3 : 2 * tolerance);
      if (job->rank() != 0) continue;
      std::printf(
          "%-18s %s, %d GPU%s%s%s: logits differ by %.2e at most, %d of %d greedy ids equal\n",
          name, std::string(Name(GetParam())).c_str(), job->size(), job->size() == 1 ? "" : "s",
          small ? ", chunks of 7" : "", overlap_min_tokens > 0 ? ", sums beside products" : "",
          result.difference, static_cast<int>(result.equal), static_cast<int>(result.compared));
      EXPECT_LE(result.difference, tolerance) << name;
      EXPECT_EQ(result.equal, result.compared) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaGoldenTest, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

// Keys and values of 4 significant bits move the logits by tenths; something wrong, like a scale or
// a permuted head, by their own size of 4 or so. The kernels' own rounding is compared more
// closely.
TEST_F(CudaEngineTest, WithAnFp8CacheLogitsStayNearTheReference) {
  if (!std::filesystem::exists(GoldenFolder())) GTEST_SKIP() << "no " << GoldenFolder();
  for (const char* const name : kGoldenCases) {
    const std::string folder = GoldenFolder() + name;
    const Golden golden = VALUE_OR_ABORT(ReadGolden(folder));
    const ModelSource source = VALUE_OR_ABORT(OpenModel(folder, LoadFormat::kAuto));
    if (source.config.num_query_heads < job->size()) continue;
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      EngineOptions options;
      options.dtype = dtype;
      options.kv_cache_dtype = DType::kF8E4M3;
      options.check_attention = dtype == DType::kBF16;
      constexpr double kNoIds = INFINITY;
      const GoldenResult result = RunGolden(source, golden, options, kNoIds);
      if (job->rank() != 0) continue;
      std::printf("%-18s %s, fp8 cache: logits differ by %.2e at most\n", name,
                  std::string(Name(dtype)).c_str(), result.difference);
      EXPECT_LE(result.difference, 1.5) << name;
    }
  }
}

// Preemption, prefix hits, chunks, graphs, sums beside products, cancellation, one or two steps in
// flight. In float32 the GPUs' sums differ from the CPU's in the last bits, which decides a draw in
// a million.
TEST_F(CudaEngineTest, RandomMixesGetWhatTheCpuGivesThemAlone) {
  const int num_mixes = job->size() == 1 ? 40 : 12;
  constexpr float kTolerance = 2e-4f;
  constexpr int kMaxOdd = 1;
  const ModelSource source = TinySource(MixConfig());
  SchedulerStats sums;
  int choices = 0, odd = 0;
  for (int mix = 0; mix < num_mixes; ++mix) {
    Draw draw(static_cast<uint32_t>(mix));
    std::vector<Drawn> together = draw.Requests();
    EngineOptions options = draw.Options();
    options.cuda_graphs = mix % 3 != 2;
    // Prefill and decode rows mixed, in steps that overlap and steps that do not.
    options.overlap_min_tokens = std::array{0, 2, 5, 16}[mix % 4];
    std::vector<Drawn> alone = together;
    if (job->rank() == 0) {
      EngineOptions roomy;
      roomy.max_model_len = kMixMaxModelLen;
      roomy.enable_prefix_caching = false;
      ExpectOk(RunEngine(source.config, roomy, 1,
                         [&](Engine& engine) { return RunAlone(engine, alone); }));
    }
    RunOnGpus(source, options, [&](Engine& engine) -> absl::Status {
      LOCKSTEP_RETURN_IF_ERROR(RunTogether(engine, together, static_cast<uint32_t>(mix)));
      const SchedulerStats stats = engine.stats().scheduler;
      EXPECT_EQ(stats.num_free_blocks, options.num_gpu_blocks_override) << "mix " << mix;
      sums.num_preemptions += stats.num_preemptions;
      sums.prefix_cache_hit_tokens += stats.prefix_cache_hit_tokens;
      return absl::OkStatus();
    });
    for (size_t i = 0; job->rank() == 0 && i < alone.size(); ++i) {
      for (size_t c = 0; c < alone[i].results.size(); ++c) {
        ++choices;
        if (SameChoice(together[i].results[c], alone[i].results[c], kTolerance)) continue;
        ++odd;
        std::printf("mix %d, request %zu, choice %zu differs from the CPU's\n", mix, i, c);
        if (odd > kMaxOdd) ExpectSame(together[i], alone[i], absl::StrFormat("mix %d", mix));
      }
    }
  }
  if (job->rank() != 0) return;
  std::printf("%d choices of %d mixes, %d of them odd; %d preemptions, %d tokens of prefix hits\n",
              choices, num_mixes, odd, static_cast<int>(sums.num_preemptions),
              static_cast<int>(sums.prefix_cache_hit_tokens));
  EXPECT_LE(odd, kMaxOdd);
  EXPECT_GT(sums.num_preemptions, num_mixes / 2) << "the test is blind for preemption";
  EXPECT_GT(sums.prefix_cache_hit_tokens, 10 * num_mixes) << "the test is blind for prefix hits";
}

// 9 query heads over 3 KV heads: on 2 ranks (5 + 4) KV head 1 is on both. F and V split unevenly.
ModelConfig NineHeads() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 80;
  config.intermediate_size = 100;
  config.num_layers = 2;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 16;
  config.vocab_size = 121;
  config.max_position_embeddings = 2048;
  config.qk_norm = true;
  config.qkv_bias = true;
  config.o_bias = true;
  config.mlp_bias = true;
  config.layer_windows = {0, 0};
  return config;
}

// Its step sums over ranks in another way than steps of a few tokens.
constexpr int64_t kLongPrompt = 1100;

// Of one tensor every rectangle that is read has another first element.
class WrongCheckpoint : public MemoryCheckpoint {
 public:
  WrongCheckpoint(const ModelConfig& config, std::string tensor)
      : MemoryCheckpoint(config), tensor_(std::move(tensor)) {}
  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    LOCKSTEP_RETURN_IF_ERROR(MemoryCheckpoint::Read(name, rows, cols, dst));
    if (name != tensor_) return absl::OkStatus();
    const float wrong = 20;
    Convert(DType::kF32, &wrong, dst.dtype, dst.data, 1);
    return absl::OkStatus();
  }

 private:
  const std::string tensor_;
};

// COLLECTIVE. Prompts, one of `longest` tokens, a fork, and decode steps. Rank 1 has a wrong
// `tensor`, unless that is empty. This rank's status.
absl::Status RunChecked(EngineOptions options, int64_t longest, const std::string& tensor,
                        std::vector<Result>& results) {
  const ModelConfig config = NineHeads();
  ModelSource source{.path = "", .config = config, .generation = {}, .checkpoint = nullptr};
  source.checkpoint = std::make_unique<WrongCheckpoint>(config, job->rank() == 1 ? tensor : "");
  options.device = DeviceKind::kCuda;
  options.max_num_seqs = 8;
  options.kv_cache_memory_bytes = 32 << 20;
  options.poison_freed_blocks = true;
  const std::unique_ptr<Engine> engine = VALUE_OR_ABORT(Engine::Create(source, options, *job));
  if (job->rank() != 0) return engine->Follow();
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.ignore_eos = true;
  sampling.max_tokens = 12;
  Draw draw(5);
  results.resize(5);
  for (size_t i = 0; i < 3; ++i) {
    const int64_t length = i == 1 ? longest : draw.Int(3, 40);
    OR_ABORT(engine->Submit(Recorded(draw.Tokens(length), sampling, &results[i])).status());
  }
  sampling.n = 2;
  OR_ABORT(engine->Submit(RecordedChoices(draw.Tokens(21), sampling, &results[3])).status());
  LOCKSTEP_RETURN_IF_ERROR(engine->RunUntilIdle());
  return engine->Stop();
}

class CudaTpCheckTest : public CudaEngineTest,
                        public testing::WithParamInterface<std::pair<DType, DType>> {
 protected:
  void SetUp() override {
    CudaEngineTest::SetUp();
    if (job->size() < 2) GTEST_SKIP() << "--check-tp needs at least two ranks";
    options_.dtype = GetParam().first;
    options_.kv_cache_dtype = GetParam().second;
  }

  EngineOptions options_;
};

TEST_P(CudaTpCheckTest, RanksThatComputeWhatOneDoesAgree) {
  std::vector<Result> plain, checked, first;
  OR_ABORT(RunChecked(options_, kLongPrompt, "", plain));
  OR_ABORT(job->Barrier());
  options_.check_tp_steps = 1000;
  const absl::Status all = RunChecked(options_, kLongPrompt, "", checked);
  EXPECT_TRUE(all.ok()) << all;
  OR_ABORT(job->Barrier());
  // Back from looking at every tensor to graphs.
  options_.check_tp_steps = 3;
  const absl::Status some = RunChecked(options_, kLongPrompt, "", first);
  EXPECT_TRUE(some.ok()) << some;
  OR_ABORT(job->Barrier());
  if (job->rank() != 0) return;
  EXPECT_EQ(plain[1].tokens.size(), 12u);
  if (GetParam().first != DType::kF32) return;  // other kernels, by the size of a batch
  EXPECT_TRUE(checked == plain);
  EXPECT_TRUE(first == plain);
}

TEST_P(CudaTpCheckTest, AWrongWeightOfOneRankIsNamed) {
  options_.check_tp_steps = 3;
  options_.cuda_graphs = false;
  std::string all_ranks = "s 0";
  for (int rank = 1; rank < job->size(); ++rank) absl::StrAppend(&all_ranks, ", ", rank);
  const std::string of = absl::StrFormat(" of %d; the tolerance is ", job->size());
  const std::string one = " 1" + of, all = all_ranks + of;
  // A rank may norm rows for the others, too.
  const std::string some = "";
  const struct {
    std::string weight;
    std::string tensor;
    std::string ranks;
  } faults[] = {{LayerTensor(1, kQWeight), "layer 1 qkv", one},
                {LayerTensor(1, kOWeight), "layer 1 o_proj", all},
                {LayerTensor(0, kInputNorm), "layer 0 input_layernorm", some},
                {LayerTensor(0, kVWeight), "layer 0 qkv", one},
                {LayerTensor(0, kDownWeight), "layer 0 down_proj", all},
                {LayerTensor(0, kPostAttentionNorm), "layer 0 post_attention_layernorm", some},
                {LayerTensor(1, kUpWeight), "layer 1 gate_up", one},
                {kFinalNorm, "norm", some},
                {kLmHead, "logits", one}};
  const bool rare = GetParam().second == DType::kF16 || GetParam().second == DType::kF8E4M3;
  for (const int64_t longest : {int64_t{20}, kLongPrompt}) {
    if (longest == kLongPrompt && rare) continue;  // an engine a fault takes its time
    for (const auto& fault : faults) {
      std::vector<Result> results;
      const absl::Status status = RunChecked(options_, longest, fault.weight, results);
      OR_ABORT(job->Barrier());
      EXPECT_TRUE(absl::IsInternal(status)) << status;
      const std::string expected =
          absl::StrCat("--check-tp: step 1: ", fault.tensor, " is apart on rank", fault.ranks);
      EXPECT_NE(status.message().find(expected), absl::string_view::npos)
          << fault.weight << ", " << longest << " tokens: " << status;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaTpCheckTest,
                         testing::Values(std::pair{DType::kF32, DType::kF32},
                                         std::pair{DType::kBF16, DType::kBF16},
                                         std::pair{DType::kF16, DType::kF16},
                                         std::pair{DType::kBF16, DType::kF8E4M3}),
                         [](const auto& info) {
                           return absl::StrCat(std::string(Name(info.param.first)), "_cache_",
                                               std::string(Name(info.param.second)));
                         });

TEST_F(CudaEngineTest, ComparingOneRankIsRefused) {
  if (job->size() > 1) GTEST_SKIP() << "for one rank";
  EngineOptions options;
  options.device = DeviceKind::kCuda;
  options.check_tp_steps = 1;
  const absl::Status status = Engine::Create(MakeSource(NineHeads()), options, *job).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
