// Lengths of prompts and answers, in tokens, drawn at random around the length that was asked for.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

struct LengthDistribution {
  enum class Kind { kFixed, kUniform, kLognormal };
  Kind kind = Kind::kFixed;
  // kUniform: the range ratio R in [0, 1], each integer from floor(length * (1 - R)), but 1 at
  // least, to ceil(length * (1 + R)) alike. kLognormal: the standard deviation of the logarithm,
  // in (0, 4]; the mean is `length`, and what is drawn is rounded to the nearest integer, 1 at
  // least: there is no upper limit.
  double spread = 0;
};

// "fixed", "uniform:R" or "lognormal:SIGMA". InvalidArgument lists the known ones.
absl::StatusOr<LengthDistribution> ParseLengthDistribution(const std::string& text);

// Draws one length. `length` is 1 or more.
int64_t DrawLength(const LengthDistribution& distribution, int64_t length, std::mt19937_64& random);

// The same engine state gives the same ids: `length` of them, in [begin, end).
std::vector<int32_t> DrawIds(int64_t length, int32_t begin, int32_t end, std::mt19937_64& random);

}  // namespace lockstep
