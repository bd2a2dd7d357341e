// Prompts made of random tokens: how many, how long, and what does not fit.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "launch/bench/length_distribution.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

struct RandomPrompts {
  int64_t num_prompts = 1000;
  int64_t input_len = 1024;
  int64_t output_len = 128;
  LengthDistribution distribution;
};

// Tokens of a prompt and of its answer.
struct PromptLengths {
  int64_t input = 0;
  int64_t output = 0;

  int64_t sum() const { return input + output; }
};

std::vector<PromptLengths> DrawPromptLengths(const RandomPrompts& prompts, std::mt19937_64& random);

// InvalidArgument, `where` in front unless it is empty, for a request that is longer than
// `max_model_len`: both numbers are told.
absl::Status CheckFits(const PromptLengths& lengths, int64_t max_model_len,
                       const std::string& where);
// Of each request; "prompt 3" stands in front where there are several.
absl::Status CheckAllFit(std::span<const PromptLengths> lengths, int64_t max_model_len);

// --input-len and --output-len.
std::vector<Option> LengthOptions(int64_t* input_len, int64_t* output_len);
Option DistributionOption(LengthDistribution* distribution);
Option SeedOption(uint64_t* seed);

}  // namespace lockstep
