// Shared by the files of methods.
#pragma once

#include "model/chat/jinja_ops.h"

namespace lockstep {

// A method of a str; those of text that was marked safe escape their arguments.
JinjaValue CallJinjaTextMethod(JinjaRuntime& rt, const JinjaMethod& method, const JinjaArgs& args);

}  // namespace lockstep
