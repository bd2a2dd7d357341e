// The sampler on ranks of one process, and what it must give by the definition.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/sampler.h"

namespace lockstep {

using Rows = std::vector<std::vector<float>>;

// What a row's adjuster is made of.
struct Adjustments {
  double repetition = 1, frequency = 0, presence = 0;
  std::vector<LogitBias> bias;
  std::vector<int32_t> banned;
  int64_t banned_below = 0;
  std::vector<int32_t> history;
  int64_t prompt_length = 0;
};

// Samples on `num_ranks` ranks; every rank must come to the same. Padding columns hold NaN, which
// would fail the row if they were read. adjustments: empty, or one a row of `rows`.
SampleOutput Sample(const Rows& logits, const std::vector<SampleRow>& rows, int num_ranks,
                    const std::vector<Adjustments>& adjustments = {}, int num_threads = 1);
std::vector<int32_t> Tokens(const Rows& logits, const std::vector<SampleRow>& rows, int num_ranks);

std::vector<float> RandomLogits(int64_t vocab_size, uint32_t seed, float spread);

// --- The definition, in double precision ---

std::vector<float> Adjust(std::vector<float> logits, const Adjustments& a, int64_t position);

// Exact probabilities: temperature, min_p, top_k, top_p, renormalised. None when a border is too
// close to tell in double precision.
std::optional<std::vector<double>> Distribution(const std::vector<float>& logits,
                                                const SampleRow& row);

// The argmax over the support of logit / T + noise, straight from the definition.
std::optional<int32_t> ReferenceToken(const std::vector<float>& logits, const SampleRow& row);

std::vector<double> ReferenceLogprobs(const std::vector<float>& logits);

}  // namespace lockstep
