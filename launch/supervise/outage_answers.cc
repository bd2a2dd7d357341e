#include "launch/supervise/outage_answers.h"

#include <algorithm>
#include <string>

#include "launch/openai/api_error.h"

namespace lockstep {

namespace {

// For the model, as the server itself says while it loads it.
constexpr std::chrono::seconds kLoading(5);

}  // namespace

void OutageAnswers::Answer(HttpExchange& exchange) const {
  const bool ending = ending_;
  if (exchange.request().path == "/health") {
    return exchange.Respond(503, {{"Content-Type", "application/json"}, {"Connection", "close"}},
                            ending ? R"({"status":"draining"})" : R"({"status":"failed"})");
  }
  const auto pause = std::chrono::ceil<std::chrono::seconds>(next_start_.load() - Clock::now());
  const auto wait = std::max(pause, std::chrono::seconds(0)) + kLoading;
  RespondError(exchange,
               {.http_status = 503,
                .message = ending ? "the server is shutting down"
                                  : "the server has failed; it is started again unless it has "
                                    "failed too often",
                .code = "unavailable",
                .headers = {{"Retry-After", absl::StrCat(wait.count())}, {"Connection", "close"}}});
}

}  // namespace lockstep
