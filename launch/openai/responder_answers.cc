// The responder's other half: what becomes of the engine's events.
#include <algorithm>
#include <utility>

#include "launch/openai/responder.h"

namespace lockstep {

namespace {

const HttpHeaders& StreamHeaders() {
  // The last: a proxy between is not to collect what comes before it passes it on.
  static const HttpHeaders headers = {{"Content-Type", "text/event-stream; charset=utf-8"},
                                      {"Cache-Control", "no-cache"},
                                      {"X-Accel-Buffering", "no"}};
  return headers;
}

size_t ChoiceNumber(const OpenCall& call, size_t prompt, size_t index) {
  return prompt * static_cast<size_t>(call.fields.sampling.n) + index;
}

// About, as JSON.
int64_t LogprobBytes(const OpenCall& call, int64_t positions) {
  return positions * (call.fields.sampling.num_prompt_logprobs.value_or(0) + 1) * 48;
}

double Seconds(ServingClock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

void Responder::OnEngineEvent(OpenCall& call, size_t prompt, ServingClock::time_point at,
                              const RequestEvent& event) {
  const size_t index = static_cast<size_t>(event.choice);
  CallPrompt::Choice& choice = call.prompts[prompt].choices[index];
  if (choice.output.ended()) return;  // the engine was ahead of a stop string
  if (event.finish == FinishReason::kError) {
    Fail(call, {.http_status = 500, .message = event.error});
    return;
  }
  if (event.finish == FinishReason::kCancelled) {  // not by us
    Fail(call, Overloaded(503, "the server is shutting down"));
    return;
  }
  if (const absl::Status begun = BeginChoice(call, call.prompts[prompt], choice); !begun.ok()) {
    Fail(call, ErrorOf(begun));
    return;
  }
  if (!call.fields.echo_only) AddToken(call, choice, at, event);
  if (choice.output.stopped()) {
    call.control.StopChoice(ChoiceNumber(call, prompt, index));
    EndChoice(call, prompt, index, FinishReason::kStop);
  } else if (event.finish != FinishReason::kNone) {
    EndChoice(call, prompt, index, event.finish);
  }
  if (call.fields.stream) {
    Stream(call, prompt, index);
  } else if (call.response_bytes > options_.max_response_bytes) {
    Fail(call,
         BadRequest(absl::StrFormat("the response exceeds %d bytes: ask for fewer logprobs or "
                                    "choices, or for a stream",
                                    options_.max_response_bytes)));
    return;
  }
  if (call.num_ended == call.num_choices) Complete(call);
}

// The event's token, if it has one.
void Responder::AddToken(OpenCall& call, CallPrompt::Choice& choice, ServingClock::time_point at,
                         const RequestEvent& event) {
  if (!event.token.has_value() && !event.stop_token.has_value()) return;
  CountToken(call, choice, at);
  ++call.completion_tokens;
  if (event.stop_token.has_value()) {
    choice.output.AddEndToken(*event.stop_token);
    return;
  }
  const auto before = static_cast<int64_t>(choice.output.size_bytes());
  choice.output.Add(*event.token, event.logprobs, texts_);
  Hold(call, static_cast<int64_t>(choice.output.size_bytes()) - before);
}

void Responder::Hold(OpenCall& call, int64_t bytes) {
  call.response_bytes += bytes;
  if (call.fields.stream) return;
  call.held_bytes += bytes;
  held_bytes_ += bytes;
}

void Responder::CountToken(OpenCall& call, CallPrompt::Choice& choice,
                           ServingClock::time_point at) {
  if (observer_ != nullptr) {
    if (choice.last_token.has_value()) {
      observer_->OnNextToken(Seconds(at - *choice.last_token));
    } else {
      observer_->OnFirstToken(Seconds(at - call.arrival));
    }
  }
  choice.last_token = at;
}

void Responder::OnPromptLogprobs(OpenCall& call, size_t prompt,
                                 std::vector<PositionLogprobs> logprobs) {
  CallPrompt& own = call.prompts[prompt];
  Hold(call,
       LogprobBytes(call, std::ssize(logprobs)) * (call.fields.echo ? std::ssize(own.choices) : 1));
  if (call.response_bytes > options_.max_response_bytes) {
    Fail(call, BadRequest(absl::StrFormat(
                   "the response exceeds %d bytes: ask for fewer logprobs, choices or prompts",
                   options_.max_response_bytes)));
    return;
  }
  std::move(logprobs.begin(), logprobs.end(), std::back_inserter(own.logprobs));
}

void Responder::EndChoice(OpenCall& call, size_t prompt, size_t index, FinishReason reason) {
  CallPrompt& own = call.prompts[prompt];
  ChoiceOutput& output = own.choices[index].output;
  output.End(reason);
  ++call.num_ended;
  if (observer_ == nullptr) return;
  const SamplingParams& sampling = call.fields.sampling;
  observer_->OnFinished(
      {.reason = output.reason(),
       .seconds = Seconds(ServingClock::now() - call.arrival),
       .prompt_tokens = own.num_tokens,
       .generated_tokens = output.num_tokens(),
       .n = sampling.n,
       .max_tokens = std::min(sampling.max_tokens, engine_.max_model_len() - own.num_tokens)});
}

// Before the choice's first token; the engine has told the prompt's logprobs by then.
absl::Status Responder::BeginChoice(const OpenCall& call, const CallPrompt& prompt,
                                    CallPrompt::Choice& choice) {
  if (std::exchange(choice.begun, true)) return absl::OkStatus();
  const SamplingParams& sampling = call.fields.sampling;
  if (sampling.num_prompt_logprobs.has_value() &&
      std::ssize(prompt.logprobs) != prompt.num_tokens - 1) {
    return absl::InternalError(
        absl::StrFormat("%d of the prompt's %d log probabilities have come before its first token",
                        prompt.logprobs.size(), prompt.num_tokens - 1));
  }
  if (call.fields.echo && sampling.num_logprobs.has_value()) {
    choice.output.logprobs().AddPrompt(prompt.ids, prompt.logprobs, texts_);
  }
  return absl::OkStatus();
}

void Responder::Begin(OpenCall& call) {
  if (std::exchange(call.begun, true)) return;
  call.exchange->Begin(200, StreamHeaders());
}

void Responder::Stream(OpenCall& call, size_t prompt, size_t index) {
  CallPrompt& own = call.prompts[prompt];
  CallPrompt::Choice& choice = own.choices[index];
  const size_t number = ChoiceNumber(call, prompt, index);
  Begin(call);
  if (!std::exchange(choice.role_sent, true) && call.kind == ApiKind::kChat) {
    call.response->AppendRole(static_cast<int64_t>(number), Usage(call), &call.unsent);
  }
  if (choice.output.has_news() || choice.output.ended()) {
    call.response->AppendChunk(TakeText(call, own, choice, number), Usage(call), &call.unsent);
  }
  if (call.unsent.empty() || std::exchange(call.is_dirty, true)) return;
  dirty_.push_back(open_.at(&call).call);
}

// What is new of the choice.
ChoiceText Responder::TakeText(const OpenCall& call, const CallPrompt& prompt,
                               CallPrompt::Choice& choice, size_t number) {
  ChoiceText text{.index = static_cast<int64_t>(number),
                  .content = choice.output.TakeContent(),
                  .calls = choice.output.TakeCalls(),
                  .first_call = choice.num_calls_sent,
                  .finish = choice.output.finish()};
  choice.num_calls_sent += std::ssize(text.calls);
  if (call.fields.sampling.num_logprobs.has_value())
    text.logprobs = choice.output.logprobs().Take();
  if (call.fields.return_token_ids) {
    text.token_ids = choice.output.TakeTokenIds();
    if (!std::exchange(choice.ids_sent, true)) text.prompt_token_ids = prompt.ids;
  }
  if (call.fields.prompt_logprobs && !call.fields.stream) {
    text.prompt_logprobs = PromptLogprobsJson(prompt.logprobs, texts_);
  }
  return text;
}

void Responder::Complete(OpenCall& call) {
  std::string text;
  if (call.fields.stream) {
    text = std::exchange(call.unsent, {});
    call.response->AppendEnd(Usage(call), &text);
  } else {
    text = WholeResponse(call);
  }
  const std::shared_ptr<OpenCall> keep = Close(call, 200);
  if (call.fields.stream) {
    call.exchange->Write(std::move(text));
    call.exchange->End();
  } else {
    call.exchange->Respond(200, {{"Content-Type", "application/json"}}, std::move(text));
  }
  Closed();
}

std::string Responder::WholeResponse(OpenCall& call) {
  std::string json = call.response->Head();
  for (size_t p = 0; p < call.prompts.size(); ++p) {
    CallPrompt& prompt = call.prompts[p];
    for (size_t i = 0; i < prompt.choices.size(); ++i) {
      call.response->AppendChoice(
          TakeText(call, prompt, prompt.choices[i], ChoiceNumber(call, p, i)), &json);
    }
  }
  call.response->AppendTail(Usage(call), &json);
  return json;
}

TokenUsage Responder::Usage(const OpenCall& call) const {
  return {.prompt_tokens = call.prompt_tokens, .completion_tokens = call.completion_tokens};
}

void Responder::Flush() {
  for (const std::shared_ptr<OpenCall>& call : dirty_) {
    call->is_dirty = false;
    if (!call->unsent.empty()) call->exchange->Write(std::exchange(call->unsent, {}));
  }
  dirty_.clear();
}

}  // namespace lockstep
