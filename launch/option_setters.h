// `set` functions of options (option_parser.h): parse, check, store.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/option_parser.h"
#include "launch/option_values.h"
#include "runtime/core/dtype.h"

namespace lockstep {

using OptionSet = std::function<absl::Status(const std::string& value)>;

// Target: an integer type, or std::optional of one.
template <typename Target>
OptionSet StoreInt(Target* target, int64_t min, int64_t max = kNoLimit) {
  return [target, min, max](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(*target, ParseInt(text, min, max));
    return absl::OkStatus();
  };
}

// Token ids, as ParseIdList. Target: a vector, or std::optional of one.
template <typename Target>
OptionSet StoreIds(Target* target) {
  return [target](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(*target, ParseIdList(text));
    return absl::OkStatus();
  };
}

// `limits` completes "it must be ". Target: double, or std::optional of it.
template <typename Target>
OptionSet StoreNumber(Target* target, bool (*legal)(double), const std::string& limits) {
  return [=](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(const double value, ParseNumber(text));
    if (!legal(value)) return absl::InvalidArgumentError("it must be " + limits);
    *target = value;
    return absl::OkStatus();
  };
}

// Any text but the empty one.
OptionSet StoreText(std::string* target);
// A power of two, 1 to 256.
OptionSet StoreBlockSize(int64_t* target);
// auto, which becomes none, or a dtype of the KV cache.
OptionSet StoreKvCacheDType(std::optional<DType>* target);
// As ParseByteSize. Target: int64_t, or std::optional of it.
template <typename Target>
OptionSet StoreByteSize(Target* target) {
  return [target](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(*target, ParseByteSize(text));
    return absl::OkStatus();
  };
}

template <typename Value>
using OptionChoices = std::vector<std::pair<const char*, Value>>;

template <typename Target, typename Value>
OptionSet StoreChoice(Target* target, const OptionChoices<Value>& choices) {
  return [target, choices](const std::string& text) {
    std::string known;
    for (const auto& [name, value] : choices) {
      if (text == name) {
        *target = value;
        return absl::OkStatus();
      }
      absl::StrAppend(&known, known.empty() ? "" : ", ", name);
    }
    return absl::InvalidArgumentError("it must be one of: " + known);
  };
}

// An option without a value that stores `value`; Target: bool or std::optional<bool>.
template <typename Target>
Option Flag(const char* name, const char* help, Target* target, bool value = true) {
  return {name, "", help, "", false, [target, value](const std::string&) {
            *target = value;
            return absl::OkStatus();
          }};
}

}  // namespace lockstep
