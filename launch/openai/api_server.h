// OpenAI's HTTP API over one engine: POST /v1/completions, /v1/chat/completions, /tokenize and
// /detokenize, GET /v1/models and /v1/models/NAME.
//
// From an HttpExchange to engine requests and back:
//   HTTP server's thread   Handle: path, method, key, load; hands the body on
//   worker threads         parse, render the chat template, tokenise, check, Engine::Submit
//   engine's thread        pushes each event to a queue, nothing else
//   responder thread       detokenises, writes JSON and server-sent events, keeps deadlines
// A client that goes away is cancelled from the server's thread at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "launch/http/http_server.h"
#include "launch/openai/serving_observer.h"
#include "model/chat/chat_config.h"
#include "model/model_config.h"
#include "model/tokenizer/tokenizer.h"
#include "runtime/engine.h"

namespace lockstep {

// Everything here outlives the API.
struct ServedModel {
  const ModelConfig* config = nullptr;
  const GenerationConfig* generation = nullptr;  // sampling defaults; empty where not to be used
  // Null: prompts are lists of ids only, and the text of an answer is its ids in decimal, a blank
  // behind each.
  const Tokenizer* tokenizer = nullptr;
  const ChatFormat* chat = nullptr;  // null: chats are refused
  std::string no_chat_reason = {};   // why, for the client
};

struct OpenAiOptions {
  // What clients may call the model, at least one; the first is listed as its name.
  std::vector<std::string> served_model_names;
  std::vector<std::string> api_keys;  // each one opens; empty: no key is asked for
  std::string system_fingerprint;     // of responses; empty: null
  // Choices that the engine runs at once (EngineOptions::max_num_seqs), and how many more may wait:
  // beyond that, 429.
  int64_t max_num_seqs = 256;
  int64_t max_queue = 1024;
  double request_timeout_seconds = 0;  // from arrival to the last token; 0: no limit
  // Of answers that are no streams and wait to be whole, all together. Beyond it the longest is
  // given up: 503.
  int64_t max_held_bytes = int64_t{4} << 30;
  int num_workers = 2;  // threads that parse and tokenise, at least 2
  // Each answered request gets a line in the log, and each failure a warning; false: both only at
  // level debug.
  bool logs_requests = true;
};

// All methods may be called from any thread, but not from a callback of the engine.
class OpenAiApi {
 public:
  // `engine`, `observer` (may be null) and what `model` points to must outlive the API.
  // InvalidArgument for options that make no sense.
  static absl::StatusOr<std::unique_ptr<OpenAiApi>> Create(Engine& engine, const ServedModel& model,
                                                           const OpenAiOptions& options,
                                                           ServingObserver* observer);
  // As EndAll; the engine must still be there, running or not.
  virtual ~OpenAiApi() = default;

  // An HttpHandler: never blocks, answers every request, a path that is not the API's with 404.
  virtual void Handle(std::shared_ptr<HttpExchange> exchange) = 0;

  // Requests from now on are answered 503 with Retry-After; what was accepted goes on.
  virtual void StartDrain() = 0;
  // Waits until every accepted request is answered, at most `seconds`; whether that is so.
  virtual bool WaitIdle(double seconds) = 0;
  // Ends what is open with an error of this message (503, or an error event where a stream has
  // begun), and refuses everything from then on. Returns when all of it is written.
  virtual void EndAll(const std::string& message) = 0;
  // The same after a failure of the engine, which need not run any more: 500.
  virtual void Fail(const absl::Status& status) = 0;

  // HTTP requests that were accepted and are not answered yet.
  virtual int64_t num_open() const = 0;
};

// OpenAI's error object for an HTTP status, as HttpServer wants it.
std::string OpenAiErrorBody(int status, const std::string& message);

}  // namespace lockstep
