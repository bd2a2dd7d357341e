// Rotary position embedding: the angle by which each pair of dims of a query or key turns.
//
// Pair i of a head of D dims is (x[i], x[i + R/2]), R = partial_rotary_factor * D (the "half split"
// of GPT-NeoX and Hugging Face); the dims from R on do not turn. Sources: RoPE, arXiv:2104.09864;
// position interpolation (linear), arXiv:2306.15595; YaRN, arXiv:2309.00071, which also describes
// dynamic NTK scaling; llama3: the rule of Meta's Llama 3.1 release.
//
// Frequencies and angles are rounded to float32 step by step as Hugging Face transformers does, so
// that positions of many thousands agree with it; sines are then taken in double. Angles are made
// for each step's tokens (R/2 sines and cosines a token, shared by all layers), not kept in tables:
// that costs microseconds, and dynamic scaling needs no second mechanism.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model_config.h"
#include "runtime/core/status.h"

namespace lockstep {

// Immutable after Create; const methods may be called from several threads.
class RotaryEmbedding {
 public:
  // InvalidArgument when R is odd, not in [2, D], or the config's numbers make no frequencies (a
  // factor or a trained length that is not positive, freq_factors of another length than R/2).
  static absl::StatusOr<RotaryEmbedding> Create(const RopeConfig& config, int64_t head_dim);

  int64_t rotary_dim() const { return rotary_dim_; }  // R

  // Base of the frequencies for a sequence of `rope_length` tokens: theta, except for dynamic
  // scaling beyond the trained length.
  double Base(int64_t rope_length) const;
  // [R/2] radians a position, for a sequence of `rope_length` tokens.
  std::vector<float> InvFreq(int64_t rope_length) const;
  // Factor on cos and sin (YaRN), 1 otherwise.
  float attention_factor() const { return attention_factor_; }

  // Row t of cos and sin, each float32 [T, R/2], for the token at positions[t] whose sequence has
  // rope_lengths[t] tokens (see ForwardBatch). Rows are tokens [begin, end).
  void FillCosSin(std::span<const int32_t> positions, std::span<const int32_t> rope_lengths,
                  int64_t begin, int64_t end, float* cos, float* sin) const;

 private:
  RotaryEmbedding() = default;
  void ComputeInvFreq(double base, float* inv_freq) const;
  void ApplyLlama3(float* inv_freq) const;
  void ApplyYarn(double base, float* inv_freq) const;

  RopeConfig config_;
  int64_t rotary_dim_ = 0;
  float attention_factor_ = 1.0f;
  std::vector<float> inv_freq_;  // for sequences up to the trained length
};

}  // namespace lockstep
