#include "attention/selector.h"

#include <gtest/gtest.h>

#include "runtime/core/cuda_device.h"

namespace lockstep {
namespace {

AttentionRequirements Plain() {
  return {.kv_dtype = DType::kBF16, .head_dim = 64, .block_size = 16};
}

class SelectorTest : public testing::Test {
 protected:
  ThreadPool pool_{1};

  std::string Error(const AttentionRequirements& requirements, std::string_view choice,
                    absl::StatusCode code) {
    const auto selection = SelectBackend(requirements, choice, pool_);
    EXPECT_EQ(selection.status().code(), code) << selection.status();
    return std::string(selection.status().message());
  }
};

TEST_F(SelectorTest, TakesTheFirstOfTheDeviceThatFits) {
  const auto selection = SelectBackend(Plain(), "", pool_);
  ASSERT_TRUE(selection.ok()) << selection.status();
  EXPECT_EQ(selection->backend->name(), "cpu");
  EXPECT_EQ(selection->report.chosen, "cpu");
  EXPECT_EQ(selection->report.graph_support, GraphSupport::kNever);
  EXPECT_TRUE(selection->report.refused.empty());
  EXPECT_EQ(selection->report.ToString(), "attention backend: cpu");
}

TEST_F(SelectorTest, CudaIsThereWhereItIsBuilt) {
  AttentionRequirements requirements = Plain();
  requirements.device = "cuda";
  requirements.activation_dtype = requirements.kv_dtype = DType::kBF16;
  requirements.sliding_window = true;
  const auto report = ChooseBackend(requirements, "");
  if (!BuiltWithCuda()) {
    EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
    return;
  }
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->chosen, "cuda");
  EXPECT_EQ(report->graph_support, GraphSupport::kAlways);
  EXPECT_EQ(ChooseBackend(requirements, "cpu").status().code(), absl::StatusCode::kUnimplemented);
  requirements.activation_dtype = DType::kF32;
  EXPECT_EQ(ChooseBackend(requirements, "").status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(SelectorTest, TheCpuBackendRefusesAnFp8Cache) {
  AttentionRequirements requirements = Plain();
  requirements.kv_dtype = DType::kF8E4M3;
  const std::string error = Error(requirements, "", absl::StatusCode::kUnimplemented);
  EXPECT_NE(error.find("cpu: KV cache dtype fp8_e4m3 is not supported"), std::string::npos)
      << error;
  EXPECT_TRUE(SelectBackend(requirements, "reference", pool_).ok());
}

TEST_F(SelectorTest, TakesTheNamedOne) {
  const auto selection = SelectBackend(Plain(), "reference", pool_);
  ASSERT_TRUE(selection.ok()) << selection.status();
  EXPECT_EQ(selection->backend->name(), "reference");
}

TEST_F(SelectorTest, TellsEveryReason) {
  AttentionRequirements requirements = Plain();
  requirements.activation_dtype = DType::kF16;
  requirements.head_dim = 1024;
  requirements.block_size = 0;
  requirements.alibi = true;
  requirements.sinks = true;
  requirements.non_causal = true;
  const std::string message = Error(requirements, "", absl::StatusCode::kUnimplemented);
  for (const char* reason :
       {"cpu: ", "activation dtype float16 is not supported (supported: float32)",
        "head_dim 1024 is outside 1 to 512", "block size 0 is not a positive multiple of 1",
        "no support for ALiBi", "no support for attention sinks",
        "no support for non-causal attention"}) {
    EXPECT_NE(message.find(reason), std::string::npos) << reason << " in " << message;
  }
  EXPECT_EQ(message.find("reference"), std::string::npos) << "the reference is by name only";
}

TEST_F(SelectorTest, ANamedBackendThatDoesNotFitIsNotReplaced) {
  AttentionRequirements requirements = Plain();
  requirements.alibi = true;
  const std::string message = Error(requirements, "reference", absl::StatusCode::kUnimplemented);
  EXPECT_NE(message.find("reference: no support for ALiBi"), std::string::npos) << message;
}

TEST_F(SelectorTest, UnknownNamesListTheKnownOnes) {
  const std::string message = Error(Plain(), "flash", absl::StatusCode::kInvalidArgument);
  EXPECT_NE(message.find("\"flash\""), std::string::npos) << message;
  EXPECT_NE(message.find("cpu, reference"), std::string::npos) << message;
}

TEST_F(SelectorTest, ADeviceWithoutBackendsIsNamed) {
  AttentionRequirements requirements = Plain();
  requirements.device = "tpu";
  EXPECT_NE(Error(requirements, "", absl::StatusCode::kInvalidArgument).find("\"tpu\""),
            std::string::npos);
  EXPECT_NE(Error(requirements, "cpu", absl::StatusCode::kInvalidArgument).find("\"tpu\""),
            std::string::npos);
}

TEST(ReasonsToRefuseTest, ComparesEveryCapability) {
  AttentionCapabilities can = {.activation_dtypes = {DType::kF32},
                               .kv_dtypes = {DType::kF32},
                               .min_head_dim = 32,
                               .max_head_dim = 256,
                               .head_dim_multiple = 32,
                               .block_size_multiple = 16};
  AttentionRequirements want = {.head_dim = 64, .block_size = 32};
  EXPECT_TRUE(ReasonsToRefuse(can, want).empty());
  const auto count = [&](const AttentionRequirements& requirements) {
    return ReasonsToRefuse(can, requirements).size();
  };
  auto changed = want;
  changed.kv_dtype = DType::kF16;
  EXPECT_EQ(count(changed), 1u);
  changed = want;
  changed.head_dim = 16;  // too small, and no multiple
  EXPECT_EQ(count(changed), 2u);
  changed = want;
  changed.block_size = 24;
  EXPECT_EQ(count(changed), 1u);
  for (bool AttentionRequirements::*feature :
       {&AttentionRequirements::sliding_window, &AttentionRequirements::logit_softcap,
        &AttentionRequirements::alibi, &AttentionRequirements::sinks,
        &AttentionRequirements::non_causal, &AttentionRequirements::deterministic}) {
    changed = want;
    changed.*feature = true;
    EXPECT_EQ(count(changed), 1u);
  }
  can.sliding_window = can.logit_softcap = can.alibi = can.sinks = can.non_causal = true;
  can.deterministic = true;
  want.sliding_window = want.logit_softcap = want.alibi = want.sinks = want.non_causal = true;
  want.deterministic = true;
  EXPECT_TRUE(ReasonsToRefuse(can, want).empty());
}

}  // namespace
}  // namespace lockstep
