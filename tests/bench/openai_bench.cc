// OpenAI API: what one streamed token costs between the engine's callback and HttpExchange::Write,
// 256 streams at once. The engine is made up; nothing is sent.
//
// Processor time of the whole process: the callback's side (a push to a queue) and the responder's
// (detokenising, JSON). for_25600 is the share of a core that 256 streams of 100 tokens/s take;
// HTTP comes on top (http_bench).
#include <benchmark/benchmark.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "launch/openai/api_server.h"
#include "runtime/core/file.h"
#include "runtime/core/log.h"

namespace lockstep {
namespace {

constexpr int64_t kStreams = 256;

// Keeps what it is asked; Step gives each request one token.
class MadeUpEngine : public Engine {
 public:
  int64_t max_model_len() const override { return int64_t{1} << 30; }
  absl::StatusOr<RequestId> Submit(Request request) override {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
    return static_cast<RequestId>(requests_.size());
  }
  void Cancel(RequestId) override {}
  void OnDelivered(std::function<void()> callback) override { on_delivered_ = std::move(callback); }
  absl::Status RunUntilIdle() override { return absl::OkStatus(); }
  absl::Status Run() override { return absl::OkStatus(); }
  void RequestStop() override {}
  absl::Status Stop() override { return absl::OkStatus(); }
  absl::Status Follow() override { return absl::OkStatus(); }
  EngineStats stats() const override { return {}; }

  size_t num_requests() {
    const std::lock_guard lock(mutex_);
    return requests_.size();
  }
  void Step(int32_t token) {
    for (const Request& request : requests_) {
      RequestEvent event{.id = 1, .choice = 0, .token = token};
      if (const auto count = request.sampling.num_logprobs; count.has_value()) {
        event.logprobs = PositionLogprobs{{token, -0.5f}, {}};
        for (int32_t i = 0; i < *count; ++i) event.logprobs->top.push_back({token + i, -1.5f});
      }
      request.on_event(event);
    }
    on_delivered_();
  }

 private:
  std::mutex mutex_;
  std::vector<Request> requests_;
  std::function<void()> on_delivered_;
};

class CountingExchange : public HttpExchange {
 public:
  CountingExchange(HttpRequest request, std::atomic<int64_t>* num_writes)
      : request_(std::move(request)), num_writes_(num_writes) {}

  const HttpRequest& request() const override { return request_; }
  void Respond(int status, const HttpHeaders&, std::string body) override {
    if (status != 200 && status != 503) std::fprintf(stderr, "%d %s\n", status, body.c_str());
  }
  void Begin(int, const HttpHeaders&) override {}
  void Write(std::string) override { num_writes_->fetch_add(1); }
  void End() override {}
  bool gone() const override { return false; }
  void OnGone(std::function<void()>) override {}

 private:
  const HttpRequest request_;
  std::atomic<int64_t>* const num_writes_;
};

void BM_Stream(benchmark::State& state, const char* path, const char* body) {
  SilenceLog();
  const auto text =
      ReadFile(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/byte_fallback.json");
  const auto tokenizer = *Tokenizer::FromJson(*ParseJson(*text, "tokenizer"), "tokenizer");
  const auto chat = *ChatFormat::Create({"bench", "{{ messages[0].content }}", "", {}});
  ModelConfig config;
  config.vocab_size = tokenizer->vocab_size();
  const GenerationConfig generation;
  const ServedModel model{.config = &config,
                          .generation = &generation,
                          .tokenizer = tokenizer.get(),
                          .chat = chat.get()};
  OpenAiOptions options;
  options.served_model_names = {"a-model-with-a-name-of-usual-length"};
  MadeUpEngine engine;
  std::atomic<int64_t> num_writes = 0;
  auto api = *OpenAiApi::Create(engine, model, options, nullptr);
  for (int64_t i = 0; i < kStreams; ++i) {
    HttpRequest request;
    request.method = "POST";
    request.path = path;
    request.body = body;
    api->Handle(std::make_shared<CountingExchange>(std::move(request), &num_writes));
  }
  while (engine.num_requests() < kStreams) std::this_thread::yield();
  const int32_t token = *tokenizer->TokenToId("▁cat");
  for (auto _ : state) {
    const int64_t before = num_writes.load();
    engine.Step(token);
    while (num_writes.load() < before + kStreams) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  const double tokens = static_cast<double>(state.iterations() * kStreams);
  state.counters["per_token"] =
      benchmark::Counter(tokens, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["for_25600"] =
      benchmark::Counter(tokens / 25600, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

constexpr char kChats[] = "/v1/chat/completions";
BENCHMARK_CAPTURE(BM_Stream, completion, "/v1/completions", R"({"prompt": "a", "stream": true,
    "max_tokens": 100000000})")
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(BM_Stream, chat, kChats, R"({"messages": [{"role": "user", "content": "a"}],
    "stream": true})")
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(BM_Stream, chat_stop_strings, kChats, R"({"stream": true,
    "messages": [{"role": "user", "content": "a"}], "stop": ["###", "\nUser:"]})")
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(BM_Stream, chat_tools, kChats, R"({"stream": true,
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "f"}}]})")
    ->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(BM_Stream, chat_logprobs_5, kChats, R"({"stream": true,
    "messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 5})")
    ->MeasureProcessCPUTime();

}  // namespace
}  // namespace lockstep

BENCHMARK_MAIN();
