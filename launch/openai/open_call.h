// One HTTP request for completions or a chat, from its arrival until it is answered.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "launch/http/http_server.h"
#include "launch/openai/choice_output.h"
#include "launch/openai/generation_fields.h"
#include "launch/openai/response_text.h"
#include "runtime/engine.h"

namespace lockstep {

using ServingClock = std::chrono::steady_clock;

// One prompt of a call, an engine request of its own.
struct CallPrompt {
  int64_t num_tokens = 0;
  std::vector<int32_t> ids;  // where the answer names them
  std::string echo;
  // From position 1 on, as they come, where they were asked for.
  std::vector<PositionLogprobs> logprobs;
  struct Choice {
    ChoiceOutput output;
    bool begun = false;      // it had an event
    bool role_sent = false;  // in a stream
    bool ids_sent = false;   // of the prompt
    int64_t num_calls_sent = 0;
    std::optional<ServingClock::time_point> last_token = std::nullopt;
  };
  std::vector<Choice> choices;
};

// Who may touch what: first the worker that prepares the call alone has everything but `control`;
// from the submission on the responder alone. `control` is for all threads.
struct OpenCall {
  OpenCall(std::shared_ptr<HttpExchange> exchange, ApiKind kind)
      : exchange(std::move(exchange)), kind(kind), arrival(ServingClock::now()) {}

  const std::shared_ptr<HttpExchange> exchange;
  const ApiKind kind;
  const ServingClock::time_point arrival;

  GenerationFields fields;
  std::vector<CallPrompt> prompts;
  int64_t prompt_tokens = 0;  // of all prompts
  int64_t completion_tokens = 0;
  std::optional<ResponseText> response;
  int64_t num_new_choices = 0;  // of all prompts
  int64_t num_choices = 0;      // the same once reserved; guarded by the responder's mutex

  // The responder's.
  bool submitted = false;  // prompts and fields are its own
  bool begun = false;      // a stream's head is sent
  int64_t num_ended = 0;
  int64_t response_bytes = 0;  // of the answer so far, about
  int64_t held_bytes = 0;      // the same where it is kept until it is whole: no stream
  std::string unsent;          // of the stream
  bool is_dirty = false;       // unsent is not empty and will be sent

  class Control {
   public:
    // No more events are wanted: on_event answers false. Any thread.
    bool closed() const { return closed_.load(std::memory_order_relaxed); }
    bool wants(size_t choice) const {
      return !closed() && !stopped_[choice].load(std::memory_order_relaxed);
    }
    void StopChoice(size_t choice) { stopped_[choice].store(true, std::memory_order_relaxed); }
    void SetNumChoices(int64_t num) {
      stopped_ = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(num));
    }
    // Submits unless the call was closed; 0 then.
    absl::StatusOr<RequestId> Submit(Engine& engine, Request request);
    // Closes and cancels what was submitted.
    void Close(Engine& engine);

   private:
    std::atomic<bool> closed_ = false;
    std::unique_ptr<std::atomic<bool>[]> stopped_;  // by prompt * n + choice
    std::mutex mutex_;
    std::vector<RequestId> ids_;
  };
  Control control;
};

}  // namespace lockstep
