// A batch run over an engine whose answers are known: the window, a failure, an early end.
#include "launch/batch/batch_run.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>

#include "tests/launch/openai/api_harness.h"

namespace lockstep {
namespace {

class BatchRunTest : public testing::Test {
 protected:
  BatchRunTest() {
    char name[] = "/tmp/batch_run_test.XXXXXX";
    folder_ = mkdtemp(name);
    for (int i = 0; i < 20; ++i) harness_options_.pieces.push_back("p" + std::to_string(i));
    harness_options_.max_num_seqs = 4;
    harness_options_.api.max_queue = 1 << 20;
    harness_options_.api.logs_requests = false;
    options_.window.max_choices = 8;
  }
  ~BatchRunTest() override {
    if (options_.input_fd >= 0) close(options_.input_fd);
    std::filesystem::remove_all(folder_);
  }

  // `count` lines, each answered by 20 pieces.
  void Start(int count) {
    std::ofstream input(folder_ + "/in");
    for (int i = 0; i < count; ++i) {
      input << "{\"prompt\":[" << kFirstPiece - 1 << "],\"max_tokens\":100}\n";
    }
    input.close();
    options_.input_fd = open((folder_ + "/in").c_str(), O_RDONLY);
    options_.input_name = "in";
    harness_ = std::make_unique<ApiHarness>(harness_options_);
    output_ = *BatchOutput::Open(folder_ + "/out", 0);
    run_ = std::make_unique<BatchRun>(options_, finished_, count, *output_, harness_->api(),
                                      tokens_, [this] { ended_.set_value(); });
  }
  bool EndsWithin(double seconds) {
    return ended_.get_future().wait_for(std::chrono::duration<double>(seconds)) ==
           std::future_status::ready;
  }
  // Of the file; every one must be an answer.
  int64_t NumAnswers() {
    const auto read = output_->Read(/*retry_failed=*/false);
    EXPECT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->num_failed, 0);
    return read->num_ok;
  }

  std::string folder_;
  HarnessOptions harness_options_;
  BatchRunOptions options_;
  FinishedLines finished_;
  TokenCounter tokens_;
  std::unique_ptr<BatchOutput> output_;
  std::promise<void> ended_;
  std::unique_ptr<BatchRun> run_;
  std::unique_ptr<ApiHarness> harness_;  // goes first: the API answers into the run
};

TEST_F(BatchRunTest, ReadsNoMoreThanTheWindow) {
  harness_options_.step_seconds = 0.001;
  options_.window.max_choices = 6;
  Start(60);
  int64_t most = 0;
  while (run_->counts().num_ok < 50) {
    most = std::max(most, harness_->api().num_open());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_TRUE(EndsWithin(60));
  EXPECT_TRUE(run_->Flush().ok());
  EXPECT_TRUE(run_->complete());
  EXPECT_EQ(NumAnswers(), 60);
  EXPECT_LE(most, 6 + 1);  // the server counts a call a moment longer than its answer frees a place
  EXPECT_GT(most, 4) << "the engine was not full";
}

TEST_F(BatchRunTest, LinesThatAreDoneArePassedOver) {
  for (const int64_t line : {1, 2, 10}) finished_.done.Insert(line);
  finished_.num_ok = 3;
  Start(10);
  ASSERT_TRUE(EndsWithin(60));
  EXPECT_TRUE(run_->Flush().ok());
  EXPECT_EQ(NumAnswers(), 7);
  EXPECT_EQ(run_->counts().num_ok, 10);
  EXPECT_EQ(run_->counts().before, 3);
}

TEST_F(BatchRunTest, AFailureOfTheEngineLeavesNoRecordOfWhatWasOpen) {
  harness_options_.fail_at_step = 50;
  Start(100);
  EXPECT_FALSE(harness_->WaitForFailure().ok());
  run_->Abandon();
  ASSERT_TRUE(EndsWithin(10));
  EXPECT_TRUE(run_->Flush().ok());
  EXPECT_FALSE(run_->complete());
  EXPECT_GT(NumAnswers(), 0);
  EXPECT_LT(NumAnswers(), 100);
}

TEST_F(BatchRunTest, AnEarlyEndAnswersWhatWasRead) {
  harness_options_.step_seconds = 0.001;
  Start(5000);
  while (run_->counts().num_ok == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  run_->StopReading();
  ASSERT_TRUE(EndsWithin(60));
  EXPECT_TRUE(run_->Flush().ok());
  EXPECT_FALSE(run_->complete());
  EXPECT_EQ(harness_->api().num_open(), 0);
  EXPECT_EQ(NumAnswers(), run_->counts().num_ok);
}

}  // namespace
}  // namespace lockstep
