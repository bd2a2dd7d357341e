// The tiny checkpoints whose logits and greedy ids Hugging Face transformers computed, at every
// rank count, whole and in chunks through the paged pool.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

#include "tests/model/golden_files.h"
#include "tests/model/model_runner.h"

namespace lockstep {
namespace {

constexpr int kRankCounts[] = {1, 2, 3, 4, 8};
constexpr double kMaxError = 1e-4;   // float32 against float32
constexpr double kMinMargin = 1e-3;  // ids are compared up to the first step decided by less

// Steps of the greedy run that the margins decide beyond doubt.
size_t CertainSteps(const std::vector<double>& margins) {
  size_t steps = 0;
  while (steps < margins.size() && margins[steps] >= kMinMargin) ++steps;
  return steps;
}

struct Errors {
  double whole = 0;
  double chunked = 0;
};

// `ids`: whether the greedy ids are compared too.
Errors Compare(const ModelSource& source, const Golden& golden, int ranks,
               const RunnerOptions& options, bool ids) {
  Errors errors;
  RunRanks(
      source, ranks, options, [&](ModelRunner& runner, Communicator& communicator) -> absl::Status {
        for (size_t i = 0; i < golden.prompts.size(); ++i) {
          const std::vector<int32_t>& prompt = golden.prompts[i];
          const int request = static_cast<int>(3 * i);
          LOCKSTEP_ASSIGN_OR_RETURN(const Logits whole, runner.Prefill(request, prompt, 1000));
          LOCKSTEP_ASSIGN_OR_RETURN(const Logits chunked, runner.Prefill(request + 1, prompt, 7));
          std::vector<int32_t> greedy;
          if (ids) {
            LOCKSTEP_ASSIGN_OR_RETURN(greedy,
                                      runner.Greedy(request + 2, prompt, 7,
                                                    static_cast<int64_t>(golden.greedy[i].size())));
          }
          if (communicator.rank() != 0) continue;
          errors.whole = std::max(errors.whole, LargestDifference(whole, golden.logits[i]));
          errors.chunked = std::max(errors.chunked, LargestDifference(chunked, golden.logits[i]));
          for (size_t s = 0; ids && s < CertainSteps(golden.margins[i]); ++s) {
            EXPECT_EQ(greedy[s], golden.greedy[i][s]) << "prompt " << i << ", step " << s;
          }
        }
        return absl::OkStatus();
      });
  return errors;
}

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder_ = GoldenFolder() + GetParam();
    if (!std::filesystem::exists(folder_)) {
      GTEST_SKIP() << folder_
                   << " is not there (LOCKSTEP_SHARED names the folder that holds golden)";
    }
    absl::StatusOr<ModelSource> source = OpenModel(folder_, LoadFormat::kAuto);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
    absl::StatusOr<Golden> golden = ReadGolden(folder_);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }

  std::string folder_;
  ModelSource source_;
  Golden golden_;
};

TEST_P(GoldenTest, Float32AtEveryRankCount) {
  for (int ranks : kRankCounts) {
    if (ranks > source_.config.num_query_heads) continue;
    const Errors errors = Compare(source_, golden_, ranks, RunnerOptions(), /*ids=*/true);
    std::printf("golden float32  %-18s %d ranks  whole %.1e  chunks of 7 %.1e\n", GetParam(), ranks,
                errors.whole, errors.chunked);
    EXPECT_LE(errors.whole, kMaxError) << ranks << " ranks";
    EXPECT_LE(errors.chunked, kMaxError) << ranks << " ranks";
  }
}

TEST_P(GoldenTest, BFloat16) {
  RunnerOptions options;
  options.dtype = DType::kBF16;
  options.kv_dtype = DType::kBF16;
  for (int ranks : {1, 2}) {
    const Errors errors = Compare(source_, golden_, ranks, options, /*ids=*/false);
    std::printf("golden bfloat16 %-18s %d ranks  whole %.1e  chunks of 7 %.1e\n", GetParam(), ranks,
                errors.whole, errors.chunked);
    EXPECT_LE(errors.whole, 0.1) << ranks << " ranks";
    EXPECT_LE(errors.chunked, 0.1) << ranks << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GoldenTest, testing::ValuesIn(kGoldenCases), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace lockstep
