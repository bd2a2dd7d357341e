#include "launch/generate_command.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "launch/answer.h"
#include "launch/engine_session.h"
#include "launch/generate_prompts.h"
#include "launch/generate_statistics.h"
#include "launch/output_file.h"
#include "launch/result_writer.h"

namespace lockstep {

namespace {

// Set by Ctrl-C once the engine runs.
volatile std::sig_atomic_t interrupted = 0;

// Ends what runs at its next token; a second Ctrl-C ends the process.
void CatchInterrupt() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = 1; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
}

// What is there of a prompt between its submission and the printing of its last answer.
struct PromptState {
  RequestId id = 0;
  std::vector<int32_t> prompt_ids;  // with --json
  std::vector<PositionLogprobs> prompt_logprobs;
  AnswerContext context;
  std::vector<Answer> answers;  // by choice; empty before and after
  int32_t num_ended = 0;
};

class GenerateJob : public EngineJob {
 public:
  explicit GenerateJob(const GenerateOptions& options) : options_(options) {}

  absl::Status Prepare(const ModelSource& source) override;
  absl::Status Submit(Engine& engine, const SessionInfo& session) override;
  absl::Status Finish(const Engine& engine, const SessionInfo& session) override;

 private:
  absl::Status CheckStepLog() const;
  void SetSeeds();
  void SubmitMore();
  void SubmitPrompt(size_t index);
  void Open(size_t index);
  bool OnEvent(size_t index, const RequestEvent& event);
  void EndAnswer(size_t index, int32_t choice, FinishReason finish);
  bool PrintInOrder();
  void CancelAll();

  const GenerateOptions& options_;
  std::optional<PromptEncoder> encoder_;
  GeneratePrompts prompts_;
  int64_t vocab_size_ = 0;

