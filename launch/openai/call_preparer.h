// From a request's body to engine requests: parsing, the chat template, tokenising, checks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launch/openai/api_server.h"
#include "launch/openai/open_call.h"
#include "launch/openai/prompt_fields.h"
#include "launch/openai/responder.h"

namespace lockstep {

// Const methods may be called from several threads at once.
class CallPreparer {
 public:
  // Everything outlives the preparer.
  CallPreparer(Engine& engine, const ServedModel& model, const OpenAiOptions& options,
               Responder& responder);

  // Prepares and submits the call; a refusal goes to the responder.
  void Prepare(const std::shared_ptr<OpenCall>& call) const;

  // POST /tokenize and /detokenize: the response, or why there is none.
  absl::StatusOr<std::string> Tokenize(std::string_view body) const;
  absl::StatusOr<std::string> Detokenize(std::string_view body) const;

  // NotFound for a name that the model does not have; an empty one is the first.
  absl::Status CheckModel(const std::string& name) const;

 private:
  absl::StatusOr<std::vector<std::vector<int32_t>>> ReadPromptIds(Json& body, OpenCall& call,
                                                                  ChatPrompt* chat) const;
  // OutOfRange for more than `max_tokens` ids, without the work that they would be.
  absl::StatusOr<std::vector<int32_t>> EncodeChat(std::string_view body, bool add_special_tokens,
                                                  int64_t max_tokens, ChatPrompt* chat) const;
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text, bool add_special_tokens,
                                                  int64_t max_tokens) const;
  absl::Status CheckPrompt(const std::vector<int32_t>& ids, const SamplingParams& sampling) const;
  absl::Status MakeChoices(OpenCall& call, const ChatPrompt& chat) const;
  // What the engine is to be asked: a request a prompt.
  absl::StatusOr<std::vector<Request>> MakeRequests(const std::shared_ptr<OpenCall>& call) const;
  void Submit(const std::shared_ptr<OpenCall>& call, std::vector<Request> requests) const;

  Engine& engine_;
  const ServedModel& model_;
  const OpenAiOptions& options_;
  Responder& responder_;
};

}  // namespace lockstep
