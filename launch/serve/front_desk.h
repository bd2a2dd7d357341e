// What the server answers itself: /health, /metrics, /version and the page for browsers. The rest
// goes to the API, once there is one.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "launch/http/http_server.h"
#include "launch/openai/api_server.h"
#include "launch/serve/metrics.h"
#include "launch/supervise/port_handover.h"
#include "runtime/engine.h"

namespace lockstep {

enum class ServerState { kStarting, kReady, kDraining, kFailed };

class FrontDesk {
 public:
  // Listens from then on; every answer is 503 until Open. `model_name` labels the metrics. Errors
  // as TakePort and HttpServer::Create.
  static absl::StatusOr<std::unique_ptr<FrontDesk>> Create(const HttpServerOptions& options,
                                                           const std::string& model_name,
                                                           const std::string& version);

  // The state becomes kReady. `engine` and `api` must stay until Close. Once.
  void Open(const Engine& engine, OpenAiApi& api, MetricLabels info);
  // kDraining or kFailed: /health says so; requests still go to the API, which refuses them.
  void SetState(ServerState state) { state_ = state; }
  ServerState state() const { return state_; }
  // Waits at most `seconds` until what was answered is sent, then ends every connection and lets go
  // of port, engine and API.
  void Close(double seconds);

  int port() const { return http_->port(); }
  Metrics& metrics() { return metrics_; }

 private:
  // What Open brings.
  struct Served {
    const Engine& engine;
    OpenAiApi& api;
    MetricLabels info;
  };

  FrontDesk(const std::string& model_name, const std::string& version)
      : version_(version), metrics_(model_name) {}

  void Handle(std::shared_ptr<HttpExchange> exchange);
  void AnswerHealth(HttpExchange& exchange) const;
  void AnswerMetrics(HttpExchange& exchange) const;

  const std::string version_;
  PortLease lease_;
  Metrics metrics_;
  std::atomic<ServerState> state_ = ServerState::kStarting;
  std::unique_ptr<const Served> owned_;
  std::atomic<const Served*> served_ = nullptr;
  std::unique_ptr<HttpServer> http_;  // last: its thread uses the others
  std::atomic<const HttpServer*> listening_ = nullptr;
};

}  // namespace lockstep
