// JSON written by hand: what is sent for every token must not build a tree first.
#pragma once

#include <string>
#include <string_view>

#include "runtime/core/json.h"

namespace lockstep {

// Appends `utf8` as a JSON string, quotes included. Invalid UTF-8 is the caller's mistake.
void AppendJsonString(std::string_view utf8, std::string* out);
// The shortest digits that give the same float; "-9999.0" for a log probability of minus infinity,
// which JSON cannot say.
void AppendLogprob(float logprob, std::string* out);

// Puts a comma in front unless `out` is empty.
inline void Separate(std::string* out) {
  if (!out->empty()) out->push_back(',');
}

// A value for a message: short and ASCII, whatever the client sent.
std::string QuotedJson(const Json& value);
std::string QuotedJson(const OrderedJson& value);
std::string QuotedText(std::string_view text);

}  // namespace lockstep
