#include "launch/batch/batch_exchange.h"

#include <utility>

#include "launch/http/http_message.h"
#include "launch/openai/api_error.h"
#include "runtime/core/status.h"

namespace lockstep {

BatchExchange::BatchExchange(std::string path, std::string body, Answer answer)
    : request_{.method = "POST",
               .path = std::move(path),
               .query = {},
               .headers = {},
               .body = std::move(body),
               .request_id = ChooseRequestId(nullptr),
               .peer = "batch"},
      answer_(std::move(answer)) {}

BatchExchange::~BatchExchange() {
  Respond(500, {}, ErrorJson({.http_status = 500, .message = "the request was dropped"}));
}

void BatchExchange::Respond(int status, const HttpHeaders&, std::string body) {
  Answer answer;
  {
    const std::lock_guard lock(mutex_);
    answer = std::exchange(answer_, nullptr);
  }
  if (answer) answer(status, request_.request_id, std::move(body));
}

void BatchExchange::Begin(int, const HttpHeaders&) { LOCKSTEP_CHECK(false); }
void BatchExchange::Write(std::string) { LOCKSTEP_CHECK(false); }
void BatchExchange::End() { LOCKSTEP_CHECK(false); }

}  // namespace lockstep
