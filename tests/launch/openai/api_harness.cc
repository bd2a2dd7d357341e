#include "tests/launch/openai/api_harness.h"

#include <gtest/gtest.h>

#include <chrono>

#include "parallel/local_communicator.h"
#include "runtime/core/file.h"
#include "runtime/engine_loop.h"

namespace lockstep {

namespace {

// Gives the token that the script names the largest logit.
class ScriptedDecoder : public Decoder {
 public:
  ScriptedDecoder(const HarnessOptions& options, int64_t vocab_size)
      : options_(options), vocab_size_(vocab_size) {}

  absl::Status Forward(const ForwardBatch& batch, const KvPool&,
                       const MatrixView& logits) override {
    if (++step_ == options_.fail_at_step) return absl::InternalError("the device is gone");
    std::this_thread::sleep_for(std::chrono::duration<double>(options_.step_seconds));
    for (int64_t r = 0; r < logits.rows; ++r) {
      const int32_t token = batch.token_ids[batch.logits_rows[r]];
      const int32_t next = Next(token);
      for (int32_t id = 0; id < vocab_size_; ++id) {
        // The tokens behind the first are told apart, too.
        const float distance = static_cast<float>((id - next + vocab_size_) % vocab_size_);
        logits.row<float>(r)[id] = id == next ? 40.0f : 20.0f - 0.01f * distance;
      }
    }
    return absl::OkStatus();
  }
  const AttentionGeometry& Geometry(int64_t) const override { return geometry_; }
  int64_t weight_bytes() const override { return 0; }

 private:
  int32_t Next(int32_t token) const {
    const auto found = options_.next.find(token);
    if (found != options_.next.end()) return found->second;
    return token + 1 == kFirstPiece + std::ssize(options_.pieces) ? kEndToken : token + 1;
  }

