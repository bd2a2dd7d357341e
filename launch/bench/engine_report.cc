#include "launch/bench/engine_report.h"

#include "runtime/kv_budget.h"

namespace lockstep {

namespace {

const char* Weights(const EngineFlags& flags) {
  switch (flags.load_format) {
    case LoadFormat::kAuto:
      return "checkpoint";
    case LoadFormat::kDummy:
      return "dummy";
    case LoadFormat::kNull:
      return "null";
  }
  LOCKSTEP_CHECK(false);
}

const char* DeviceName(const SessionInfo& session) {
  return session.device == DeviceKind::kCuda ? "cuda" : "cpu";
}

}  // namespace

OrderedJson EngineJson(const std::string& kind, const EngineFlags& flags,
                       const SessionInfo& session, int64_t max_model_len) {
  OrderedJson json;
  json["kind"] = kind;
  json["model"] = flags.model;
  json["weights"] = Weights(flags);
  json["num_ranks"] = session.num_ranks;
  const EmulatedRank& emulated = flags.engine.emulated;
  json["emulated"] = nullptr;
  if (emulated.tp_size > 0) {
    json["emulated"] = {{"tp_size", emulated.tp_size}, {"rank", emulated.rank}};
  }
  json["num_threads"] = session.num_threads;
  json["device"] = DeviceName(session);
  json["dtype"] = std::string(Name(session.dtype));
  json["max_model_len"] = max_model_len;
  json["load_seconds"] = session.load_seconds;
  return json;
}

std::string EngineText(const EngineFlags& flags, const SessionInfo& session) {
  std::string emulated;
  if (const EmulatedRank& rank = flags.engine.emulated; rank.tp_size > 0) {
    emulated =
        absl::StrFormat(", emulates rank %d of %d without its sums", rank.rank, rank.tp_size);
  }
  return absl::StrFormat("%s (weights: %s), %d rank%s of %d thread%s, %s, %s%s", flags.model,
                         Weights(flags), session.num_ranks, session.num_ranks == 1 ? "" : "s",
                         session.num_threads, session.num_threads == 1 ? "" : "s",
                         DeviceName(session), Name(session.dtype), emulated);
}

absl::StatusOr<int64_t> ExpectedModelLen(const EngineFlags& flags, const ModelSource& source) {
  return WantedModelLen(flags.engine, source.config);
}

}  // namespace lockstep
