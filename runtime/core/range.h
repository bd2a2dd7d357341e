#pragma once

#include <cstdint>

namespace lockstep {

// Half-open range [begin, end) of heads, rows or columns.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

}  // namespace lockstep
