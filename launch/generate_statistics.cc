#include "launch/generate_statistics.h"

#include <algorithm>
#include <string>

#include "runtime/core/log.h"

namespace lockstep {

namespace {

std::string Rate(int64_t tokens, double seconds) {
  return seconds > 0 ? absl::StrFormat("%.1f tokens/s", tokens / seconds) : "no rate";
}

}  // namespace

void FirstTokenTimes::Start(size_t num_prompts) {
  start_ = std::chrono::steady_clock::now();
  noted_.assign(num_prompts, false);
}

void FirstTokenTimes::Note(size_t prompt) {
  if (noted_[prompt]) return;
  noted_[prompt] = true;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  ++count_;
  sum_ += seconds;
  max_ = std::max(max_, seconds);
}

void LogStatistics(const EngineStats& stats, const SessionInfo& session,
                   const FirstTokenTimes& first_tokens) {
  std::string first_token = "none";
  if (first_tokens.count() == 1)
    first_token = absl::StrFormat("%.3f s", first_tokens.max_seconds());
  if (first_tokens.count() > 1) {
    first_token = absl::StrFormat("%.3f s on average, %.3f s at most",
                                  first_tokens.sum_seconds() / first_tokens.count(),
                                  first_tokens.max_seconds());
  }
  LogInfo(absl::StrFormat("load: %.2f s on %d rank%s of %d thread%s, %s", session.load_seconds,
                          session.num_ranks, session.num_ranks == 1 ? "" : "s", session.num_threads,
                          session.num_threads == 1 ? "" : "s", Name(session.dtype)));
  LogInfo(absl::StrFormat("prefill: %d tokens in %.3f s, %s; time to first token: %s",
                          stats.prompt_tokens, stats.prefill_seconds,
                          Rate(stats.prompt_tokens, stats.prefill_seconds), first_token));
  LogInfo(absl::StrFormat("decode: %d tokens in %.3f s, %s", stats.decode_tokens,
                          stats.decode_seconds, Rate(stats.decode_tokens, stats.decode_seconds)));
  const SchedulerStats& scheduler = stats.scheduler;
  if (scheduler.prefix_cache_hit_tokens > 0) {
    LogInfo(absl::StrFormat("prefix cache: %d of %d tokens were there already",
                            scheduler.prefix_cache_hit_tokens,
                            scheduler.prefix_cache_query_tokens));
  }
  if (scheduler.num_preemptions > 0) {
    LogInfo(absl::StrFormat("preemptions: %d", scheduler.num_preemptions));
  }
}

}  // namespace lockstep