  const HarnessOptions& options_;
  const int64_t vocab_size_;
  int64_t step_ = 0;
  AttentionGeometry geometry_;
};

absl::StatusOr<std::unique_ptr<Engine>> MakeScriptedEngine(const HarnessOptions& options,
                                                           int64_t vocab_size,
                                                           Communicator& communicator) {
  constexpr int64_t kBlockSize = 16;
  const int64_t num_blocks =
      options.max_num_seqs * ((options.max_model_len + kBlockSize - 1) / kBlockSize);
  EngineParts parts;
  parts.threads = std::make_unique<ThreadPool>(1);
  parts.decoder = std::make_unique<ScriptedDecoder>(options, vocab_size);
  LOCKSTEP_ASSIGN_OR_RETURN(parts.pool,
                            KvPool::Create({1, 1, 1, kBlockSize, DType::kF32}, num_blocks));
  const PlanLimits limits{.max_num_batched_tokens = 512,
                          .max_num_seqs = options.max_num_seqs,
                          .max_model_len = options.max_model_len,
                          .block_size = kBlockSize,
                          .num_blocks = num_blocks,
                          .vocab_size = vocab_size,
                          .max_logits_rows = 0};
  EngineLoopOptions loop;
  loop.scheduler.end_token_ids = {kEndToken};
  LOCKSTEP_ASSIGN_OR_RETURN(auto engine, EngineLoop::Create(limits, loop, {{0, vocab_size}},
                                                            std::move(parts), communicator));
  return std::unique_ptr<Engine>(std::move(engine));
}

std::unique_ptr<Tokenizer> MakeTokenizer(const std::vector<std::string>& pieces) {
  const auto text =
      ReadFile(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/byte_fallback.json");
  Json json = Json::parse(text.value());
  for (size_t i = 0; i < pieces.size(); ++i) {
    json["added_tokens"].push_back({{"id", kFirstPiece + static_cast<int32_t>(i)},
                                    {"content", pieces[i]},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false},
                                    {"special", false}});
  }
  auto tokenizer = Tokenizer::FromJson(json, "pieces");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

}  // namespace

ApiHarness::ApiHarness(HarnessOptions options)
    : options_(std::move(options)), communicators_(CreateLocalCommunicators(1)) {
  ServedModel model;
  absl::StatusOr<std::unique_ptr<Engine>> engine;
  if (options_.make_engine) {
    engine = options_.make_engine(*communicators_[0]);
  } else {
    tokenizer_ = MakeTokenizer(options_.pieces);
    options_.config.vocab_size = tokenizer_->vocab_size();
    engine = MakeScriptedEngine(options_, options_.config.vocab_size, *communicators_[0]);
  }
  EXPECT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  if (!options_.chat_template.empty()) {
    auto chat = ChatFormat::Create({"test", options_.chat_template, "", {}});
    EXPECT_TRUE(chat.ok()) << chat.status();
    chat_ = *std::move(chat);
  }
  model.config = &options_.config;
  model.generation = &generation_;
  model.tokenizer = tokenizer_.get();
  model.chat = chat_.get();
  OpenAiOptions& api = options_.api;
  if (api.served_model_names.empty()) api.served_model_names = {"tiny", "alias/of tiny"};
  api.max_num_seqs = options_.max_num_seqs;
  auto made = OpenAiApi::Create(*engine_, model, api, &observer_);
  EXPECT_TRUE(made.ok()) << made.status();
  api_ = *std::move(made);
  engine_thread_ = std::thread([this] { run_status_ = engine_->Run(); });
}

ApiHarness::~ApiHarness() {
  api_ = nullptr;
  StopEngine().IgnoreError();
}

absl::Status ApiHarness::StopEngine() {
  engine_->RequestStop();
  return WaitForFailure();
}

absl::Status ApiHarness::WaitForFailure() {
  if (engine_thread_.joinable()) engine_thread_.join();
  return run_status_;
}

ApiHarness::Client ApiHarness::Send(const std::string& method, const std::string& path,
                                    const std::string& body, const HttpHeaders& headers) {
  HttpRequest request;
  request.method = method;
  request.path = path;
  request.headers = headers;
  request.body = body;
  request.request_id = "req-1";
  request.peer = "127.0.0.1:5";
  const auto exchange = std::make_shared<FakeExchange>(std::move(request));
  api_->Handle(exchange);
  return exchange;
}

ApiHarness::Client ApiHarness::Post(const std::string& path, const Json& body) {
  Client client = Send(path, body);
  client->Wait();
  return client;
}

bool ApiHarness::Within(double seconds, const std::function<bool()>& holds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

void ApiHarness::ExpectAllFree() {
  EXPECT_TRUE(Within(10, [&] {
    const SchedulerStats stats = engine_->stats().scheduler;
    return stats.num_running == 0 && stats.num_waiting == 0 &&
           stats.num_free_blocks == stats.num_blocks && api_->num_open() == 0;
  }));
}

namespace {

StreamedChoice Join(const std::vector<Json>& events, int64_t index,
                    const std::function<void(const Json&, StreamedChoice*)>& add) {
  StreamedChoice joined;
  EXPECT_FALSE(events.empty());
  if (events.empty()) return joined;
  EXPECT_EQ(events.back(), "[DONE]");
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    EXPECT_EQ(events[i].at("id"), events[0].at("id"));
    EXPECT_EQ(events[i].at("created"), events[0].at("created"));
    for (const Json& choice : events[i].at("choices")) {
      if (choice.at("index") != index) continue;
      EXPECT_EQ(joined.finish, "") << "an event behind the last";
      add(choice, &joined);
      if (!choice.at("logprobs").is_null()) joined.logprobs.push_back(choice.at("logprobs"));
      if (!choice.at("finish_reason").is_null()) joined.finish = choice.at("finish_reason");
    }
  }
  EXPECT_NE(joined.finish, "");
  return joined;
}

}  // namespace

StreamedChoice JoinCompletion(const std::vector<Json>& events, int64_t index) {
  return Join(events, index, [](const Json& choice, StreamedChoice* joined) {
    joined->text += choice.at("text").get<std::string>();
  });
}

StreamedChoice JoinChat(const std::vector<Json>& events, int64_t index) {
  bool first = true;
  return Join(events, index, [&](const Json& choice, StreamedChoice* joined) {
    const Json& delta = choice.at("delta");
    EXPECT_EQ(delta.contains("role"), first);
    first = false;
    if (delta.contains("content")) joined->text += delta.at("content").get<std::string>();
  });
}

}  // namespace lockstep
