// What the scheduler counts.
#pragma once

#include <cstdint>

namespace lockstep {

struct SchedulerStats {
  int64_t num_waiting = 0;
  int64_t num_running = 0;
  int64_t num_blocks = 0;       // in all
  int64_t num_free_blocks = 0;  // cached ones included
  int64_t num_cached_blocks = 0;
  int64_t num_preemptions = 0;            // since the start
  int64_t prefix_cache_query_tokens = 0;  // of requests that asked the prefix cache
  int64_t prefix_cache_hit_tokens = 0;
  int64_t num_finished = 0;  // choices
};

}  // namespace lockstep
