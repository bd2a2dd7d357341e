// The whole engine on GPUs, one a rank, under mpirun: the reference checkpoints, and random request
// mixes against the engine on the CPU.
#include <cmath>
#include <cstdio>
#include <functional>

#include "parallel/local_communicator.h"
#include "tests/model/golden_files.h"
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
  // move by some hundredths.
  const double tolerance = exact ? 1e-4 : 0.15;
  if (!std::filesystem::exists(GoldenFolder())) GTEST_SKIP() << "no " << GoldenFolder();
  for (const char* const name : kGoldenCases) {
    const std::string folder = GoldenFolder() + name;
    const Golden golden = VALUE_OR_ABORT(ReadGolden(folder));
    const ModelSource source = VALUE_OR_ABORT(OpenModel(folder, LoadFormat::kAuto));
    if (source.config.num_query_heads < job->size()) continue;
    for (const bool small : {false, true}) {
      EngineOptions options;
      options.dtype = GetParam();
      options.max_num_batched_tokens = small ? 7 : 2048;  // chunked prefill
      options.cuda_graphs = !small;
      options.check_attention = small && !exact;  // fails the run where kernels disagree
      const GoldenResult result = RunGolden(source, golden, options, exact ? 1e-3 : 2 * tolerance);
      if (job->rank() != 0) continue;
      std::printf(
          "%-18s %s, %d GPU%s%s: logits differ by %.2e at most, %d of %d greedy ids equal\n", name,
          std::string(Name(GetParam())).c_str(), job->size(), job->size() == 1 ? "" : "s",
          small ? ", chunks of 7" : "", result.difference, static_cast<int>(result.equal),
          static_cast<int>(result.compared));
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

// Preemption, prefix hits, chunks, graphs, cancellation, one or two steps in flight. In float32 the
// GPUs' sums differ from the CPU's in the last bits, which decides a draw in a million.
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

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
