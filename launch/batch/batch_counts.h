// How far a batch job is.
#pragma once

#include <cstdint>
#include <optional>

namespace lockstep {

struct BatchCounts {
  // Records in the output; `before` of them were there at the start.
  int64_t num_ok = 0;
  int64_t num_failed = 0;
  int64_t before = 0;
  // Lines of the whole input that are not blank; none: stdin, nobody knows.
  std::optional<int64_t> num_lines;
  // Of this run, so far.
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  double seconds = 0;

  int64_t num_records() const { return num_ok + num_failed; }
};

}  // namespace lockstep
