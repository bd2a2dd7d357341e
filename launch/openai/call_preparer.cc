#include "launch/openai/call_preparer.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "launch/openai/request_body.h"
#include "model/tokenizer/stream_decoder.h"
#include "runtime/request_check.h"

namespace lockstep {

namespace {

// Who sends a few lengths of the model is told how many tokens it was, beyond that it is not worth
// the work.
constexpr int64_t kCountedLengths = 4;
constexpr int64_t kMaxEchoBytes = int64_t{64} << 20;

uint64_t RandomSeed() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  return random();
}

int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The text of a prompt that came as ids. Ids that no token has add none.
std::string DecodePrompt(const Tokenizer* tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  if (tokenizer == nullptr) {
    for (const int32_t id : ids) text += IdAsText(id);
    return text;
  }
  StreamDecoder decoder(tokenizer, /*skip_special_tokens=*/true);
  for (const int32_t id : ids) text += decoder.Push(id);
  return text + decoder.Finish();
}

absl::Status NoRoom(const std::string& num_tokens, int64_t limit) {
  return absl::OutOfRangeError(absl::StrFormat(
      "the prompt has %s tokens, which leaves no room for an answer in this model's maximum length "
      "of %d tokens (prompt and answer together)",
      num_tokens, limit));
}

}  // namespace

CallPreparer::CallPreparer(Engine& engine, const ServedModel& model, const OpenAiOptions& options,
                           Responder& responder)
    : engine_(engine), model_(model), options_(options), responder_(responder) {}

void CallPreparer::Prepare(const std::shared_ptr<OpenCall>& call) const {
  if (call->control.closed()) return;
  try {
    absl::StatusOr<std::vector<Request>> requests = MakeRequests(call);
    if (!requests.ok()) {
      responder_.Refuse(call, ErrorOf(requests.status()));
    } else if (!responder_.Reserve(*call, call->num_new_choices)) {
      responder_.Refuse(
          call, Overloaded(429, absl::StrFormat(
                                    "the server is busy: %d requests may run and %d wait at once",
                                    options_.max_num_seqs, options_.max_queue)));
    } else {
      Submit(call, *std::move(requests));
    }
  } catch (const std::exception& e) {  // no memory, or a bug: this request's alone
    responder_.Refuse(
        call, {.http_status = 500, .message = absl::StrFormat("the request failed: %s", e.what())});
  }
}

absl::Status CallPreparer::CheckModel(const std::string& name) const {
  const std::vector<std::string>& names = options_.served_model_names;
  if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrFormat("the model '%s' does not exist; this server has '%s'",
                                             name.substr(0, 200), names.front()));
}

absl::StatusOr<std::vector<int32_t>> CallPreparer::EncodeText(const std::string& text,
                                                              bool add_special_tokens,
                                                              int64_t max_tokens) const {
  if (model_.tokenizer == nullptr) {
    return absl::InvalidArgumentError(
        "prompt is text, but the model has no tokenizer: send token ids");
  }
  absl::StatusOr<std::vector<int32_t>> ids =
      model_.tokenizer->Encode(text, add_special_tokens, max_tokens);
  if (absl::IsOutOfRange(ids.status())) {
    return NoRoom(absl::StrFormat("more than %d", max_tokens), engine_.max_model_len());
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> CallPreparer::EncodeChat(std::string_view body,
                                                              bool add_special_tokens,
                                                              int64_t max_tokens,
                                                              ChatPrompt* chat) const {
  if (model_.chat == nullptr || model_.tokenizer == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "messages cannot be answered by this model: %s",
        model_.no_chat_reason.empty() ? "it has no chat template" : model_.no_chat_reason));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson ordered, ParseOrderedBody(body));
  LOCKSTEP_ASSIGN_OR_RETURN(*chat, ReadChat(ordered));
  if (chat->calls_tools && !model_.chat->knows_tools()) {
    return absl::InvalidArgumentError(
        "tools is not supported by this model: its chat template does not mention them; leave them "
        "out, or serve with --chat-template FILE, a template that does");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, model_.chat->Render(chat->input));
  chat->input = nullptr;
  return EncodeText(text, add_special_tokens, max_tokens);
}

