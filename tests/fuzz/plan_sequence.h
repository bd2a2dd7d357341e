// The input of step_plan_fuzz: limits, then plans, one after the other as they are on the wire.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "runtime/step_plan.h"

namespace lockstep {

inline constexpr size_t kLimitsBytes = 8 * sizeof(uint16_t);  // the last two mean nothing

// Any 16 bytes make small limits.
inline PlanLimits LimitsFromBytes(const uint8_t* bytes) {
  std::array<uint16_t, kLimitsBytes / sizeof(uint16_t)> v;
  std::memcpy(v.data(), bytes, kLimitsBytes);
  return {.max_num_batched_tokens = 1 + v[0] % 512,
          .max_num_seqs = 1 + v[1] % 16,
          .max_model_len = 1 + v[2] % 1000,
          .block_size = 1 + v[3] % 32,
          .num_blocks = 1 + v[4] % 600,
          .vocab_size = 1 + v[5] % 300,
          .max_logits_rows = 1 + v[6] % 64};
}

inline std::string LimitsToBytes(const PlanLimits& limits) {
  std::string bytes;
  for (const int64_t value :
       {limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len, limits.block_size,
        limits.num_blocks, limits.vocab_size, limits.max_logits_rows, int64_t{1}}) {
    const auto stored = static_cast<uint16_t>(value - 1);
    bytes.append(reinterpret_cast<const char*>(&stored), sizeof(stored));
  }
  return bytes;
}

// Length of the plan that `bytes` start with, as its header claims: the 64 bits after magic and
// version; at most all of `bytes`.
inline size_t ClaimedBytes(std::span<const uint8_t> bytes) {
  uint64_t claimed = 0;
  if (bytes.size() < 2 * sizeof(claimed)) return bytes.size();
  std::memcpy(&claimed, bytes.data() + sizeof(claimed), sizeof(claimed));
  return claimed > 0 && claimed < bytes.size() ? static_cast<size_t>(claimed) : bytes.size();
}

}  // namespace lockstep
