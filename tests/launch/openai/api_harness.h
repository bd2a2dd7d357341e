// The API over an engine whose answers a test knows, or over a small real one.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "launch/openai/api_server.h"
#include "parallel/communicator.h"
#include "tests/launch/openai/fake_exchange.h"

namespace lockstep {

// Of the text tests/data/tokenizer/byte_fallback.json knows; further pieces get these ids.
inline constexpr int32_t kFirstPiece = 300;
inline constexpr int32_t kEndToken = 2;  // </s>

struct HarnessOptions {
  // Tokens of their own behind byte_fallback.json's: a prompt [kFirstPiece - 1] is answered
  // kFirstPiece, kFirstPiece + 1, ..., and behind the last piece kEndToken.
  std::vector<std::string> pieces;
  // What follows a token, where it is not the next id.
  std::map<int32_t, int32_t> next;
  std::string chat_template;  // empty: none
  double step_seconds = 0;    // what a step takes, at least
  int64_t fail_at_step = 0;   // 0: no failure
  int64_t max_model_len = 4096;
  int64_t max_num_seqs = 8;
  OpenAiOptions api;
  // Instead of all that: a real engine, and no tokenizer.
  std::function<absl::StatusOr<std::unique_ptr<Engine>>(Communicator&)> make_engine;
  ModelConfig config;  // of it
};

// Counts what it is told.
struct CountingObserver : ServingObserver {
  void OnSubmitted(int64_t) override { ++submitted; }
  void OnAdmitted(double seconds) override {
    EXPECT_GE(seconds, 0);
    ++admitted;
  }
  void OnRefused(int http_status) override {
    last_refusal = http_status;
    ++refused;
  }
  void OnFirstToken(double) override { ++first_tokens; }
  void OnNextToken(double) override { ++next_tokens; }
  void OnFinished(const FinishedChoice& choice) override {
    generated += choice.generated_tokens;
    ++finished;
    if (choice.reason == FinishReason::kCancelled) ++cancelled;
  }
  std::atomic<int64_t> submitted = 0, admitted = 0, refused = 0, first_tokens = 0, next_tokens = 0;
  std::atomic<int64_t> finished = 0, cancelled = 0, generated = 0;
  std::atomic<int> last_refusal = 0;
};

class ApiHarness {
 public:
  explicit ApiHarness(HarnessOptions options);
  ~ApiHarness();

  using Client = std::shared_ptr<FakeExchange>;
  // Sends and returns at once.
  Client Send(const std::string& method, const std::string& path, const std::string& body,
              const HttpHeaders& headers = {});
  Client Send(const std::string& path, const Json& body) { return Send("POST", path, body.dump()); }
  // Waits for the answer.
  Client Post(const std::string& path, const Json& body);
  Client Completion(const Json& body) { return Post("/v1/completions", body); }
  Client Chat(const Json& body) { return Post("/v1/chat/completions", body); }

  OpenAiApi& api() { return *api_; }
  Engine& engine() { return *engine_; }
  CountingObserver& observer() { return observer_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  // The engine's own end, as of `lockstep serve`; returned by its Run.
  absl::Status StopEngine();
  // Waits for its end by a failure.
  absl::Status WaitForFailure();
  void DropApi() { api_ = nullptr; }
  // Waits until the engine runs nothing and every block is free; a test failure after 10 s.
  void ExpectAllFree();
  // Waits until `holds`, at most so long.
  static bool Within(double seconds, const std::function<bool()>& holds);

 private:
  HarnessOptions options_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatFormat> chat_;
  GenerationConfig generation_;
  std::unique_ptr<Engine> engine_;
  int64_t num_blocks_ = 0;
  CountingObserver observer_;
  std::unique_ptr<OpenAiApi> api_;
  absl::Status run_status_;
  std::thread engine_thread_;
};

// The joined text of one choice of a stream of completions, and its finish_reason, which must be
// there once.
struct StreamedChoice {
  std::string text;
  std::string finish;
  Json logprobs = Json::array();  // the events' that are not null
};
StreamedChoice JoinCompletion(const std::vector<Json>& events, int64_t index = 0);
StreamedChoice JoinChat(const std::vector<Json>& events, int64_t index = 0);

}  // namespace lockstep