absl::StatusOr<std::vector<std::vector<int32_t>>> CallPreparer::ReadPromptIds(
    Json& body, OpenCall& call, ChatPrompt* chat) const {
  std::vector<std::vector<int32_t>> all;
  const bool special = call.fields.add_special_tokens;
  const int64_t max_tokens = kCountedLengths * engine_.max_model_len();
  if (call.kind == ApiKind::kChat) {
    LOCKSTEP_ASSIGN_OR_RETURN(std::vector<int32_t> ids,
                              EncodeChat(call.exchange->request().body, special, max_tokens, chat));
    all.push_back(std::move(ids));
    call.prompts.resize(1);
    return all;
  }
  const int32_t n = call.fields.sampling.n;
  LOCKSTEP_ASSIGN_OR_RETURN(std::vector<PromptSource> sources, ReadPrompts(body, kMaxChoices / n));
  for (PromptSource& source : sources) {
    std::vector<int32_t> ids = std::move(source.ids);
    if (source.is_text) {
      LOCKSTEP_ASSIGN_OR_RETURN(ids, EncodeText(source.text, special, max_tokens));
    }
    CallPrompt& prompt = call.prompts.emplace_back();
    if (call.fields.echo) {
      prompt.echo = source.is_text ? std::move(source.text) : DecodePrompt(model_.tokenizer, ids);
    }
    all.push_back(std::move(ids));
  }
  return all;
}

// OutOfRange for its length.
absl::Status CallPreparer::CheckPrompt(const std::vector<int32_t>& ids,
                                       const SamplingParams& sampling) const {
  const int64_t limit = engine_.max_model_len();
  if (std::ssize(ids) >= limit) {
    return NoRoom(absl::StrCat(ids.size()), limit);
  }
  PlanLimits limits;
  limits.vocab_size = model_.config->vocab_size;
  limits.max_model_len = limit;
  Request request;
  request.prompt = ids;
  request.sampling = sampling;
  return CheckRequest(request, limits);
}

absl::Status CallPreparer::MakeChoices(OpenCall& call, const ChatPrompt& chat) const {
  const GenerationFields& fields = call.fields;
  const Tokenizer* const tokenizer = model_.tokenizer;
  if (tokenizer == nullptr && !fields.stop.empty()) {
    return absl::InvalidArgumentError("stop is text, but the model has no tokenizer");
  }
  bool skip_special = fields.skip_special_tokens;
  if (chat.calls_tools) {  // some models mark the tags special
    const std::optional<int32_t> begin = tokenizer->TokenToId(kToolCallBegin);
    skip_special = skip_special && !(begin.has_value() && tokenizer->IsSpecial(*begin));
  }
  const ChoiceOutput::Options options{.kind = call.kind,
                                      .calls_tools = chat.calls_tools,
                                      .single_tool_call = chat.single_tool_call,
                                      .keeps_token_ids = fields.return_token_ids};
  int64_t echo_bytes = 0;
  for (const CallPrompt& prompt : call.prompts) echo_bytes += std::ssize(prompt.echo);
  if (echo_bytes * fields.sampling.n > kMaxEchoBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("echo is true: n times the prompts are more than %d bytes", kMaxEchoBytes));
  }
  for (CallPrompt& prompt : call.prompts) {
    for (int32_t i = 0; i < fields.sampling.n; ++i) {
      std::optional<TextOutput> text;
      if (tokenizer != nullptr) {
        LOCKSTEP_ASSIGN_OR_RETURN(StopMatcher matcher, StopMatcher::Create(fields.stop));
        text.emplace(StreamDecoder(tokenizer, skip_special), std::move(matcher),
                     fields.sampling.min_tokens);
      }
      prompt.choices.push_back({.output = ChoiceOutput(options, std::move(text))});
      prompt.choices.back().output.AddEcho(prompt.echo);
    }
    prompt.echo.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Request>> CallPreparer::MakeRequests(
    const std::shared_ptr<OpenCall>& call) const {
  LOCKSTEP_ASSIGN_OR_RETURN(Json body, ParseBody(call->exchange->request().body));
  const int64_t limit = engine_.max_model_len();
  LOCKSTEP_ASSIGN_OR_RETURN(call->fields, ReadGenerationFields(body, call->kind, *model_.generation,
                                                               *model_.config, limit));
  const GenerationFields& fields = call->fields;
  LOCKSTEP_RETURN_IF_ERROR(CheckModel(fields.model));
  ChatPrompt chat;
  LOCKSTEP_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> prompts,
                            ReadPromptIds(body, *call, &chat));
  for (size_t p = 0; p < prompts.size(); ++p) {
    const absl::Status status = CheckPrompt(prompts[p], fields.sampling);
    if (status.ok()) continue;
    return prompts.size() == 1 ? status : Annotate(status, absl::StrFormat("prompt[%d]", p));
  }
  LOCKSTEP_RETURN_IF_ERROR(MakeChoices(*call, chat));
  call->num_new_choices = std::ssize(prompts) * fields.sampling.n;
  call->control.SetNumChoices(call->num_new_choices);
  call->response.emplace(fields,
                         fields.model.empty() ? options_.served_model_names.front() : fields.model,
                         options_.system_fingerprint, UnixSeconds());
  const bool keeps_ids = fields.return_token_ids || (fields.echo && fields.sampling.num_logprobs);
  std::vector<Request> requests;
  for (size_t p = 0; p < prompts.size(); ++p) {
    Request& request = requests.emplace_back();
    call->prompts[p].num_tokens = std::ssize(prompts[p]);
    call->prompt_tokens += std::ssize(prompts[p]);
    if (keeps_ids) call->prompts[p].ids = prompts[p];
    request.prompt = std::move(prompts[p]);
    request.sampling = fields.sampling;
    if (!fields.has_seed) request.sampling.seed = RandomSeed();
    request.priority = fields.priority;
    request.cache_salt = fields.cache_salt;
  }
  return requests;
}

