// A tokenizer.json, a zero byte and a text: the text is encoded and its ids decoded.
#include <algorithm>
#include <string_view>

#include "model/tokenizer/tokenizer.h"
#include "runtime/core/log.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SilenceLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), size);
  const auto json = lockstep::ParseJson(input.substr(0, end), "tokenizer.json");
  if (!json.ok()) return 0;
  const auto tokenizer = lockstep::Tokenizer::FromJson(*json, "tokenizer.json");
  if (!tokenizer.ok()) return 0;
  const std::string_view text = end < size ? input.substr(end + 1) : "Hello  World, 42 🦙\n";
  for (const bool special : {false, true}) {
    const auto ids = (*tokenizer)->Encode(text, special);
    if (ids.ok()) LOCKSTEP_CHECK((*tokenizer)->Decode(*ids, special).ok());
  }
  return 0;
}
