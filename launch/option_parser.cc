#include "launch/option_parser.h"

#include <algorithm>
#include <numeric>

namespace lockstep {

namespace {

constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpIndent = 6;

const Option* FindOption(const CommandSpec& command, const std::string& name) {
  for (const OptionGroup& group : command.groups) {
    for (const Option& option : group.options) {
      if (option.name == name) return &option;
    }
  }
  return nullptr;
}

std::vector<std::string> OptionNames(const CommandSpec& command) {
  std::vector<std::string> names = {"--help"};
  for (const OptionGroup& group : command.groups) {
    for (const Option& option : group.options) names.push_back(option.name);
  }
  return names;
}

// Levenshtein distance.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

absl::Status UnknownOption(const CommandSpec& command, const std::string& name) {
  const std::string nearest = NearestName(name, OptionNames(command));
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has no option %s%s", command.name, name,
                      nearest.empty() ? "" : "; did you mean " + nearest + "?"));
}

absl::Status SetOption(const Option& option, const std::string& value) {
  const absl::Status status = option.set(value);
  if (option.metavar.empty()) return Annotate(status, option.name);
  return Annotate(status, absl::StrFormat("%s %s", option.name, value.empty() ? "''" : value));
}

// Handles args[i], an option, and its value; returns the index of the last argument used.
absl::StatusOr<size_t> ParseOne(const CommandSpec& command, std::span<const std::string> args,
                                size_t i) {
  const size_t equals = args[i].find('=');
  const std::string name = args[i].substr(0, equals);
  const Option* option = FindOption(command, name);
  if (option == nullptr) return UnknownOption(command, name);
  if (option->metavar.empty()) {
    if (equals != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrFormat("%s takes no value", name));
    }
    LOCKSTEP_RETURN_IF_ERROR(SetOption(*option, ""));
    return i;
  }
  if (equals != std::string::npos) {
    LOCKSTEP_RETURN_IF_ERROR(SetOption(*option, args[i].substr(equals + 1)));
    return i;
  }
  if (i + 1 == args.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s needs a value: %s %s", name, name, option->metavar));
  }
  const std::string& value = args[i + 1];
  if (value == "--help" || FindOption(command, value.substr(0, value.find('='))) != nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s needs a value, but the option %s follows; if that is the value, write %s=%s", name,
        value, name, value));
  }
  LOCKSTEP_RETURN_IF_ERROR(SetOption(*option, value));
  return i + 1;
}

// Of a command that takes words behind "--".
absl::Status CheckWords(const CommandSpec& command, const std::vector<std::string>& operands) {
  const std::string usage =
      absl::StrFormat("lockstep %s [options] -- %s", command.name, command.operand);
  if (!operands.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("unexpected argument '%s' in front of --: %s", operands[0], usage));
  }
  if (command.operand_words->empty() || command.operand_words->front().empty()) {
    return absl::InvalidArgumentError("nothing follows --: " + usage);
  }
  return absl::OkStatus();
}

absl::Status CheckOperands(const CommandSpec& command, const std::vector<std::string>& operands) {
  if (command.operand_words != nullptr) return CheckWords(command, operands);
  const size_t most = command.operand.empty() ? 0 : 1;
  if (operands.size() > most) {
    const std::string& extra = operands[most];
    const std::string option =
        "--" + extra.substr(std::min(extra.find_first_not_of('-'), extra.size()));
    return absl::InvalidArgumentError(absl::StrFormat(
        "unexpected argument '%s'%s", extra,
        FindOption(command, option) != nullptr ? "; did you mean " + option + "?"
        : most == 0                            ? "; " + command.name + " takes options alone"
                    : absl::StrFormat("; %s is already '%s'", command.operand, operands[0])));
  }
  if (!operands.empty()) {
    *command.operand_value = operands[0];
  } else if (most == 1 && command.operand.front() != '[') {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is missing: lockstep %s %s [options]", command.operand, command.name, command.operand));
  }
  if (!operands.empty() && operands[0].empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s is an empty string", command.operand));
  }
  return absl::OkStatus();
}

void AppendWrapped(const std::string& text, size_t indent, std::string* out) {
  size_t column = 0;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const size_t length = end - begin;
    if (column == 0) {
      out->append(indent, ' ');
      column = indent;
    } else if (column + 1 + length > kHelpWidth) {
      *out += "\n" + std::string(indent, ' ');
      column = indent;
    } else {
      *out += ' ';
      ++column;
    }
    out->append(text, begin, length);
    column += length;
    begin = end + 1;
  }
  *out += "\n";
}

void AppendOption(const Option& option, std::string* out) {
  *out += "  " + option.name;
  if (!option.metavar.empty()) *out += " " + option.metavar;
  *out += "\n";
  std::string help = option.help;
  if (option.repeatable) help += " May be given several times.";
  if (!option.default_value.empty()) help += " [default: " + option.default_value + "]";
  AppendWrapped(help, kHelpIndent, out);
}

}  // namespace

absl::Status ParseOptions(const CommandSpec& command, std::span<const std::string> args,
                          bool* help) {
  *help = false;
  std::vector<std::string> operands;
  absl::Status fault;  // the first; --help further right still wins
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h") {
      *help = true;
      return absl::OkStatus();
    }
    if (arg == "--") {
      std::vector<std::string>& rest =
          command.operand_words != nullptr ? *command.operand_words : operands;
      rest.insert(rest.end(), args.begin() + i + 1, args.end());
      break;
    }
    if (arg.size() < 2 || arg[0] != '-') {
      operands.push_back(arg);
    } else if (arg[1] != '-') {
      if (fault.ok()) fault = UnknownOption(command, arg);
    } else if (auto last = ParseOne(command, args, i); last.ok()) {
      i = *last;
    } else if (fault.ok()) {
      fault = last.status();
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(fault);
  return CheckOperands(command, operands);
}

std::string FormatHelp(const CommandSpec& command) {
  std::string out = "Usage: lockstep " + command.name;
  const bool words = command.operand_words != nullptr;
  if (!command.operand.empty() && !words) out += " " + command.operand;
  if (!command.groups.empty()) out += " [options]";
  if (words) out += " -- " + command.operand;
  out += "\n\n" + command.description;
  for (const OptionGroup& group : command.groups) {
    out += "\n" + group.title + ":\n";
    for (const Option& option : group.options) AppendOption(option, &out);
  }
  if (!command.footer.empty()) out += "\n" + command.footer;
  return out;
}

std::string NearestName(const std::string& word, const std::vector<std::string>& candidates) {
  std::string spelled = word;
  std::replace(spelled.begin(), spelled.end(), '_', '-');
  size_t best_distance = std::max<size_t>(2, spelled.size() / 4) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    if (spelled.size() >= 5 && candidate.starts_with(spelled)) return candidate;
    const size_t distance = EditDistance(spelled, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace lockstep