void CallPreparer::Submit(const std::shared_ptr<OpenCall>& call,
                          std::vector<Request> requests) const {
  const std::shared_ptr<EventQueue>& queue = responder_.queue();
  const int32_t n = call->fields.sampling.n;
  // From here on the call is the responder's.
  queue->Push({.kind = ServingEvent::Kind::kSubmitted, .call = call});
  for (size_t p = 0; p < requests.size(); ++p) {
    Request& request = requests[p];
    const int64_t num_tokens = std::ssize(request.prompt);
    // On the engine's thread: nothing but this may be done here. It announces what has gathered.
    request.on_event = [queue, call, p, n](const RequestEvent& event) {
      const size_t choice = p * static_cast<size_t>(n) + static_cast<size_t>(event.choice);
      if (!call->control.wants(choice)) return false;
      queue->PushQuietly({.kind = ServingEvent::Kind::kEngineEvent,
                          .call = call,
                          .prompt = p,
                          .at = ServingClock::now(),
                          .engine_event = event});
      return true;
    };
    request.on_admitted = [queue, call, submitted = ServingClock::now()] {
      const std::chrono::duration<double> waited = ServingClock::now() - submitted;
      queue->PushQuietly(
          {.kind = ServingEvent::Kind::kAdmitted, .call = call, .seconds = waited.count()});
    };
    if (request.sampling.num_prompt_logprobs.has_value()) {
      request.on_prompt_logprobs = [queue, call, p](int64_t,
                                                    std::span<const PositionLogprobs> logprobs) {
        if (call->control.closed()) return;
        queue->PushQuietly({.kind = ServingEvent::Kind::kPromptLogprobs,
                            .call = call,
                            .prompt = p,
                            .prompt_logprobs = {logprobs.begin(), logprobs.end()}});
      };
    }
    const absl::StatusOr<RequestId> id = call->control.Submit(engine_, std::move(request));
    if (!id.ok()) {
      responder_.Refuse(call, ErrorOf(id.status()));
      return;
    }
    if (*id != 0 && responder_.observer() != nullptr) {
      responder_.observer()->OnSubmitted(num_tokens);
    }
  }
}

}  // namespace lockstep
