#include "launch/openai/api_server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "launch/openai/api_error.h"
#include "launch/openai/call_preparer.h"
#include "launch/openai/json_text.h"
#include "launch/openai/responder.h"
#include "launch/openai/work_queue.h"
#include "launch/sampling_defaults.h"

namespace lockstep {

namespace {

constexpr int64_t kLongBodyBytes = 64 << 10;           // parsed where it holds up no short one
constexpr int64_t kMaxTextBytes = int64_t{256} << 20;  // of bodies of /tokenize and /detokenize
constexpr std::string_view kModels = "/v1/models";

// Compares all of it, wherever the first difference is: its time tells nothing of the key.
bool SameKey(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    difference |= static_cast<unsigned char>(a[i] ^ other);
  }
  return difference == 0;
}

class OpenAiApiImpl : public OpenAiApi {
 public:
  OpenAiApiImpl(Engine& engine, const ServedModel& model, const OpenAiOptions& options,
                ServingObserver* observer)
      : model_(model),
        options_(options),
        observer_(observer),
        created_(std::chrono::duration_cast<std::chrono::seconds>(
                     std::chrono::system_clock::now().time_since_epoch())
                     .count()),
        max_model_len_(engine.max_model_len()),
        responder_(engine, model.tokenizer,
                   {.request_timeout_seconds = options.request_timeout_seconds,
                    .max_num_seqs = options.max_num_seqs,
                    .max_queue = options.max_queue,
                    .max_held_bytes = options.max_held_bytes,
                    .logs_requests = options.logs_requests},
                   observer),
        preparer_(engine, model_, options_, responder_),
        workers_(std::make_unique<WorkQueue>(options.num_workers)) {}

  ~OpenAiApiImpl() override {
    EndAll("the server is shutting down");
    workers_ = nullptr;
    // What a worker was just submitting.
    responder_.EndAll(Overloaded(503, "the server is shutting down"));
  }

  void Handle(std::shared_ptr<HttpExchange> exchange) override;
  void StartDrain() override {
    Refuse(Overloaded(503, "the server is draining: it takes no more"));
  }
  bool WaitIdle(double seconds) override { return responder_.WaitIdle(seconds); }
  void EndAll(const std::string& message) override { End(Overloaded(503, message)); }
  void Fail(const absl::Status& status) override {
    End({.http_status = 500, .message = "the engine failed: " + std::string(status.message())});
  }
  int64_t num_open() const override { return responder_.num_open(); }

 private:
  using TextCall = absl::StatusOr<std::string> (CallPreparer::*)(std::string_view) const;

  // From now on every request is answered with `error`.
  void Refuse(const ApiError& error) {
    const std::lock_guard lock(mutex_);
    refusal_ = error;
  }
  void End(const ApiError& error) {
    Refuse(error);
    responder_.EndAll(error);
  }

  std::optional<ApiError> CheckAccess(const HttpRequest& request) const;
  std::optional<ApiError> Dispatch(const std::shared_ptr<HttpExchange>& exchange);
  std::optional<ApiError> OpenGeneration(const std::shared_ptr<HttpExchange>& exchange,
                                         ApiKind kind);
  std::optional<ApiError> OpenText(const std::shared_ptr<HttpExchange>& exchange, TextCall method);
  std::optional<ApiError> AnswerModels(HttpExchange& exchange) const;
  std::string ModelJson(const std::string& name) const;

  const ServedModel model_;
  const OpenAiOptions options_;
  ServingObserver* const observer_;
  const int64_t created_;
  const int64_t max_model_len_;
  Responder responder_;
  CallPreparer preparer_;
  std::atomic<int64_t> text_bytes_ = 0;

  std::mutex mutex_;
  std::optional<ApiError> refusal_;

