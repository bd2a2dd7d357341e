#include "launch/openai/responder.h"

#include <algorithm>
#include <utility>

#include "runtime/core/log.h"

namespace lockstep {

namespace {

// What these have made is sent while the responder goes on.
constexpr size_t kEventsAtOnce = 32;

double SecondsSince(ServingClock::time_point start) {
  return std::chrono::duration<double>(ServingClock::now() - start).count();
}

}  // namespace

Responder::Responder(Engine& engine, const Tokenizer* tokenizer, const ResponderOptions& options,
                     ServingObserver* observer)
    : engine_(engine),
      options_(options),
      observer_(observer),
      queue_(std::make_shared<EventQueue>()),
      texts_(tokenizer),
      thread_([this] { Run(); }) {
  engine.OnDelivered([queue = queue_] { queue->Announce(); });
}

Responder::~Responder() {
  queue_->Stop();
  thread_.join();
}

bool Responder::Open(const std::shared_ptr<OpenCall>& call) {
  const int64_t bytes = std::ssize(call->exchange->request().body);
  {
    const std::lock_guard lock(mutex_);
    if (num_taken_ >= options_.max_num_seqs + options_.max_queue) return false;
    if (num_taken_ > 0 && body_bytes_ + bytes > options_.max_open_body_bytes) return false;
    ++num_open_;
    ++num_taken_;
    body_bytes_ += bytes;
  }
  queue_->Push({.kind = ServingEvent::Kind::kOpened, .call = call});
  return true;
}

bool Responder::Reserve(OpenCall& call, int64_t num_choices) {
  const std::lock_guard lock(mutex_);
  if (call.control.closed()) return true;  // nothing will be submitted
  const int64_t limit = options_.max_num_seqs + options_.max_queue;
  if (num_choices_ > 0 && num_choices_ + num_choices > limit) return false;
  num_choices_ += num_choices;
  call.num_choices = num_choices;
  return true;
}

void Responder::Refuse(std::shared_ptr<OpenCall> call, ApiError error) {
  queue_->Push({.kind = ServingEvent::Kind::kRefused,
                .call = std::move(call),
                .error = std::make_unique<ApiError>(std::move(error))});
}

void Responder::EndAll(const ApiError& error) {
  std::unique_lock lock(mutex_);
  const int64_t before = num_ended_alls_;
  queue_->Push({.kind = ServingEvent::Kind::kEndAll, .error = std::make_unique<ApiError>(error)});
  changed_.wait(lock, [&] { return num_ended_alls_ > before; });
}

bool Responder::WaitIdle(double seconds) {
  std::unique_lock lock(mutex_);
  // A wait of years overflows the clock.
  const std::chrono::duration<double> patience(std::clamp(seconds, 0.0, 1e8));
  return changed_.wait_for(lock, patience, [this] { return num_open_ == 0; });
}

int64_t Responder::num_open() const {
  const std::lock_guard lock(mutex_);
  return num_open_;
}

void Responder::Run() {
  std::vector<ServingEvent> events;
  while (true) {
    const std::optional<ServingClock::time_point> deadline =
        deadlines_.empty() ? std::nullopt : std::optional(deadlines_.begin()->first);
    if (!queue_->Take(deadline, &events)) return;
    for (size_t i = 0; i < events.size(); ++i) {
      HandleSafely(events[i]);
      if (i % kEventsAtOnce == kEventsAtOnce - 1) Flush();
    }
    events.clear();
    KeepDeadlines();
    KeepHeldBytes();
    Flush();
  }
}

// No memory for one answer, or a bug in it, ends that answer alone.
void Responder::HandleSafely(ServingEvent& event) {
  try {
    Handle(event);
  } catch (const std::exception& e) {
    const auto entry = open_.find(event.call.get());
    if (entry == open_.end()) return;
    Fail(*entry->second.call,
         {.http_status = 500, .message = absl::StrFormat("the request failed: %s", e.what())});
  }
}

void Responder::Handle(ServingEvent& event) {
  using Kind = ServingEvent::Kind;
  if (event.kind == Kind::kOpened) {
    OnOpened(std::move(event.call));
    return;
  }
  if (event.kind == Kind::kEndAll) {
    while (!open_.empty()) Fail(*open_.begin()->second.call, *event.error);
    const std::lock_guard lock(mutex_);
    ++num_ended_alls_;
    changed_.notify_all();
    return;
  }
  if (open_.count(event.call.get()) == 0) return;  // it was closed meanwhile
  OpenCall& call = *event.call;
  switch (event.kind) {
    case Kind::kRefused:
      Fail(call, *event.error);
      break;
    case Kind::kSubmitted:
      call.submitted = true;
      break;
    case Kind::kGone:
      Close(call, 499);
      Closed();
      break;
    case Kind::kAdmitted:
      if (observer_ != nullptr) observer_->OnAdmitted(event.seconds);
      break;
    case Kind::kEngineEvent:
      OnEngineEvent(call, event.prompt, event.at, event.engine_event);
      break;
    case Kind::kPromptLogprobs:
      OnPromptLogprobs(call, event.prompt, std::move(event.prompt_logprobs));
      break;
    default:
      break;
  }
}

void Responder::OnOpened(std::shared_ptr<OpenCall> call) {
  Deadlines::iterator deadline = deadlines_.end();
  if (options_.request_timeout_seconds > 0) {
    const auto patience = std::chrono::duration_cast<ServingClock::duration>(
        std::chrono::duration<double>(options_.request_timeout_seconds));
    deadline = deadlines_.emplace(call->arrival + patience, call.get());
  }
  const OpenCall* const key = call.get();
  open_.emplace(key, Entry{std::move(call), deadline});
}

void Responder::KeepDeadlines() {
  while (!deadlines_.empty() && deadlines_.begin()->first <= ServingClock::now()) {
    OpenCall& call = *deadlines_.begin()->second;
    const bool started = call.begun || call.response_bytes > 0;
    const std::string message = absl::StrFormat(
        "the request was %s after %g seconds, the server's limit",
        started ? "not finished" : "still waiting", options_.request_timeout_seconds);
    ApiError error = Overloaded(503, message);
    // A client that tries again at once would only add to the load.
    if (started) error = {504, message, "", "request_timeout", {{"x-should-retry", "false"}}};
    Fail(call, error);
  }
}

// The longest goes: who asks for little is not to suffer.
void Responder::KeepHeldBytes() {
  while (held_bytes_ > options_.max_held_bytes) {
    const auto longest =
        std::max_element(open_.begin(), open_.end(), [](const auto& a, const auto& b) {
          return a.second.call->held_bytes < b.second.call->held_bytes;
        });
    Fail(*longest->second.call,
         Overloaded(503, absl::StrFormat("the server keeps more than %d bytes of answers, this is "
                                         "the longest: ask for less, or for a stream",
                                         options_.max_held_bytes)));
  }
}

void Responder::Fail(OpenCall& call, const ApiError& error) {
  const bool begun = call.begun;
  const std::string unsent = std::exchange(call.unsent, {});
  if (!begun && !call.submitted && observer_ != nullptr) observer_->OnRefused(error.http_status);
  if (error.http_status >= 500) {
    lockstep::Log(
        options_.logs_requests ? LogLevel::kWarning : LogLevel::kDebug,
        absl::StrFormat("request %s: %s", call.exchange->request().request_id, error.message));
  }
  const std::shared_ptr<OpenCall> keep = Close(call, error.http_status);
  if (begun) {
    call.exchange->Write(unsent + ErrorEvent(ErrorJson(error)));
    call.exchange->End();
  } else {
    RespondError(*call.exchange, error);
  }
  Closed();
}

std::shared_ptr<OpenCall> Responder::Close(OpenCall& call, int http_status) {
  const auto entry = open_.find(&call);
  LOCKSTEP_CHECK(entry != open_.end());
  std::shared_ptr<OpenCall> keep = entry->second.call;
  if (entry->second.deadline != deadlines_.end()) deadlines_.erase(entry->second.deadline);
  open_.erase(entry);
  held_bytes_ -= std::exchange(call.held_bytes, 0);
  call.control.Close(engine_);
  call.unsent.clear();
  const FinishReason reason = http_status >= 500 ? FinishReason::kError : FinishReason::kCancelled;
  for (size_t p = 0; call.submitted && p < call.prompts.size(); ++p) {
    for (size_t i = 0; i < call.prompts[p].choices.size(); ++i) {
      if (!call.prompts[p].choices[i].output.ended()) EndChoice(call, p, i, reason);
    }
  }
  Log(call, http_status);
  const std::lock_guard lock(mutex_);
  --num_taken_;
  num_choices_ -= call.num_choices;
  body_bytes_ -= std::ssize(call.exchange->request().body);
  return keep;
}

void Responder::Closed() {
  const std::lock_guard lock(mutex_);
  if (--num_open_ == 0) changed_.notify_all();
}

void Responder::Log(const OpenCall& call, int http_status) const {
  const LogLevel level = options_.logs_requests ? LogLevel::kInfo : LogLevel::kDebug;
  if (!LogIsOn(level)) return;
  const HttpRequest& request = call.exchange->request();
  std::string tokens;
  if (call.submitted) {
    const TokenUsage usage = Usage(call);
    tokens = absl::StrFormat(", %d prompt tokens, %d generated", usage.prompt_tokens,
                             usage.completion_tokens);
  }
  lockstep::Log(
      level, absl::StrFormat("request %s: %s %s from %s: %s%s, %.3f s", request.request_id,
                             request.method, request.path, request.peer,
                             http_status == 499 ? "the client has gone" : absl::StrCat(http_status),
                             tokens, SecondsSince(call.arrival)));
}

}  // namespace lockstep
