// The thread that answers: engine events in, JSON and server-sent events out. It also keeps the
// deadlines and knows every call that is open.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "launch/openai/event_queue.h"
#include "launch/openai/serving_observer.h"
#include "launch/openai/token_texts.h"

namespace lockstep {

struct ResponderOptions {
  double request_timeout_seconds = 0;
  int64_t max_num_seqs = 1;
  int64_t max_queue = 0;
  int64_t max_open_body_bytes = int64_t{1} << 30;   // of all open calls
  int64_t max_held_bytes = int64_t{4} << 30;        // of all answers that are no streams
  int64_t max_response_bytes = int64_t{256} << 20;  // of one answer that is no stream
  bool logs_requests = true;
};

// Public methods may be called from any thread.
class Responder {
 public:
  // `observer` may be null. What is passed must outlive the responder.
  Responder(Engine& engine, const Tokenizer* tokenizer, const ResponderOptions& options,
            ServingObserver* observer);
  // EndAll must have been called.
  ~Responder();

  // Takes the call in; its answer comes from here, whatever happens. False, and nothing is done,
  // when too many are open.
  bool Open(const std::shared_ptr<OpenCall>& call);
  // Room for the call's choices; false when too many run and wait. A call alone always has room.
  bool Reserve(OpenCall& call, int64_t num_choices);
  void Refuse(std::shared_ptr<OpenCall> call, ApiError error);
  // Where the engine's callbacks push, and who learns that a client has gone.
  const std::shared_ptr<EventQueue>& queue() const { return queue_; }
  ServingObserver* observer() const { return observer_; }

  // Answers every open call with `error`; returns when that is done.
  void EndAll(const ApiError& error);
  // Waits until no call is open, at most `seconds`; whether that is so.
  bool WaitIdle(double seconds);
  int64_t num_open() const;

 private:
  using Deadlines = std::multimap<ServingClock::time_point, OpenCall*>;
  struct Entry {
    std::shared_ptr<OpenCall> call;
    Deadlines::iterator deadline;  // end(): none
  };

  void Run();
  void HandleSafely(ServingEvent& event);
  void Handle(ServingEvent& event);
  void KeepDeadlines();
  void KeepHeldBytes();
  void Flush();

  void OnOpened(std::shared_ptr<OpenCall> call);
  void OnEngineEvent(OpenCall& call, size_t prompt, ServingClock::time_point at,
                     const RequestEvent& event);
  void OnPromptLogprobs(OpenCall& call, size_t prompt, std::vector<PositionLogprobs> logprobs);
  void AddToken(OpenCall& call, CallPrompt::Choice& choice, ServingClock::time_point at,
                const RequestEvent& event);
  void Hold(OpenCall& call, int64_t bytes);
  void CountToken(OpenCall& call, CallPrompt::Choice& choice, ServingClock::time_point at);
  void EndChoice(OpenCall& call, size_t prompt, size_t index, FinishReason reason);
  // Sends what is new of the choice.
  void Stream(OpenCall& call, size_t prompt, size_t index);
  void Begin(OpenCall& call);
  absl::Status BeginChoice(const OpenCall& call, const CallPrompt& prompt,
                           CallPrompt::Choice& choice);
  ChoiceText TakeText(const OpenCall& call, const CallPrompt& prompt, CallPrompt::Choice& choice,
                      size_t number);
  void Complete(OpenCall& call);
  std::string WholeResponse(OpenCall& call);
  TokenUsage Usage(const OpenCall& call) const;
  // Answers with an error, or with an error event when a stream has begun.
  void Fail(OpenCall& call, const ApiError& error);
  // The call is about to be answered, or nobody waits for it: cancels what is left of it and
  // forgets it. The second half follows the answer.
  std::shared_ptr<OpenCall> Close(OpenCall& call, int http_status);
  void Closed();
  void Log(const OpenCall& call, int http_status) const;

  Engine& engine_;
  const ResponderOptions options_;
  ServingObserver* const observer_;
  const std::shared_ptr<EventQueue> queue_;

  // The thread's own.
  TokenTexts texts_;
  std::unordered_map<const OpenCall*, Entry> open_;
  Deadlines deadlines_;
  std::vector<std::shared_ptr<OpenCall>> dirty_;
  int64_t held_bytes_ = 0;  // the sum of the open calls'

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_open_ = 0;  // not answered
  // The room that calls take up; it is free again before their answers go out, as who is answered
  // may ask again.
  int64_t num_taken_ = 0;
  int64_t num_choices_ = 0;  // reserved
  int64_t body_bytes_ = 0;
  int64_t num_ended_alls_ = 0;

  std::thread thread_;  // the last: it uses the others
};

}  // namespace lockstep
