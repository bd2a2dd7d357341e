// What a client gets instead of an answer: OpenAI's error object and the HTTP status for it.
#pragma once

#include <string>

#include "launch/http/http_server.h"
#include "runtime/core/status.h"

namespace lockstep {

struct ApiError {
  int http_status = 500;
  std::string message;
  std::string param = {};  // the field that is wrong; empty: null
  std::string code = {};   // OpenAI's word for it ("model_not_found"); empty: null
  HttpHeaders headers = {};
};

// {"error": {"message", "type", "param", "code"}}; the type follows from the status.
std::string ErrorJson(const ApiError& error);
void RespondError(HttpExchange& exchange, const ApiError& error);

// 400. `param` is the field that the message begins with, if it begins with one.
ApiError BadRequest(const std::string& message);
// 503 or 429, with Retry-After.
ApiError Overloaded(int http_status, const std::string& message);
// By the code of `status`: InvalidArgument, Unimplemented, ResourceExhausted (limits of a
// rendering) and Aborted (the chat template's own refusal) are 400, as is OutOfRange (a prompt is
// too long); NotFound (no such model) is 404, FailedPrecondition (the engine is being stopped) 503,
// anything else 500.
ApiError ErrorOf(const absl::Status& status);

}  // namespace lockstep