  Engine* engine_ = nullptr;
  std::vector<PromptState> states_;  // as prompts_
  std::vector<size_t> order_;        // of submission
  size_t num_submitted_ = 0;
  int64_t num_open_ = 0;  // answers that are submitted and have not ended
  bool cancelled_ = false;
  int64_t num_answers_ = 0;
  int64_t num_incomplete_ = 0;
  size_t next_prompt_ = 0;  // to print
  size_t next_choice_ = 0;
  ResultWriter writer_;
  std::string request_error_;  // the first
  FirstTokenTimes first_tokens_;
};

absl::Status GenerateJob::Prepare(const ModelSource& source) {
  LOCKSTEP_RETURN_IF_ERROR(CheckStepLog());
  LOCKSTEP_ASSIGN_OR_RETURN(encoder_, PromptEncoder::Create(options_.engine.model, options_.chat));
  LOCKSTEP_ASSIGN_OR_RETURN(prompts_, PreparePrompts(options_, source, *encoder_));
  vocab_size_ = source.config.vocab_size;
  return absl::OkStatus();
}

absl::Status GenerateJob::CheckStepLog() const {
  std::vector<std::string> inputs;
  for (const PromptInput& prompt : options_.prompts) {
    if (prompt.kind == PromptInput::Kind::kFile || prompt.kind == PromptInput::Kind::kLines) {
      inputs.push_back(prompt.text);
    }
  }
  return CheckOutputIsNoInput("--step-log", options_.engine.engine.step_log, options_.engine.model,
                              inputs);
}

absl::Status GenerateJob::Submit(Engine& engine, const SessionInfo&) {
  LOCKSTEP_RETURN_IF_ERROR(
      CheckPromptLengths(prompts_.prompts, vocab_size_, engine.max_model_len()));
  engine_ = &engine;
  if (!encoder_->has_tokenizer() && !options_.json) {
    LogInfo("the model has no tokenizer: the answer is printed as token ids");
  }
  LogInfo(prompts_.summary);
  SetSeeds();
  states_.resize(prompts_.prompts.size());
  order_.resize(states_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [this](size_t a, size_t b) {
    return prompts_.prompts[a].request.priority < prompts_.prompts[b].request.priority;
  });
  CatchInterrupt();
  first_tokens_.Start(states_.size());
  SubmitMore();
  return absl::OkStatus();
}

// A seed that was asked for counts for each prompt, whatever its neighbours; without one, equal
// prompts are to get different answers.
void GenerateJob::SetSeeds() {
  std::random_device random;
  const uint64_t seed = (uint64_t{random()} << 32) | random();
  bool draws = false;
  bool draws_without_seed = false;
  for (GeneratePrompt& prompt : prompts_.prompts) {
    SamplingParams& sampling = prompt.request.sampling;
    if (!prompt.has_seed) sampling.seed = seed + static_cast<uint64_t>(num_answers_);
    num_answers_ += sampling.n;
    draws = draws || sampling.temperature > 0;
    draws_without_seed = draws_without_seed || (sampling.temperature > 0 && !prompt.has_seed);
  }
  // At the start, so that an answer that was cut short can be had again.
  if (draws_without_seed) {
    const bool one_each = num_answers_ == std::ssize(prompts_.prompts);
    LogInfo(absl::StrFormat("seed: %d%s", seed,
                            num_answers_ == 1 ? ""
                            : one_each        ? " + index of the prompt"
                                              : " + number of the answer, from 0"));
  } else if (draws && options_.sampling.seed.has_value()) {
    LogInfo(absl::StrFormat("seed: %d", *options_.sampling.seed));
  }
}

// Keeps the engine's queue filled, and no more: requests that wait hold memory.
void GenerateJob::SubmitMore() {
  const int64_t enough = 2 * options_.engine.engine.max_num_seqs;
  while (!cancelled_ && num_submitted_ < order_.size() && num_open_ < enough) {
    SubmitPrompt(order_[num_submitted_++]);
  }
}

void GenerateJob::SubmitPrompt(size_t index) {
  Open(index);
  PromptState& state = states_[index];
  Request request = std::move(prompts_.prompts[index].request);
  request.on_event = [this, index](const RequestEvent& event) { return OnEvent(index, event); };
  request.on_prompt_logprobs = [&state](int64_t, std::span<const PositionLogprobs> logprobs) {
    state.prompt_logprobs.insert(state.prompt_logprobs.end(), logprobs.begin(), logprobs.end());
  };
  const absl::StatusOr<RequestId> id = engine_->Submit(std::move(request));
  LOCKSTEP_CHECK(id.ok());  // checked in Submit
  state.id = *id;
}

// Makes the prompt's answers, all empty.
void GenerateJob::Open(size_t index) {
  PromptState& state = states_[index];
  const GeneratePrompt& prompt = prompts_.prompts[index];
  const SamplingParams& sampling = prompt.request.sampling;
  if (options_.json) state.prompt_ids = prompt.request.prompt;
  for (int32_t choice = 0; choice < sampling.n; ++choice) {
    std::optional<TextOutput> text_output;
    if (encoder_->has_tokenizer()) {
      absl::StatusOr<StopMatcher> matcher = StopMatcher::Create(prompt.stop);
      LOCKSTEP_CHECK(matcher.ok());
      text_output.emplace(StreamDecoder(encoder_->tokenizer(), /*skip_special_tokens=*/true),
                          *std::move(matcher), sampling.min_tokens);
    }
    state.answers.emplace_back(choice, options_.json, std::move(text_output));
    if (!options_.json && sampling.n > 1) {
      state.answers.back().PrintFirst(
          absl::StrFormat("== prompt %d, choice %d ==\n", index, choice));
    }
  }
  state.context = {.prompt_index = index,
                   .num_choices = sampling.n,
                   .wants_logprobs = sampling.num_logprobs.has_value(),
                   .wants_prompt_logprobs = sampling.num_prompt_logprobs.has_value()};
  num_open_ += sampling.n;
}

// False ends the choice: a stop string was found, or nobody reads on.
bool GenerateJob::OnEvent(size_t index, const RequestEvent& event) {
  Answer& answer = states_[index].answers[static_cast<size_t>(event.choice)];
  if (event.token.has_value()) first_tokens_.Note(index);
  answer.Add(event);
  if (event.finish == FinishReason::kError && request_error_.empty()) {
    const std::string name = PromptName(prompts_.prompts, index);
    request_error_ = absl::StrFormat("%s: %s", name.empty() ? "prompt 0" : name, event.error);
  }
  const bool stopped = answer.stopped();
  if (stopped) {
    EndAnswer(index, event.choice, FinishReason::kStop);
  } else if (event.finish != FinishReason::kNone) {
    EndAnswer(index, event.choice, event.finish);
  }
  const bool listens = PrintInOrder();
  if (!listens || interrupted != 0) CancelAll();
  SubmitMore();
  return listens && !stopped;
}

void GenerateJob::EndAnswer(size_t index, int32_t choice, FinishReason finish) {
  PromptState& state = states_[index];
  if (finish == FinishReason::kCancelled) ++num_incomplete_;
  state.context.prompt_ids = state.prompt_ids;
  state.context.prompt_logprobs = state.prompt_logprobs;
  state.answers[static_cast<size_t>(choice)].End(finish, state.context, encoder_->tokenizer());
  ++state.num_ended;
  --num_open_;
}

// Prints what is there of the first answer that has not ended; answers are made side by side, but
// printed in order. False when nothing more can be printed.
bool GenerateJob::PrintInOrder() {
  while (next_prompt_ < states_.size()) {
    PromptState& state = states_[next_prompt_];
    if (state.answers.empty()) return writer_.Write("");  // not submitted yet
    Answer& answer = state.answers[next_choice_];
    if (!writer_.Write(answer.TakeUnprinted())) return false;
    if (!answer.ended()) return true;
    if (++next_choice_ < state.answers.size()) continue;
    state = PromptState();
    ++next_prompt_;
    next_choice_ = 0;
  }
  return true;
}

// Ends all prompts, also those whose turn has not come.
void GenerateJob::CancelAll() {
  if (cancelled_) return;
  cancelled_ = true;
  for (size_t i = 0; i < num_submitted_; ++i) {
    const PromptState& state = states_[order_[i]];
    if (!state.answers.empty() && state.num_ended < std::ssize(state.answers)) {
      engine_->Cancel(state.id);
    }
  }
  for (; num_submitted_ < order_.size(); ++num_submitted_) {
    const size_t index = order_[num_submitted_];
    Open(index);
    for (size_t choice = 0; choice < states_[index].answers.size(); ++choice) {
      EndAnswer(index, static_cast<int32_t>(choice), FinishReason::kCancelled);
    }
    PrintInOrder();
  }
}

absl::Status GenerateJob::Finish(const Engine& engine, const SessionInfo& session) {
  LOCKSTEP_RETURN_IF_ERROR(writer_.status());
  // mpirun forwards the two streams apart, in any order: the end of the answer goes first.
  if (LaunchedByMpirun()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  LogStatistics(engine.stats(), session, first_tokens_);
  if (!request_error_.empty()) return absl::InternalError(request_error_);
  if (interrupted == 0 || num_incomplete_ == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("interrupted: %d of %d answers are incomplete",
                                             num_incomplete_, num_answers_));
}

}  // namespace

int RunGenerate(const GenerateOptions& options) {
  GenerateJob job(options);
  return RunEngineJob(options.engine, job);
}

}  // namespace lockstep
