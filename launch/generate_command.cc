#include "launch/generate_command.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "launch/engine_session.h"
#include "launch/result_writer.h"
#include "launch/tokenizer_loading.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"
#include "runtime/text_output.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

// One prompt on its way to an answer.
struct Answer {
  std::vector<int32_t> prompt_ids;
  std::vector<int32_t> token_ids;
  std::optional<TextOutput> text_output;  // none without a tokenizer
  std::string text;                       // with --json: all of it
  std::string unprinted;                  // waits until earlier prompts have ended
  FinishReason finish = FinishReason::kNone;
  std::optional<Clock::time_point> first_token_time;
};

const char* Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kError:
      return "error";
    case FinishReason::kNone:
      break;
  }
  LOCKSTEP_CHECK(false);
}

std::string Rate(int64_t tokens, double seconds) {
  return seconds > 0 ? absl::StrFormat("%.1f tokens/s", tokens / seconds) : "no rate";
}

class GenerateJob : public EngineJob {
 public:
  explicit GenerateJob(const GenerateOptions& options) : options_(options) {}

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  absl::Status LoadTextTools(const std::string& model);
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(const PromptInput& prompt) const;
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const;
  bool OnEvent(size_t index, const RequestEvent& event);
  void AddToken(Answer& answer, int32_t id);
  void EndAnswer(size_t index, FinishReason finish);
  std::string JsonLine(size_t index) const;
  bool PrintInOrder();
  void LogStatistics(const Engine& engine, const SessionInfo& session) const;

  const GenerateOptions& options_;
  EffectiveSampling sampling_;
  std::unique_ptr<Tokenizer> tokenizer_;  // nullptr: the model has none
  std::unique_ptr<ChatFormat> chat_;      // with --chat
  std::vector<Answer> answers_;           // in the order of the prompts
  size_t next_to_print_ = 0;
  ResultWriter writer_;
  std::string request_error_;  // the first
  Clock::time_point start_;
};

absl::Status GenerateJob::Prepare(const ModelSource& source) {
  LOCKSTEP_ASSIGN_OR_RETURN(sampling_,
                            ResolveSampling(options_.sampling, source.generation, source.config));
  LOCKSTEP_RETURN_IF_ERROR(LoadTextTools(options_.engine.model));
  LOCKSTEP_ASSIGN_OR_RETURN(const StopMatcher matcher, StopMatcher::Create(options_.stop));
  for (const PromptInput& prompt : options_.prompts) {
    Answer& answer = answers_.emplace_back();
    LOCKSTEP_ASSIGN_OR_RETURN(answer.prompt_ids, EncodePrompt(prompt));
    if (tokenizer_ != nullptr) {
      answer.text_output.emplace(StreamDecoder(tokenizer_.get(), /*skip_special_tokens=*/true),
                                 matcher);
    }
  }
  return absl::OkStatus();
}

// The tokenizer, where the model has one, and with --chat the template.
absl::Status GenerateJob::LoadTextTools(const std::string& model) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(model);
  if (tokenizer.ok()) {
    tokenizer_ = *std::move(tokenizer);
  } else if (!absl::IsNotFound(tokenizer.status())) {
    return tokenizer.status();
  }
  const bool has_text =
      std::any_of(options_.prompts.begin(), options_.prompts.end(),
                  [](const PromptInput& prompt) { return prompt.kind != PromptInput::Kind::kIds; });
  if (tokenizer_ == nullptr) {
    if (has_text || !options_.stop.empty()) {
      return Annotate(tokenizer.status(), has_text
                                              ? "a text prompt needs a tokenizer (or give --ids)"
                                              : "--stop needs a tokenizer");
    }
    if (!options_.json) LogInfo("the model has no tokenizer: the answer is printed as token ids");
  }
  if (options_.chat) {
    LOCKSTEP_ASSIGN_OR_RETURN(chat_, LoadChatFormat(model));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> GenerateJob::EncodePrompt(const PromptInput& prompt) const {
  switch (prompt.kind) {
    case PromptInput::Kind::kIds:
      return prompt.ids;
    case PromptInput::Kind::kText: {
      absl::StatusOr<std::vector<int32_t>> ids = EncodeText(prompt.text);
      return ids.ok() ? ids : Annotate(ids.status(), "--prompt");
    }
    case PromptInput::Kind::kFile: {
      LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(prompt.text, FileKind::kAny));
      if (text.empty()) {
        return absl::InvalidArgumentError(
            absl::StrFormat("--prompt-file %s: the file is empty", prompt.text));
      }
      absl::StatusOr<std::vector<int32_t>> ids = EncodeText(text);
      return ids.ok() ? ids : Annotate(ids.status(), "--prompt-file " + prompt.text);
    }
  }
  LOCKSTEP_CHECK(false);
}

absl::StatusOr<std::vector<int32_t>> GenerateJob::EncodeText(const std::string& text) const {
  if (chat_ == nullptr) return tokenizer_->Encode(text, /*add_special_tokens=*/true);
  const OrderedJson input = {
      {"messages", OrderedJson::array({{{"role", "user"}, {"content", text}}})}};
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string rendered, chat_->Render(input));
  return tokenizer_->Encode(rendered, /*add_special_tokens=*/false);
}

