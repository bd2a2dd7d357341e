// A decode step in one kernel over several ranks, under mpirun with a GPU a rank or, in turns, one
// GPU: against double precision, and many steps behind each other, bit for bit.
#include <cuda_runtime.h>
#include <unistd.h>

#include <chrono>

#include "tests/model/row_step_model.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {
namespace {

constexpr int64_t kHidden = 256, kMaxLaunches = 20;
constexpr int64_t kRowBytes = kHidden * 2;
constexpr DType kType = DType::kBF16;

class RowStepRanksTest : public testing::Test {
 protected:
  struct Steps {
    int64_t length;
    int launches;  // of the same step
  };

  void SetUp() override {
    if (!OnOneGpu() && !GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
    num_multiprocessors_ = VALUE_OR_ABORT(TakeGpu()).num_multiprocessors;
    stream_ = VALUE_OR_ABORT(OwnedCudaStream::Create());
    peers_ =
        VALUE_OR_ABORT(PeerWindows::Create(*job, kRowBytes, RowSumBytes(kHidden, job->size())));
  }
  void TearDown() override {
    if (peers_ == nullptr) return;
    OR_ABORT(Synchronize(stream()));
    OR_ABORT(job->Barrier());
    OR_ABORT(peers_->Close(*job));
  }
  CudaStream stream() const { return stream_.get(); }

  // Once a test: the words of its peers are one RowStep's.
  void Check(const RowModelSizes& sizes, const std::vector<Steps>& steps);
  // A step whose embedded token one rank has.
  void Launch(const RowStep& step, const RowModel& part, const RowModelInputs& inputs,
              float* logits);
  // A step that does not end ends the job.
  void WaitForSteps();
  // Logits of all ranks, from row 0.
  std::vector<double> Gather(const CudaMatrix& logits, int64_t vocab) const;

  int num_multiprocessors_ = 0;
  OwnedCudaStream stream_;
  std::unique_ptr<PeerWindows> peers_;
  DeviceBuffer hidden_;
  int num_launches_ = 0;
};

void RowStepRanksTest::Launch(const RowStep& step, const RowModel& part,
                              const RowModelInputs& inputs, float* logits) {
  // One rank has the token, each in turn; what others add is zero.
  const bool has_token = num_launches_++ % job->size() == job->rank();
  if (has_token) {
    OR_ABORT(CopyAsync(hidden_.data(), part.hidden[0].view().data, kRowBytes, stream()));
  } else {
    OR_ABORT(FillBytesAsync(hidden_.data(), 0, kRowBytes, stream()));
  }
  OR_ABORT(step.Launch(inputs.Get(hidden_.data(), logits), stream()));
}

void RowStepRanksTest::WaitForSteps() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(20);
  while (cudaStreamQuery(stream()) == cudaErrorNotReady) {
    if (Clock::now() > deadline) {
      peers_->Abort();
      OR_ABORT(absl::DeadlineExceededError("steps over ranks do not end"));
    }
    usleep(200);
  }
  OR_ABORT(Synchronize(stream()));
}

std::vector<double> RowStepRanksTest::Gather(const CudaMatrix& logits, int64_t vocab) const {
  const std::vector<double> mine = RowValues(logits, 0);
  const int64_t bytes = std::ssize(mine) * static_cast<int64_t>(sizeof(double));
  std::vector<int64_t> all_bytes(job->size());
  OR_ABORT(job->AllGather(&bytes, sizeof(bytes), all_bytes.data()));
  std::vector<double> all(vocab);
  int64_t total = 0;
  for (const int64_t b : all_bytes) total += b;
  LOCKSTEP_CHECK(total == vocab * static_cast<int64_t>(sizeof(double)));
  OR_ABORT(job->AllGatherV(mine.data(), all_bytes, all.data()));
  return all;
}

void RowStepRanksTest::Check(const RowModelSizes& sizes, const std::vector<Steps>& steps) {
  RowModel whole(sizes, stream());
  RowModel part = whole.Part(job->rank(), job->size(), stream());
  const RowStepModel description = part.Description();
  OR_ABORT(RowStep::Check(description));
  // Where ranks share a GPU, few blocks: all of all ranks' fit.
  const int blocks = OnOneGpu() ? 8 : num_multiprocessors_;
  RowStep step = VALUE_OR_ABORT(RowStep::Create(description, peers_.get(), blocks, stream()));
  OR_ABORT(step.SetCaches(part.Caches(), stream()));
  hidden_ = VALUE_OR_ABORT(DeviceBuffer::Create(kRowBytes, "embedded token"));
  RowModelInputs inputs(part, stream());
  CudaMatrix logits(kMaxLaunches, part.s.vocab, DType::kF32);
  for (const auto& [length, launches] : steps) {
    SCOPED_TRACE(absl::StrFormat("rank %d of %d, length %d", job->rank(), job->size(), length));
    LOCKSTEP_CHECK(launches <= kMaxLaunches);
    inputs.SetLength(length, stream());
    logits.Poison(stream());
    // The host waits behind all of them.
    for (int i = 0; i < launches; ++i) {
      Launch(step, part, inputs, static_cast<float*>(logits.view().data) + i * part.s.vocab);
    }
    WaitForSteps();
    logits.Download(stream());
    for (int i = 1; i < launches; ++i) {
      EXPECT_TRUE(logits.RowBits(i) == logits.RowBits(0)) << "launch " << i << " gave other bits";
    }
    // No return before the end: the other ranks gather, too.
    const std::vector<double> expected = whole.Reference(length);
    EXPECT_LT(RelativeError(Gather(logits, sizes.vocab), expected), 2e-2);
    part.TakeNewest(whole, length);
    part.ExpectCache(length, stream());
  }
}

TEST_F(RowStepRanksTest, MatchesDoublePrecision) {
  Check({.hidden = kHidden,
         .heads = 8,
         .kv_heads = 4,
         .head_dim = 64,
         .intermediate = 512,
         .vocab = 1000,
         .dtype = kType,
         .has_bias = true},
        {{1, 2}, {2, 2}, {70, 3}, {300, kMaxLaunches}});
}

// Ranks with different numbers of KV heads, of columns of down and of words.
TEST_F(RowStepRanksTest, TakesUnevenParts) {
  Check({.hidden = kHidden,
         .heads = 10,
         .kv_heads = 5,
         .head_dim = 40,
         .intermediate = 520,
         .vocab = 1001,
         .dtype = kType,
         .has_head_norm = true,
         .window = 100,
         .softcap = 5},
        {{1, 2}, {2, 2}, {70, 3}, {300, 5}});
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
