// A decode step in one kernel against double precision, rounded where the kernel rounds.
#include "tests/model/row_step_model.h"

namespace lockstep {
namespace {

class RowStepTest : public CudaTest {
 protected:
  // Launches at these lengths, one after the other.
  void Check(const RowModelSizes& sizes, const std::vector<int64_t>& lengths);
};

void RowStepTest::Check(const RowModelSizes& sizes, const std::vector<int64_t>& lengths) {
  SCOPED_TRACE(absl::StrFormat("E %d, heads %d / %d of %d, F %d, V %d, %s, window %d", sizes.hidden,
                               sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate,
                               sizes.vocab, Name(sizes.dtype), sizes.window));
  RowModel model(sizes, stream());
  const RowStepModel description = model.Description();
  ASSERT_TRUE(RowStep::Check(description).ok()) << RowStep::Check(description);
  auto step = RowStep::Create(description, nullptr, num_multiprocessors_, stream());
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_STATUS_OK(step->SetCaches(model.Caches(), stream()));
  RowModelInputs inputs(model, stream());
  CudaMatrix logits(1, sizes.vocab, DType::kF32);
  for (const int64_t length : lengths) {
    SCOPED_TRACE(absl::StrFormat("length %d", length));
    inputs.SetLength(length, stream());
    const auto launch = [&] {
      logits.Poison(stream());
      EXPECT_STATUS_OK(
          step->Launch(inputs.Get(model.hidden[0].view().data, logits.view().data), stream()));
      logits.Download(stream());
      return logits.Bits();
    };
    const std::string bits = launch();
    EXPECT_TRUE(launch() == bits) << "the same step gave other bits";
    if (length == 0) continue;  // padding: it ends, and writes nothing (checked below)
    const std::vector<double> expected = model.Reference(length);
    const double error = RelativeError(RowValues(logits, 0), expected);
    EXPECT_LT(error, sizes.dtype == DType::kBF16 ? 2e-2 : 3e-3);
    model.ExpectCache(length, stream());
    if (HasFailure()) return;
  }
}

TEST_F(RowStepTest, MatchesDoublePrecision) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Check({.hidden = 256,
           .heads = 4,
           .kv_heads = 2,
           .head_dim = 64,
           .intermediate = 512,
           .vocab = 1000,
           .dtype = dtype},
          {1, 2, 64, 65, 300, 2000});
    Check({.hidden = 1792,
           .heads = 14,
           .kv_heads = 2,
           .head_dim = 128,
           .intermediate = 1184,
           .vocab = 777,
           .dtype = dtype,
           .has_bias = true},
          {1, 513, 17});
    Check({.hidden = 576,
           .heads = 9,
           .kv_heads = 3,
           .head_dim = 64,
           .intermediate = 1536,
           .vocab = 2000,
           .dtype = dtype,
           .has_head_norm = true},
          {0, 5, 129, 0, 6});
  }
}

// Several chunks a warp, of every product.
TEST_F(RowStepTest, TakesLongRows) {
  Check({.hidden = 4352,
         .heads = 8,
         .kv_heads = 4,
         .head_dim = 64,
         .intermediate = 200,
         .vocab = 300},
        {70});
  Check({.hidden = 264,
         .heads = 40,
         .kv_heads = 8,
         .head_dim = 128,
         .intermediate = 4600,
         .vocab = 40},
        {70});
  Check({.hidden = 64,
         .heads = 2,
         .kv_heads = 1,
         .head_dim = 32,
         .intermediate = 18944,
         .vocab = 133},
        {9});
  // Fewer words than blocks.
  Check({.hidden = 64, .heads = 2, .kv_heads = 2, .head_dim = 8, .intermediate = 9480, .vocab = 6},
        {9});
  Check({.hidden = 72,
         .heads = 3,
         .kv_heads = 1,
         .head_dim = 24,
         .intermediate = 19200,
         .vocab = 264},
        {3});
}

TEST_F(RowStepTest, TakesOddHeadsWindowsAndCaps) {
  // Ragged groups, head_dim 80 and 256, partial rotation, windows, soft-cap, other block sizes.
  Check({.hidden = 320,
         .heads = 7,
         .kv_heads = 3,
         .head_dim = 80,
         .intermediate = 640,
         .vocab = 500,
         .rotary_dim = 32},
        {1, 200, 1000});
  Check({.hidden = 512,
         .heads = 15,
         .kv_heads = 1,
         .head_dim = 256,
         .intermediate = 640,
         .vocab = 500,
         .window = 100,
         .softcap = 5},
        {1, 99, 100, 101, 1500});
  Check({.hidden = 512,
         .heads = 5,
         .kv_heads = 5,
         .head_dim = 40,
         .intermediate = 640,
         .vocab = 500,
         .has_head_norm = true,
         .window = 16,
         .block_size = 24},
        {1, 16, 17, 700, 4000});
}

TEST_F(RowStepTest, RefusesByName) {
  const auto refusal = [&](auto change) {
    RowStepModel model{.num_layers = 2,
                       .hidden_size = 256,
                       .head_dim = 64,
                       .kv_groups = {{0, 2}, {2, 4}},
                       .intermediate = 512,
                       .vocab = 1000,
                       .block_size = 16,
                       .max_blocks = 4,
                       .layers = {}};
    change(model);
    return RowStep::Check(model);
  };
  EXPECT_TRUE(refusal([](RowStepModel&) {}).ok());
  const auto refused = [&](auto change) {
    return refusal(change).code() == absl::StatusCode::kUnimplemented;
  };
  EXPECT_TRUE(refused([](RowStepModel& m) { m.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.hidden_size = 260; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.hidden_size = 20000; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.intermediate = 19208; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.head_dim = 512; }));
  EXPECT_TRUE(refused([](RowStepModel& m) { m.kv_groups = {{0, 16}}; }));
  // The rows of o would have fewer stages than the kernel's loop.
  EXPECT_TRUE(refused([](RowStepModel& m) { m.hidden_size = 8192; }));
  EXPECT_TRUE(refused([](RowStepModel& m) {
    m.kv_groups.clear();
    for (int64_t h = 0; h < 129; ++h) m.kv_groups.push_back({h, h + 1});
  }));
}

}  // namespace
}  // namespace lockstep