absl::Status GenerateJob::Submit(Engine& engine, const SessionInfo&) {
  if (!options_.sampling.seed.has_value()) {
    std::random_device random;
    sampling_.params.seed = (uint64_t{random()} << 32) | random();
  }
  for (size_t i = 0; i < answers_.size(); ++i) {
    Request request;
    request.prompt = answers_[i].prompt_ids;
    request.sampling = sampling_.params;
    // A seed that was asked for counts for each prompt, whatever its neighbours; without one, equal
    // prompts are to get different answers.
    if (!options_.sampling.seed.has_value()) request.sampling.seed += i;
    request.on_event = [this, i](const RequestEvent& event) { return OnEvent(i, event); };
    const absl::Status status = engine.Submit(std::move(request)).status();
    if (!status.ok()) {
      return answers_.size() == 1 ? status : Annotate(status, absl::StrFormat("prompt %d", i));
    }
  }
  LogInfo(sampling_.summary);
  // At the start, so that an answer that was cut short can be had again.
  if (sampling_.params.temperature > 0) {
    const bool one_seed = options_.sampling.seed.has_value() || answers_.size() == 1;
    LogInfo(absl::StrFormat("seed: %d%s", sampling_.params.seed,
                            one_seed ? "" : " + index of the prompt"));
  }
  for (const std::string& warning : sampling_.warnings) LogWarning(warning);
  start_ = Clock::now();
  return absl::OkStatus();
}

// False ends the request: a stop string was found, or nobody reads on.
bool GenerateJob::OnEvent(size_t index, const RequestEvent& event) {
  Answer& answer = answers_[index];
  if (event.token.has_value()) AddToken(answer, *event.token);
  if (event.finish == FinishReason::kError && request_error_.empty()) {
    request_error_ = absl::StrFormat("prompt %d: %s", index, event.error);
  }
  const bool stopped = answer.text_output.has_value() && answer.text_output->stopped();
  if (stopped) {
    EndAnswer(index, FinishReason::kStop);
  } else if (event.finish != FinishReason::kNone) {
    EndAnswer(index, event.finish);
  }
  return PrintInOrder() && !stopped;
}

void GenerateJob::AddToken(Answer& answer, int32_t id) {
  if (!answer.first_token_time.has_value()) answer.first_token_time = Clock::now();
  answer.token_ids.push_back(id);
  if (answer.text_output.has_value()) {
    const std::string piece = answer.text_output->Push(id);
    (options_.json ? answer.text : answer.unprinted) += piece;
  } else if (!options_.json) {
    absl::StrAppend(&answer.unprinted, answer.token_ids.size() > 1 ? "," : "", id);
  }
}

void GenerateJob::EndAnswer(size_t index, FinishReason finish) {
  Answer& answer = answers_[index];
  answer.finish = finish;
  if (answer.text_output.has_value() && !answer.text_output->stopped()) {
    const std::string rest = answer.text_output->Finish();
    (options_.json ? answer.text : answer.unprinted) += rest;
    if (answer.text_output->stopped()) answer.finish = FinishReason::kStop;
  }
  answer.unprinted += options_.json ? JsonLine(index) : "\n";
}

std::string GenerateJob::JsonLine(size_t index) const {
  const Answer& answer = answers_[index];
  OrderedJson line;
  line["prompt_index"] = index;
  line["prompt_token_ids"] = answer.prompt_ids;
  line["token_ids"] = answer.token_ids;
  line["text"] = answer.text_output.has_value() ? OrderedJson(answer.text) : OrderedJson();
  line["finish_reason"] = Name(answer.finish);
  return DumpJson(line) + "\n";
}

// Prints what is there of the first prompt that has not ended; prompts run side by side, but are
// answered in order. False when nothing more can be printed.
bool GenerateJob::PrintInOrder() {
  while (next_to_print_ < answers_.size()) {
    Answer& answer = answers_[next_to_print_];
    if (!writer_.Write(std::exchange(answer.unprinted, {}))) return false;
    if (answer.finish == FinishReason::kNone) break;
    ++next_to_print_;
  }
  return true;
}

absl::Status GenerateJob::Finish(const Engine& engine, const SessionInfo& session) {
  LOCKSTEP_RETURN_IF_ERROR(writer_.status());
  // mpirun forwards the two streams apart, in any order: the end of the answer goes first.
  if (LaunchedByMpirun()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  LogStatistics(engine, session);
  return request_error_.empty() ? absl::OkStatus() : absl::InternalError(request_error_);
}

void GenerateJob::LogStatistics(const Engine& engine, const SessionInfo& session) const {
  double first_token_sum = 0;
  double first_token_max = 0;
  int64_t answered = 0;
  for (const Answer& answer : answers_) {
    if (!answer.first_token_time.has_value()) continue;
    const double ttft = std::chrono::duration<double>(*answer.first_token_time - start_).count();
    first_token_sum += ttft;
    first_token_max = std::max(first_token_max, ttft);
    ++answered;
  }
  std::string first_token = "none";
  if (answered == 1) first_token = absl::StrFormat("%.3f s", first_token_max);
  if (answered > 1) {
    first_token = absl::StrFormat("%.3f s on average, %.3f s at most", first_token_sum / answered,
                                  first_token_max);
  }
  const EngineStats& stats = engine.stats();
  LogInfo(absl::StrFormat("load: %.2f s on %d rank%s of %d thread%s, %s", session.load_seconds,
                          session.num_ranks, session.num_ranks == 1 ? "" : "s", session.num_threads,
                          session.num_threads == 1 ? "" : "s", Name(session.dtype)));
  LogInfo(absl::StrFormat("prefill: %d tokens in %.3f s, %s; time to first token: %s",
                          stats.prompt_tokens, stats.prefill_seconds,
                          Rate(stats.prompt_tokens, stats.prefill_seconds), first_token));
  LogInfo(absl::StrFormat("decode: %d tokens in %.3f s, %s", stats.decode_tokens,
                          stats.decode_seconds, Rate(stats.decode_tokens, stats.decode_seconds)));
}

}  // namespace

int RunGenerate(const GenerateOptions& options) {
  GenerateJob job(options);
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep
