// A request of OpenAI's API: the first byte picks the path, the rest is the body. It goes through
// everything between an exchange and the engine and back; the engine here answers what the prompt
// makes it. Whatever comes in, the answer is one of those that clients know, and valid JSON.
#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "launch/openai/api_server.h"
#include "runtime/core/file.h"
#include "runtime/core/log.h"
#include "runtime/request_check.h"

namespace lockstep {
namespace {

constexpr char kTemplate[] =
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{{ m.content }}{% endfor %}";

// Answers within Submit: the tokens of the prompt, from its last one on.
class EchoEngine : public Engine {
 public:
  explicit EchoEngine(int64_t vocab_size) {
    limits_.vocab_size = vocab_size;
    limits_.max_model_len = 256;
  }

  int64_t max_model_len() const override { return limits_.max_model_len; }
  absl::StatusOr<RequestId> Submit(Request request) override {
    // The API has checked all of it.
    const absl::Status checked = CheckRequest(request, limits_);
    LOCKSTEP_CHECK(checked.ok());
    if (request.on_admitted) request.on_admitted();
    if (request.sampling.num_prompt_logprobs.has_value()) {
      std::vector<PositionLogprobs> logprobs;
      for (size_t i = 1; i < request.prompt.size(); ++i) {
        logprobs.push_back(Logprobs(request.prompt[i], *request.sampling.num_prompt_logprobs));
      }
      request.on_prompt_logprobs(1, logprobs);
    }
    for (int32_t choice = 0; choice < request.sampling.n; ++choice) Answer(request, choice);
    on_delivered_();
    return ++last_id_;
  }
  void Cancel(RequestId) override {}
  void OnDelivered(std::function<void()> callback) override { on_delivered_ = std::move(callback); }
  absl::Status RunUntilIdle() override { return absl::OkStatus(); }
  absl::Status Run() override { return absl::OkStatus(); }
  void RequestStop() override {}
  absl::Status Stop() override { return absl::OkStatus(); }
  absl::Status Follow() override { return absl::OkStatus(); }
  EngineStats stats() const override { return {}; }

 private:
  PositionLogprobs Logprobs(int32_t token, int64_t count) const {
    PositionLogprobs logprobs{{token, -1.5f}, {}};
    for (int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<int32_t>((token + i) % limits_.vocab_size);
      logprobs.top.push_back({id, -0.5f * static_cast<float>(i)});
    }
    return logprobs;
  }

  void Answer(const Request& request, int32_t choice) const {
    const std::vector<int32_t>& prompt = request.prompt;
    const int64_t limit = std::min<int64_t>(request.sampling.max_tokens, std::ssize(prompt));
    for (int64_t i = 0; i < limit; ++i) {
      const int32_t token = prompt[(prompt.size() - 1 + static_cast<size_t>(i)) % prompt.size()];
      RequestEvent event{.id = last_id_ + 1, .choice = choice, .token = token};
      if (request.sampling.num_logprobs.has_value()) {
        event.logprobs = Logprobs(token, *request.sampling.num_logprobs);
      }
      if (i + 1 == limit) event.finish = FinishReason::kLength;
      if (!request.on_event(event)) return;
    }
  }

  PlanLimits limits_;
  RequestId last_id_ = 0;
  std::function<void()> on_delivered_;
};

class Exchange : public HttpExchange {
 public:
  explicit Exchange(HttpRequest request) : request_(std::move(request)) {}

  const HttpRequest& request() const override { return request_; }
  void Respond(int status, const HttpHeaders&, std::string body) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    body_ = std::move(body);
    ended_ = true;
    changed_.notify_all();
  }
  void Begin(int status, const HttpHeaders&) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    streams_ = true;
  }
  void Write(std::string piece) override {
    const std::lock_guard lock(mutex_);
    body_ += piece;
  }
  void End() override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  bool gone() const override { return false; }
  void OnGone(std::function<void()>) override {}

  // Waits for the response and checks it.
  void Check() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
    LOCKSTEP_CHECK(status_ == 200 || status_ == 400 || status_ == 404 || status_ == 429);
    if (streams_) {
      CheckStream();
    } else {
      const auto json = ParseJson(body_, "response");
      LOCKSTEP_CHECK(json.ok() && json->is_object());
      LOCKSTEP_CHECK(json->contains("error") == (status_ != 200));
    }
  }

 private:
  void CheckStream() const {
    constexpr std::string_view kPrefix = "data: ";
    bool done = false;
    for (size_t at = 0; at < body_.size();) {
      const size_t end = body_.find("\n\n", at);
      LOCKSTEP_CHECK(!done && end != std::string::npos);
      LOCKSTEP_CHECK(body_.compare(at, kPrefix.size(), kPrefix) == 0);
      const std::string_view event =
          std::string_view(body_).substr(at + kPrefix.size(), end - at - kPrefix.size());
      done = event == "[DONE]";
      LOCKSTEP_CHECK(done || ParseJson(event, "event").ok());
      at = end + 2;
    }
    LOCKSTEP_CHECK(done);
  }

  const HttpRequest request_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int status_ = 0;
  bool streams_ = false;
  bool ended_ = false;
  std::string body_;
};

struct Server {
  Server() {
    const auto text =
        ReadFile(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/byte_fallback.json");
    tokenizer = *Tokenizer::FromJson(*ParseJson(*text, "tokenizer"), "tokenizer");
    chat = *ChatFormat::Create({"fuzz", kTemplate, "", {}});
    config.vocab_size = tokenizer->vocab_size();
    engine = std::make_unique<EchoEngine>(config.vocab_size);
    const ServedModel model{.config = &config,
                            .generation = &generation,
                            .tokenizer = tokenizer.get(),
                            .chat = chat.get()};
    OpenAiOptions options;
    options.served_model_names = {"tiny"};
    api = *OpenAiApi::Create(*engine, model, options, nullptr);
  }

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatFormat> chat;
  ModelConfig config;
  GenerationConfig generation;
  std::unique_ptr<EchoEngine> engine;
  std::unique_ptr<OpenAiApi> api;
};

}  // namespace
}  // namespace lockstep

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SilenceLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static lockstep::Server& server = *new lockstep::Server();  // its threads run until the end
  if (size == 0) return 0;
  constexpr const char* kPaths[] = {"/v1/completions", "/v1/chat/completions", "/tokenize",
                                    "/detokenize"};
  lockstep::HttpRequest request;
  request.method = "POST";
  request.path = kPaths[data[0] % 4];
  request.body.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto exchange = std::make_shared<lockstep::Exchange>(std::move(request));
  server.api->Handle(exchange);
  exchange->Check();
  return 0;
}
