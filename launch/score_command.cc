#include "launch/score_command.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "launch/engine_session.h"
#include "launch/output_file.h"
#include "launch/result_writer.h"
#include "launch/tokenizer_loading.h"
#include "model/checkpoint/safetensors_writer.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

// ln softmax(logits)[target], in double.
double LogProbability(std::span<const float> logits, int32_t target) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return logits[target] - top - std::log(sum);
}

class ScoreJob : public EngineJob {
 public:
  explicit ScoreJob(const ScoreOptions& options) : options_(options) {}

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  absl::Status ReadIds();
  void OnLogits(int64_t first_position, int64_t rows, const float* logits);
  absl::Status ScoreRows(int64_t first_position, int64_t rows, const float* logits);

  const ScoreOptions& options_;
  std::vector<int32_t> ids_;
  int64_t vocab_size_ = 0;
  std::unique_ptr<SafetensorsWriter> logits_out_;  // nullptr: not asked for
  std::vector<double> logprobs_;                   // [i]: of ids_[i + 1]
  int64_t rows_seen_ = 0;
  absl::Status status_;  // the first failure while the engine runs
};

absl::Status ScoreJob::Prepare(const ModelSource& source) {
  vocab_size_ = source.config.vocab_size;
  LOCKSTEP_RETURN_IF_ERROR(ReadIds());
  const std::vector<std::string> inputs(options_.text_file.empty() ? 0 : 1, options_.text_file);
  LOCKSTEP_RETURN_IF_ERROR(CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log,
                                                options_.engine.model, inputs));
  if (options_.logits_out.empty()) return absl::OkStatus();
  LOCKSTEP_RETURN_IF_ERROR(
      CheckOutputIsNoInput("--logits-out", options_.logits_out, options_.engine.model, inputs));
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer = SafetensorsWriter::Create(
      options_.logits_out, "logits", static_cast<int64_t>(ids_.size()), vocab_size_);
  if (!writer.ok()) return Annotate(writer.status(), "--logits-out");
  logits_out_ = *std::move(writer);
  return absl::OkStatus();
}

absl::Status ScoreJob::ReadIds() {
  if (options_.text_file.empty()) {
    ids_ = options_.ids;
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(options_.engine.model);
  if (!tokenizer.ok()) {
    return absl::IsNotFound(tokenizer.status())
               ? Annotate(tokenizer.status(), "--text-file needs a tokenizer (or give --ids)")
               : tokenizer.status();
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(options_.text_file, FileKind::kAny));
  absl::StatusOr<std::vector<int32_t>> ids =
      (*tokenizer)->Encode(text, /*add_special_tokens=*/true);
  if (!ids.ok()) return Annotate(ids.status(), "--text-file " + options_.text_file);
  if (ids->empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--text-file %s: the file holds no token", options_.text_file));
  }
  ids_ = *std::move(ids);
  return absl::OkStatus();
}

absl::Status ScoreJob::Submit(Engine& engine, const SessionInfo&) {
  Request request;
  request.prompt = ids_;
  request.on_event = [this](const RequestEvent& event) {
    if (event.finish == FinishReason::kError && status_.ok()) {
      status_ = absl::InternalError(event.error);
    }
    return true;
  };
  request.on_prompt_logits = [this](int64_t first_position, int64_t rows, const float* logits) {
    OnLogits(first_position, rows, logits);
  };
  return engine.Submit(std::move(request)).status();
}

void ScoreJob::OnLogits(int64_t first_position, int64_t rows, const float* logits) {
  if (status_.ok()) status_ = ScoreRows(first_position, rows, logits);
}

absl::Status ScoreJob::ScoreRows(int64_t first_position, int64_t rows, const float* logits) {
  LOCKSTEP_CHECK(first_position == rows_seen_);
  rows_seen_ += rows;
  const int64_t num_tokens = static_cast<int64_t>(ids_.size());
  for (int64_t r = 0; r < rows && first_position + r + 1 < num_tokens; ++r) {
    const int64_t position = first_position + r + 1;
    const double logprob = LogProbability(
        {logits + r * vocab_size_, static_cast<size_t>(vocab_size_)}, ids_[position]);
    if (!std::isfinite(logprob)) {
      return absl::InternalError(absl::StrFormat(
          "the log-probability of token %d at position %d is %g: the model computed logits that "
          "are no numbers",
          ids_[position], position, logprob));
    }
    logprobs_.push_back(logprob);
  }
  if (logits_out_ == nullptr) return absl::OkStatus();
  return logits_out_->Append({logits, static_cast<size_t>(rows * vocab_size_)});
}

absl::Status ScoreJob::Finish(const Engine&, const SessionInfo&) {
  LOCKSTEP_RETURN_IF_ERROR(status_);
  LOCKSTEP_CHECK(rows_seen_ == static_cast<int64_t>(ids_.size()));
  if (logits_out_ != nullptr) LOCKSTEP_RETURN_IF_ERROR(logits_out_->Finish());
  OrderedJson result;
  result["num_tokens"] = ids_.size();
  result["token_logprobs"] = OrderedJson::array({nullptr});
  double sum = 0;
  for (const double logprob : logprobs_) {
    result["token_logprobs"].push_back(logprob);
    sum += logprob;
  }
  result["perplexity"] =
      logprobs_.empty() ? OrderedJson() : OrderedJson(std::exp(-sum / logprobs_.size()));
  ResultWriter writer;
  writer.Write(DumpJson(result) + "\n");
  return writer.status();
}

}  // namespace

int RunScore(const ScoreOptions& options) {
  ScoreJob job(options);
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep
