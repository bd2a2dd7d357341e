#include "runtime/logit_adjuster.h"

#include <cfloat>
#include <limits>

namespace lockstep {

namespace {

constexpr int32_t kFree = -1;
constexpr size_t kFirstSlots = 16;

}  // namespace

LogitAdjuster::LogitAdjuster(Range vocab, const LogitAdjustments& adjustments,
                             std::span<const int32_t> history, int64_t prompt_length)
    : vocab_(vocab),
      penalties_{.repetition = adjustments.repetition_penalty,
                 .frequency = adjustments.frequency_penalty,
                 .presence = adjustments.presence_penalty},
      banned_below_(adjustments.banned_below),
      prompt_length_(prompt_length),
      num_listed_(std::ssize(adjustments.bias) + std::ssize(adjustments.banned_ids)),
      table_(kFirstSlots, kFree) {
  const auto is_mine = [&](int32_t id) { return id >= vocab_.begin && id < vocab_.end; };
  const auto entry_of = [&](int32_t id) -> Entry& {
    return FindOrInsert(static_cast<int32_t>(id - vocab_.begin));
  };
  for (const LogitBias& bias : adjustments.bias) {
    if (is_mine(bias.id)) entry_of(bias.id).bias = bias.bias;
  }
  for (const int32_t id : adjustments.banned_ids) {
    if (is_mine(id)) entry_of(id).banned = true;
  }
  for (size_t i = 0; i < history.size(); ++i) {
    if (static_cast<int64_t>(i) >= prompt_length) {
      Add(history[i]);
    } else if (penalties_.repetition != 1 && is_mine(history[i])) {
      entry_of(history[i]).in_prompt = true;
    }
  }
}

void LogitAdjuster::Add(int32_t id) {
  if (id < vocab_.begin || id >= vocab_.end) return;
  if (!needs_tokens()) return;
  ++FindOrInsert(static_cast<int32_t>(id - vocab_.begin)).generated;
}

void LogitAdjuster::Apply(int64_t position, float* logits, std::vector<float>* raw) const {
  if (raw != nullptr) raw->resize(entries_.size());
  const bool ban = bans(position);
  for (size_t i = 0; i < entries_.size(); ++i) {
    float& logit = logits[entries_[i].index];
    if (raw != nullptr) (*raw)[i] = logit;
    logit = Adjusted(entries_[i], ban, logit);
  }
}

float LogitAdjuster::Adjusted(const Entry& entry, bool ban, float logit) const {
  if (ban && entry.banned && logit <= FLT_MAX) return -std::numeric_limits<float>::infinity();
  return AdjustedLogit(logit, entry.bias, entry.in_prompt, entry.generated, penalties_);
}

float LogitAdjuster::RawLogit(int32_t id, const float* logits, std::span<const float> raw) const {
  const auto index = static_cast<int32_t>(id - vocab_.begin);
  const int32_t entry = table_[FindSlot(index)];
  return entry == kFree ? logits[index] : raw[static_cast<size_t>(entry)];
}

size_t LogitAdjuster::FindSlot(int32_t index) const {
  const size_t mask = table_.size() - 1;
  // Fibonacci hashing: neighbouring columns land far apart.
  size_t slot = (static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u >> 32) & mask;
  while (table_[slot] != kFree && entries_[static_cast<size_t>(table_[slot])].index != index) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

LogitAdjuster::Entry& LogitAdjuster::FindOrInsert(int32_t index) {
  size_t slot = FindSlot(index);
  if (table_[slot] == kFree) {
    if (2 * (entries_.size() + 1) > table_.size()) {
      Rehash(2 * table_.size());
      slot = FindSlot(index);
    }
    table_[slot] = static_cast<int32_t>(entries_.size());
    entries_.push_back({.index = index});
  }
  return entries_[static_cast<size_t>(table_[slot])];
}

void LogitAdjuster::Rehash(size_t num_slots) {
  table_.assign(num_slots, kFree);
  for (size_t i = 0; i < entries_.size(); ++i) {
    table_[FindSlot(entries_[i].index)] = static_cast<int32_t>(i);
  }
}

}  // namespace lockstep
