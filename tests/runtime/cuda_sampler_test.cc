// The sampler on one GPU against the one on the host.
#include "parallel/local_communicator.h"
#include "tests/runtime/cuda_sampler_checks.h"

namespace lockstep {
namespace {

class CudaSamplerTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no GPU is visible";
  }
  // On a thread of its own, as ranks are.
  void OnRank(const std::function<void(TestRank)>& check) {
    const auto statuses = RunLocalRanks(1, [&](Communicator& communicator) -> absl::Status {
      LOCKSTEP_RETURN_IF_ERROR(SelectCudaDevice(0).status());
      LOCKSTEP_ASSIGN_OR_RETURN(const OwnedCudaStream stream, OwnedCudaStream::Create());
      check({.communicator = communicator, .nccl = nullptr, .stream = stream.get()});
      return Synchronize(stream.get());
    });
    for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_F(CudaSamplerTest, MixesOfAllKinds) { OnRank(CheckMixes); }

TEST_F(CudaSamplerTest, ManyRowsOfALargeVocabulary) {
  OnRank([](TestRank rank) {
    constexpr int64_t kVocabSize = 152064;
    constexpr int64_t kRows = 256;
    SamplerPair pair(rank, kVocabSize, kRows, 0);
    StepMaker maker(kVocabSize, 5);
    TestStep step;
    for (int i = 0; i < 8; ++i) step.logits.push_back(maker.Logits());
    for (int64_t i = 0; i < kRows; ++i) {
      step.rows.push_back(maker.Row(i % 8));
      // As many best ids as there is room for.
      if (step.rows.back().num_logprobs > 5) step.rows.back().num_logprobs = 20;
    }
    pair.Check(step, "256 rows");
  });
}

// The noise alone decides: many draws that the host's sampler makes, too.
TEST_F(CudaSamplerTest, DrawsFromEqualLogits) {
  OnRank([](TestRank rank) {
    constexpr int64_t kVocabSize = 2000;
    constexpr int64_t kRows = 1000;
    SamplerPair pair(rank, kVocabSize, kRows, 0);
    TestStep step;
    step.logits.emplace_back(kVocabSize, 1.25f);
    for (int64_t i = 0; i < kRows; ++i) {
      step.rows.push_back({.position = static_cast<int32_t>(i), .seed = 3, .temperature = 1});
    }
    pair.Check(step, "equal logits");
  });
}

TEST_F(CudaSamplerTest, StepsWithoutRowsAndTokensOfTheHost) {
  OnRank([](TestRank rank) {
    SamplerPair pair(rank, 50, 8, 0);
    TestStep nothing;
    nothing.logits.emplace_back(50, 1.0f);
    pair.Check({nothing, StepMaker(50, 1).Step(4)}, "no rows");
    auto tokens = DeviceBuffer::Create(6 * 4, "last tokens");
    ASSERT_TRUE(tokens.ok());
    CHECKED(FillBytesAsync(tokens->data(), 0, 24, rank.stream));
    CHECKED(pair.device().PutTokens(std::vector<int32_t>{4, 1}, std::vector<int32_t>{7, 8},
                                    tokens->as<int32_t>()));
    CHECKED(pair.device().PutTokens(std::vector<int32_t>{1, 0, 5}, std::vector<int32_t>{9, -1, 3},
                                    tokens->as<int32_t>()));
    std::vector<int32_t> last(6);
    CHECKED(CopyAsync(last.data(), tokens->data(), 24, rank.stream));
    CHECKED(Synchronize(rank.stream));
    EXPECT_EQ(last, (std::vector<int32_t>{0, 9, 0, 0, 7, 3}));
  });
}

}  // namespace
}  // namespace lockstep
