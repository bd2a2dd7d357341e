#include "launch/option_setters.h"

#include <bit>

namespace lockstep {

OptionSet StoreText(std::string* target) {
  return [target](const std::string& text) {
    if (text.empty()) return absl::InvalidArgumentError("it is an empty string");
    *target = text;
    return absl::OkStatus();
  };
}

OptionSet StoreKvCacheDType(std::optional<DType>* target) {
  return StoreChoice(target, OptionChoices<std::optional<DType>>{{"auto", std::nullopt},
                                                                 {"float32", DType::kF32},
                                                                 {"float16", DType::kF16},
                                                                 {"bfloat16", DType::kBF16},
                                                                 {"fp8", DType::kF8E4M3},
                                                                 {"fp8_e4m3", DType::kF8E4M3}});
}

OptionSet StoreBlockSize(int64_t* target) {
  return [target](const std::string& text) {
    LOCKSTEP_ASSIGN_OR_RETURN(const int64_t value, ParseInt(text, 1, 256));
    if (!std::has_single_bit(static_cast<uint64_t>(value))) {
      return absl::InvalidArgumentError("it must be a power of two between 1 and 256");
    }
    *target = value;
    return absl::OkStatus();
  };
}

}  // namespace lockstep
