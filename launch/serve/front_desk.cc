#include "launch/serve/front_desk.h"

#include <string_view>

#include "runtime/core/json.h"

namespace lockstep {

extern const std::string_view kConsolePage;  // console.html

namespace {

const HttpHeaders kJson = {{"Content-Type", "application/json"}};

const char* NameOf(ServerState state) {
  switch (state) {
    case ServerState::kStarting:
      return "starting";
    case ServerState::kReady:
      return "ready";
    case ServerState::kDraining:
      return "draining";
    case ServerState::kFailed:
      return "failed";
  }
  return "";
}

void AnswerPage(HttpExchange& exchange) {
  exchange.Respond(200,
                   {{"Content-Type", "text/html; charset=utf-8"},
                    {"Cache-Control", "no-cache"},
                    // The page brings all that it needs.
                    {"Content-Security-Policy",
                     "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                     "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"}},
                   std::string(kConsolePage));
}

void Refuse(HttpExchange& exchange, int status, HttpHeaders more, const std::string& message) {
  more.insert(more.end(), kJson.begin(), kJson.end());
  exchange.Respond(status, more, OpenAiErrorBody(status, message));
}

}  // namespace

absl::StatusOr<std::unique_ptr<FrontDesk>> FrontDesk::Create(const HttpServerOptions& options,
                                                             const std::string& model_name,
                                                             const std::string& version) {
  std::unique_ptr<FrontDesk> desk(new FrontDesk(model_name, version));
  LOCKSTEP_ASSIGN_OR_RETURN(LeasedPort port, TakePort(options.host, options.port));
  desk->lease_ = std::move(port.lease);
  LOCKSTEP_ASSIGN_OR_RETURN(desk->http_,
                            HttpServer::Create(
                                std::move(port.listeners), options,
                                [desk = desk.get()](std::shared_ptr<HttpExchange> exchange) {
                                  desk->Handle(std::move(exchange));
                                },
                                OpenAiErrorBody));
  desk->listening_ = desk->http_.get();
  return desk;
}

void FrontDesk::Open(const Engine& engine, OpenAiApi& api, MetricLabels info) {
  owned_.reset(new Served{engine, api, std::move(info)});
  served_ = owned_.get();
  state_ = ServerState::kReady;
  lease_.TellReady();
}

void FrontDesk::Close(double seconds) {
  http_->Drain(seconds);
  listening_ = nullptr;
  http_.reset();
  lease_ = {};
  served_ = nullptr;
  owned_.reset();
}

void FrontDesk::Handle(std::shared_ptr<HttpExchange> exchange) {
  const HttpRequest& request = exchange->request();
  const bool health = request.path == "/health";
  const bool metrics = request.path == "/metrics";
  const bool version = request.path == "/version";
  if (health || metrics || version || request.path == "/") {
    if (request.method != "GET" && request.method != "HEAD") {
      return Refuse(*exchange, 405, {{"Allow", "GET, HEAD"}},
                    absl::StrCat(request.method, " is not known here: use GET"));
    }
    if (health) return AnswerHealth(*exchange);
    if (metrics) return AnswerMetrics(*exchange);
    if (!version) return AnswerPage(*exchange);
    return exchange->Respond(200, kJson, DumpJson(Json{{"version", version_}}));
  }
  const Served* const served = served_;
  if (served != nullptr) return served->api.Handle(std::move(exchange));
  Refuse(*exchange, 503, {{"Retry-After", "5"}}, "the model is being loaded");
}

void FrontDesk::AnswerHealth(HttpExchange& exchange) const {
  const ServerState state = state_;
  exchange.Respond(state == ServerState::kReady ? 200 : 503, kJson,
                   DumpJson(Json{{"status", NameOf(state)}}));
}

void FrontDesk::AnswerMetrics(HttpExchange& exchange) const {
  const Served* const served = served_;
  const HttpServer* const http = listening_;
  ServerGauges gauges;
  gauges.ready = state_ == ServerState::kReady;
  if (http != nullptr) gauges.connections = http->num_connections();
  EngineStats stats;
  if (served != nullptr) {
    gauges.open_requests = served->api.num_open();
    stats = served->engine.stats();
  }
  const MetricLabels starting = {{"version", version_}};
  exchange.Respond(200, {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}},
                   metrics_.Render(gauges, served != nullptr ? &stats : nullptr,
                                   served != nullptr ? served->info : starting));
}

}  // namespace lockstep
