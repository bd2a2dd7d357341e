// Random request mixes, run one by one and all together.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {

inline constexpr int64_t kMixMaxModelLen = 100;

// A tiny model with end tokens that are drawn now and then.
ModelConfig MixConfig();

struct Drawn {
  Request request;  // without callbacks
  bool cancelled = false;
  std::vector<Result> results;  // by choice
};

// What a seed gives: the same on every rank.
class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}

  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool OneIn(int64_t n) { return Int(1, n) == 1; }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return *(values.begin() + Int(0, std::ssize(values) - 1));
  }
  std::vector<int32_t> Tokens(int64_t count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = static_cast<int32_t>(Int(0, 100));
    return tokens;
  }

  SamplingParams Sampling() {
    SamplingParams sampling;
    // The logits of the tiny model are small: low temperatures make them matter.
    sampling.temperature = Pick({0.0, 0.0, 0.02, 0.1, 1.0});
    sampling.top_p = Pick({1.0, 1.0, 0.9, 0.5});
    sampling.top_k = Pick<int64_t>({0, 0, 5, 40});
    sampling.min_p = Pick({0.0, 0.0, 0.1});
    sampling.repetition_penalty = Pick({1.0, 1.0, 1.3, 0.8});
    sampling.frequency_penalty = Pick({0.0, 0.0, 0.2, -0.1});
    sampling.presence_penalty = Pick({0.0, 0.0, 0.3});
    if (OneIn(4)) sampling.logit_bias = {{7, 0.3}, {static_cast<int32_t>(Int(50, 100)), -100}};
    sampling.seed = static_cast<uint64_t>(Int(0, 3));
    sampling.max_tokens = OneIn(2) ? Int(20, 60) : Int(1, 20);
    sampling.min_tokens = OneIn(4) ? Int(0, sampling.max_tokens) : 0;
    sampling.ignore_eos = OneIn(3);
    if (OneIn(4)) sampling.stop_token_ids = Tokens(3);
    if (OneIn(3)) sampling.num_logprobs = static_cast<int32_t>(Int(0, 4));
    if (OneIn(6)) sampling.num_prompt_logprobs = static_cast<int32_t>(Int(0, 3));
    if (OneIn(5)) sampling.n = static_cast<int32_t>(Int(2, 4));
    return sampling;
  }

  std::vector<Drawn> Requests() {
    std::vector<std::vector<int32_t>> prefixes;
    for (int i = 0; i < 2; ++i) prefixes.push_back(Tokens(Int(1, 40)));
    std::vector<Drawn> drawn(static_cast<size_t>(Int(2, 12)));
    for (Drawn& one : drawn) {
      std::vector<int32_t> prompt;
      if (OneIn(2)) prompt = prefixes[static_cast<size_t>(Int(0, 1))];
      const std::vector<int32_t> rest = Tokens(Int(1, 25));
      prompt.insert(prompt.end(), rest.begin(), rest.end());
      one.request.prompt = prompt;
      one.request.sampling = Sampling();
      one.request.priority = static_cast<int32_t>(Int(0, 2));
      one.request.cache_salt = OneIn(5) ? "salt" : "";
      one.cancelled = OneIn(8);
      one.results.resize(static_cast<size_t>(one.request.sampling.n));
    }
    return drawn;
  }

  EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = kMixMaxModelLen;
    options.block_size = 4;
    options.max_num_batched_tokens = Pick<int64_t>({1, 8, 16, 64, 2048});
    options.max_num_seqs = Pick<int64_t>({1, 4, 8, 8});
    // From one whole sequence on: most mixes do not fit.
    options.num_gpu_blocks_override = Int(kMixMaxModelLen / 4, kMixMaxModelLen / 4 + 8);
    options.enable_prefix_caching = !OneIn(4);
    options.steps_in_flight = static_cast<int>(Int(1, 2));
    options.poison_freed_blocks = true;
    return options;
  }

 private:
  std::mt19937 random_;
};

// Each request by itself: the engine should have room for everything.
absl::Status RunAlone(Engine& engine, std::vector<Drawn>& drawn);
// All together; new ones come, and some are cancelled, when others have got so many tokens.
absl::Status RunTogether(Engine& engine, std::vector<Drawn>& drawn, uint32_t seed);

// Both lists hold the same tokens; log-probabilities may differ by `tolerance` (0: in no bit).
bool SameLogprobs(const std::vector<PositionLogprobs>& a, const std::vector<PositionLogprobs>& b,
                  float tolerance);
// What a request got together is what it got alone; of a cancelled one, a beginning of it.
void ExpectSame(const Drawn& together, const Drawn& alone, const std::string& what);
// The same question without a verdict: whether a choice has the tokens, the finish and, within
// `tolerance`, the log-probabilities that it has alone.
bool SameChoice(const Result& together, const Result& alone, float tolerance);

}  // namespace lockstep
