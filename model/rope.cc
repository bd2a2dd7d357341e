#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lockstep {

namespace {

// YaRN, equation 22 and its "mscale": how much longer contexts sharpen the attention logits.
double YarnMscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double YarnAttentionFactor(const RopeConfig& config) {
  if (config.attention_factor.has_value()) return *config.attention_factor;
  // As in Hugging Face, a zero counts as absent.
  const double mscale = config.mscale.value_or(0);
  const double mscale_all_dim = config.mscale_all_dim.value_or(0);
  if (mscale != 0 && mscale_all_dim != 0) {
    return YarnMscale(config.factor, mscale) / YarnMscale(config.factor, mscale_all_dim);
  }
  return YarnMscale(config.factor, 1.0);
}

absl::Status CheckRope(const RopeConfig& config, int64_t head_dim, int64_t rotary_dim) {
  if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rope: partial_rotary_factor %g of head_dim %d rotates %d dims; an even number from 2 to "
        "head_dim is needed",
        config.partial_rotary_factor, head_dim, rotary_dim));
  }
  // theta at most 1 would give rising frequencies, and yarn divides by its logarithm.
  if (!std::isfinite(config.theta) || config.theta <= 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rope: rope_theta %g must be above 1", config.theta));
  }
  if (config.type != RopeType::kPlain && !(config.factor > 0 && std::isfinite(config.factor))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rope: factor %g must be above 0", config.factor));
  }
  const bool needs_length = config.type == RopeType::kDynamic || config.type == RopeType::kLlama3 ||
                            config.type == RopeType::kYarn;
  if (needs_length && config.original_max_position_embeddings < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rope: original_max_position_embeddings %d must be at least 1",
                        config.original_max_position_embeddings));
  }
  if (config.type == RopeType::kLlama3 &&
      !(config.low_freq_factor > 0 && config.high_freq_factor > config.low_freq_factor)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rope: llama3 needs 0 < low_freq_factor (%g) < high_freq_factor (%g)",
                        config.low_freq_factor, config.high_freq_factor));
  }
  const int64_t factors = static_cast<int64_t>(config.freq_factors.size());
  if (factors != 0 && factors != rotary_dim / 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rope: %d frequency factors for %d rotated pairs", factors, rotary_dim / 2));
  }
  for (float factor : config.freq_factors) {
    if (!(factor > 0)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("rope: frequency factor %g must be above 0", factor));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RotaryEmbedding> RotaryEmbedding::Create(const RopeConfig& config,
                                                        int64_t head_dim) {
  RotaryEmbedding rope;
  rope.config_ = config;
  rope.rotary_dim_ =
      static_cast<int64_t>(static_cast<double>(head_dim) * config.partial_rotary_factor);
  LOCKSTEP_RETURN_IF_ERROR(CheckRope(config, head_dim, rope.rotary_dim_));
  if (config.type == RopeType::kYarn) {
    rope.attention_factor_ = static_cast<float>(YarnAttentionFactor(config));
  }
  rope.inv_freq_.resize(rope.rotary_dim_ / 2);
  rope.ComputeInvFreq(config.theta, rope.inv_freq_.data());
  return rope;
}

double RotaryEmbedding::Base(int64_t rope_length) const {
  const int64_t trained = config_.original_max_position_embeddings;
  if (config_.type != RopeType::kDynamic || rope_length <= trained) return config_.theta;
  const double stretch =
      config_.factor * static_cast<double>(rope_length) / static_cast<double>(trained) -
      (config_.factor - 1.0);
  const double dim = static_cast<double>(rotary_dim_);
  return config_.theta * std::pow(stretch, dim / (dim - 2.0));
}

std::vector<float> RotaryEmbedding::InvFreq(int64_t rope_length) const {
  const double base = Base(rope_length);
  if (base == config_.theta) return inv_freq_;
  std::vector<float> inv_freq(inv_freq_.size());
  ComputeInvFreq(base, inv_freq.data());
  return inv_freq;
}

void RotaryEmbedding::ComputeInvFreq(double base, float* inv_freq) const {
  for (int64_t i = 0; i < rotary_dim_ / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dim_);
    inv_freq[i] = 1.0f / static_cast<float>(std::pow(base, static_cast<double>(exponent)));
    if (config_.type == RopeType::kLinear) inv_freq[i] /= static_cast<float>(config_.factor);
  }
  if (config_.type == RopeType::kLlama3) ApplyLlama3(inv_freq);
  if (config_.type == RopeType::kYarn) ApplyYarn(base, inv_freq);
  for (size_t i = 0; i < config_.freq_factors.size(); ++i) inv_freq[i] /= config_.freq_factors[i];
}

// Long waves (few turns over the trained length) slow down by `factor`, short ones stay, those
// between are blended linearly in the number of turns.
void RotaryEmbedding::ApplyLlama3(float* inv_freq) const {
  const float length = static_cast<float>(config_.original_max_position_embeddings);
  const float factor = static_cast<float>(config_.factor);
  const double low_freq_wavelength = length / config_.low_freq_factor;
  const double high_freq_wavelength = length / config_.high_freq_factor;
  const float low = static_cast<float>(config_.low_freq_factor);
  const float high = static_cast<float>(config_.high_freq_factor);
  for (int64_t i = 0; i < rotary_dim_ / 2; ++i) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / inv_freq[i];
    if (wavelength < high_freq_wavelength) continue;
    if (wavelength > low_freq_wavelength) {
      inv_freq[i] /= factor;
      continue;
    }
    const float smooth = (length / wavelength - low) / (high - low);
    inv_freq[i] = (1 - smooth) * inv_freq[i] / factor + smooth * inv_freq[i];
  }
}

// "NTK by parts": dims that turn more than beta_fast times over the trained length keep their
// frequency, those that turn less than beta_slow times are divided by `factor`, with a linear ramp
// over the dims between.
void RotaryEmbedding::ApplyYarn(double base, float* inv_freq) const {
  const double dim = static_cast<double>(rotary_dim_);
  const double length = static_cast<double>(config_.original_max_position_embeddings);
  const auto dim_of_turns = [&](double turns) {
    return dim * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double low = dim_of_turns(config_.beta_fast);
  double high = dim_of_turns(config_.beta_slow);
  if (config_.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // a step instead of a ramp
  for (int64_t i = 0; i < rotary_dim_ / 2; ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float kept = 1 - ramp;
    const float interpolated = inv_freq[i] / static_cast<float>(config_.factor);
    inv_freq[i] = interpolated * (1 - kept) + inv_freq[i] * kept;
  }
}

void RotaryEmbedding::FillCosSin(std::span<const int32_t> positions,
                                 std::span<const int32_t> rope_lengths, int64_t begin, int64_t end,
                                 float* cos, float* sin) const {
  const int64_t half = rotary_dim_ / 2;
  std::vector<float> scaled;  // of `scaled_length`; only dynamic scaling needs it
  int64_t scaled_length = -1;
  for (int64_t t = begin; t < end; ++t) {
    const float* inv_freq = inv_freq_.data();
    if (Base(rope_lengths[t]) != config_.theta) {
      if (rope_lengths[t] != scaled_length) {
        scaled_length = rope_lengths[t];
        scaled.resize(half);
        ComputeInvFreq(Base(scaled_length), scaled.data());
      }
      inv_freq = scaled.data();
    }
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<float>(positions[t]) * inv_freq[i];
      cos[t * half + i] = static_cast<float>(std::cos(angle)) * attention_factor_;
      sin[t * half + i] = static_cast<float>(std::sin(angle)) * attention_factor_;
    }
  }
}

}  // namespace lockstep