  std::unique_ptr<WorkQueue> workers_;  // the last: it uses the others
};

void OpenAiApiImpl::Handle(std::shared_ptr<HttpExchange> exchange) {
  std::optional<ApiError> error = CheckAccess(exchange->request());
  if (!error.has_value()) error = Dispatch(exchange);
  if (!error.has_value()) return;
  if (observer_ != nullptr) observer_->OnRefused(error->http_status);
  RespondError(*exchange, *error);
}

std::optional<ApiError> OpenAiApiImpl::CheckAccess(const HttpRequest& request) const {
  if (options_.api_keys.empty()) return std::nullopt;
  constexpr absl::string_view kBearer = "bearer ";
  const std::string* const header = request.Header("authorization");
  bool opens = false;
  // The scheme's name in any case (RFC 9110, 11.1).
  if (header != nullptr && absl::StartsWithIgnoreCase(*header, kBearer)) {
    const std::string_view key = std::string_view(*header).substr(kBearer.size());
    for (const std::string& own : options_.api_keys) opens = SameKey(key, own) || opens;
  }
  if (opens) return std::nullopt;
  return ApiError{.http_status = 401,
                  .message = header == nullptr
                                 ? "an API key is needed: Authorization: Bearer KEY"
                                 : "the API key of the header Authorization is not valid",
                  .code = "invalid_api_key",
                  .headers = {{"WWW-Authenticate", "Bearer"}}};
}

std::optional<ApiError> OpenAiApiImpl::Dispatch(const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  const std::string& path = request.path;
  const bool is_models = path == kModels || path.starts_with(std::string(kModels) + "/");
  const bool is_post = path == "/v1/completions" || path == "/v1/chat/completions" ||
                       path == "/tokenize" || path == "/detokenize";
  if (!is_models && !is_post) {
    return ApiError{.http_status = 404,
                    .message = absl::StrFormat("there is no %s here", path.substr(0, 200)),
                    .code = "unknown_url"};
  }
  const bool allowed =
      is_models ? request.method == "GET" || request.method == "HEAD" : request.method == "POST";
  if (!allowed) {
    return ApiError{
        .http_status = 405,
        .message = absl::StrFormat("%s is for %s, not %s", path.substr(0, 200),
                                   is_models ? "GET" : "POST", request.method.substr(0, 20)),
        .code = "method_not_allowed",
        .headers = {{"Allow", is_models ? "GET, HEAD" : "POST"}}};
  }
  if (is_models) return AnswerModels(*exchange);
  if (path == "/v1/completions") return OpenGeneration(exchange, ApiKind::kCompletion);
  if (path == "/v1/chat/completions") return OpenGeneration(exchange, ApiKind::kChat);
  return OpenText(exchange,
                  path == "/tokenize" ? &CallPreparer::Tokenize : &CallPreparer::Detokenize);
}

std::optional<ApiError> OpenAiApiImpl::OpenGeneration(const std::shared_ptr<HttpExchange>& exchange,
                                                      ApiKind kind) {
  {
    const std::lock_guard lock(mutex_);
    if (refusal_.has_value()) return refusal_;
  }
  const auto call = std::make_shared<OpenCall>(exchange, kind);
  if (!responder_.Open(call)) {
    return Overloaded(429,
                      absl::StrFormat("the server is busy: %d requests may run and %d wait at once",
                                      options_.max_num_seqs, options_.max_queue));
  }
  // The exchange keeps the callback, and the call the exchange: no circle. It may outlive the API.
  exchange->OnGone([queue = responder_.queue(), weak = std::weak_ptr<OpenCall>(call)] {
    if (std::shared_ptr<OpenCall> gone = weak.lock()) {
      queue->Push({.kind = ServingEvent::Kind::kGone, .call = std::move(gone)});
    }
  });
  workers_->Add([this, call] { preparer_.Prepare(call); },
                std::ssize(exchange->request().body) > kLongBodyBytes);
  return std::nullopt;
}

std::optional<ApiError> OpenAiApiImpl::OpenText(const std::shared_ptr<HttpExchange>& exchange,
                                                TextCall method) {
  const int64_t bytes = std::ssize(exchange->request().body) + 1024;
  if (text_bytes_.fetch_add(bytes) > kMaxTextBytes) {
    text_bytes_.fetch_sub(bytes);
    return Overloaded(429, "the server is busy with other texts");
  }
  const auto answer = [this, exchange, method, bytes] {
    try {
      absl::StatusOr<std::string> response = (preparer_.*method)(exchange->request().body);
      if (response.ok()) {
        exchange->Respond(200, {{"Content-Type", "application/json"}}, *std::move(response));
      } else {
        RespondError(*exchange, ErrorOf(response.status()));
      }
    } catch (const std::exception& e) {
      RespondError(*exchange, {.http_status = 500,
                               .message = absl::StrFormat("the request failed: %s", e.what())});
    }
    text_bytes_.fetch_sub(bytes);
  };
  workers_->Add(answer, bytes > kLongBodyBytes);
  return std::nullopt;
}

std::string OpenAiApiImpl::ModelJson(const std::string& name) const {
  std::string json = "{\"id\":";
  AppendJsonString(name, &json);
  absl::StrAppend(&json, ",\"object\":\"model\",\"created\":", created_,
                  ",\"owned_by\":\"lockstep\",\"root\":");
  AppendJsonString(options_.served_model_names.front(), &json);
  absl::StrAppend(&json, ",\"parent\":null,\"max_model_len\":", max_model_len_, "}");
  return json;
}

std::optional<ApiError> OpenAiApiImpl::AnswerModels(HttpExchange& exchange) const {
  const std::string& path = exchange.request().path;
  std::string json;
  if (path == kModels) {
    for (const std::string& name : options_.served_model_names) {
      Separate(&json);
      json += ModelJson(name);
    }
    json = "{\"object\":\"list\",\"data\":[" + json + "]}";
  } else {
    const std::string name = path.substr(kModels.size() + 1);
    const absl::Status status =
        name.empty() ? absl::NotFoundError("a model has a name") : preparer_.CheckModel(name);
    if (!status.ok()) return ErrorOf(status);
    json = ModelJson(name);
  }
  exchange.Respond(200, {{"Content-Type", "application/json"}}, json);
  return std::nullopt;
}

absl::Status CheckOptions(const OpenAiOptions& options) {
  const auto bad = [](const std::string& message) { return absl::InvalidArgumentError(message); };
  if (options.served_model_names.empty()) return bad("the model needs a name");
  for (const std::string& name : options.served_model_names) {
    if (name.empty()) return bad("a name of the model is empty");
  }
  for (const std::string& key : options.api_keys) {
    if (key.empty()) return bad("an API key is empty");
  }
  if (options.max_num_seqs < 1 || options.max_queue < 0 || options.max_held_bytes < 0 ||
      options.num_workers < 2) {
    return bad(
        "max_num_seqs must be at least 1, max_queue and max_held_bytes 0, and num_workers 2");
  }
  if (!(options.request_timeout_seconds >= 0) || options.request_timeout_seconds > 1e8) {
    return bad("the request timeout must be 0 to 1e8 seconds");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<OpenAiApi>> OpenAiApi::Create(Engine& engine,
                                                             const ServedModel& model,
                                                             const OpenAiOptions& options,
                                                             ServingObserver* observer) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOptions(options));
  LOCKSTEP_CHECK(model.config != nullptr && model.generation != nullptr);
  // A bad value of the file that no request could help.
  LOCKSTEP_RETURN_IF_ERROR(ResolveSampling({}, *model.generation, *model.config).status());
  return std::unique_ptr<OpenAiApi>(new OpenAiApiImpl(engine, model, options, observer));
}

}  // namespace lockstep
