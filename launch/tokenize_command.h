// `lockstep tokenize`: text to token ids, ids to text, conversations to either.
#pragma once

#include <istream>
#include <ostream>
#include <string>

namespace lockstep {

struct TokenizeOptions {
  std::string model;
  bool decode = false;               // input lines are lists of ids
  bool skip_special_tokens = false;  // with decode
  bool add_special_tokens = false;
  bool chat = false;    // input lines are objects for the chat template
  bool render = false;  // with chat: output the text, not its ids; needs no tokenizer
};

// Reads one JSON value a line from `in` and writes one a line to `out`; messages go to `err`.
// Results are flushed whenever no further input is waiting, and before it returns. Exit status: 0;
// 2 when the model's files are refused, before anything is read; 1 at the first line that cannot be
// done (its number is in the message) or when `out` takes no more.
int RunTokenizeCommand(const TokenizeOptions& options, std::istream& in, std::ostream& out,
                       std::ostream& err);

// The same on the standard streams.
int RunTokenize(const TokenizeOptions& options);

}  // namespace lockstep
