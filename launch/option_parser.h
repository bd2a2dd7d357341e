// The grammar of the command line: one table a command, from which parsing, help and hints come.
//
// An own table, no library: a prompt must arrive as the bytes that were typed. CLI11 2.1.2 takes
// "[a,b]" given to a repeatable option for a list and "{}" for nothing, and a message of ours names
// option, value and limits.
//
// Accepted are `--name value`, `--name=value` and flags `--name`. Of an option given several times
// the last value counts, unless it is marked repeatable. What follows `--` is not an option.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

struct Option {
  std::string name;           // "--max-tokens"
  std::string metavar;        // "N"; empty: a flag
  std::string help;           // what it does, unit and range
  std::string default_value;  // shown in the help; empty: none
  bool repeatable = false;    // shown in the help; `set` is called each time anyway
  // Takes the value (a flag: the empty string). The error need not name the option.
  std::function<absl::Status(const std::string& value)> set;
};

struct OptionGroup {
  std::string title;
  std::vector<Option> options;
};

struct CommandSpec {
  std::string name;         // "generate"
  std::string operand;      // "MODEL", "[COMMAND]"; empty: takes none. Brackets: may be left out
  std::string summary;      // one line, for the list of commands
  std::string description;  // paragraphs, wrapped as they are
  std::vector<OptionGroup> groups;
  std::string footer;  // examples, exit statuses
  std::string* operand_value = nullptr;
  // Takes all that follows "--", in place of an operand: at least one word.
  std::vector<std::string>* operand_words = nullptr;
};

// Sets what the options' `set` functions set. InvalidArgument for the first fault in `args` (what
// follows the command's name); an unknown option gets the nearest name as a hint. `*help` becomes
// true, and nothing else is checked, when --help or -h is among the options.
absl::Status ParseOptions(const CommandSpec& command, std::span<const std::string> args,
                          bool* help);

// Usage line, description, every option with metavar, help and default, footer. 80 columns.
std::string FormatHelp(const CommandSpec& command);

// The candidate closest to `word`, or an empty string when none is close.
std::string NearestName(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace lockstep
