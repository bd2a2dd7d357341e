// Shared by the files of filters.
#pragma once

#include <string_view>

#include "model/chat/jinja_ops.h"

namespace lockstep {

// Null when no filter over sequences has this name.
JinjaFilter FindJinjaSequenceFilter(std::string_view name);

// int(text, base) and float(text); false where Python raises ValueError.
bool ParsePythonInt(std::string_view text, int base, JinjaInt* value);
bool ParsePythonFloat(std::string_view text, double* value);

}  // namespace lockstep
