#include "launch/tokenize_command.h"

#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <streambuf>
#include <vector>

#include "launch/result_writer.h"
#include "launch/tokenizer_loading.h"

namespace lockstep {
namespace {

constexpr const char* kErrorPrefix = "lockstep error: ";

// What the lines need of the model.
struct TextTools {
  std::unique_ptr<Tokenizer> tokenizer;  // null with --render
  std::unique_ptr<ChatFormat> chat;      // null without --chat
};

absl::StatusOr<TextTools> LoadTools(const TokenizeOptions& options) {
  TextTools tools;
  if (options.chat) {
    LOCKSTEP_ASSIGN_OR_RETURN(tools.chat, LoadChatFormat(options.model));
  }
  if (!options.render) {
    LOCKSTEP_ASSIGN_OR_RETURN(tools.tokenizer, LoadTokenizer(options.model));
  }
  return tools;
}

absl::StatusOr<std::vector<int32_t>> ReadIds(const OrderedJson& value) {
  if (!value.is_array()) return absl::InvalidArgumentError("--decode needs a list of token ids");
  std::vector<int32_t> ids;
  ids.reserve(value.size());
  for (const OrderedJson& item : value) {
    const bool fits =
        item.is_number_integer() &&
        (item.is_number_unsigned() ? item.get<uint64_t>() <= std::numeric_limits<int32_t>::max()
                                   : item.get<int64_t>() >= std::numeric_limits<int32_t>::min());
    if (!fits) {
      return absl::InvalidArgumentError(absl::StrFormat("%s is no token id", DumpJson(item)));
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
}

absl::StatusOr<OrderedJson> Convert(const TokenizeOptions& options, const TextTools& tools,
                                    const OrderedJson& value) {
  if (options.decode) {
    LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ReadIds(value));
    LOCKSTEP_ASSIGN_OR_RETURN(std::string text,
                              tools.tokenizer->Decode(ids, options.skip_special_tokens));
    return OrderedJson(std::move(text));
  }
  std::string text;
  if (options.chat) {
    LOCKSTEP_ASSIGN_OR_RETURN(text, tools.chat->Render(value));
    if (options.render) return OrderedJson(std::move(text));
  } else {
    if (!value.is_string()) return absl::InvalidArgumentError("a JSON string is needed");
    text = value.get<std::string>();
  }
  LOCKSTEP_ASSIGN_OR_RETURN(std::vector<int32_t> ids,
                            tools.tokenizer->Encode(text, options.add_special_tokens));
  return OrderedJson(std::move(ids));
}

absl::Status ConvertLines(const TokenizeOptions& options, const TextTools& tools, std::istream& in,
                          std::ostream& out) {
  std::string line;
  for (int64_t number = 1; out.good() && std::getline(in, line); ++number) {
    const std::string where = absl::StrFormat("line %d of the input", number);
    LOCKSTEP_ASSIGN_OR_RETURN(const OrderedJson value, ParseOrderedJson(line, where));
    const absl::StatusOr<OrderedJson> result = Convert(options, tools, value);
    if (!result.ok()) return Annotate(result.status(), where);
    out << DumpJson(*result) << '\n';
    if (in.rdbuf()->in_avail() <= 0) out.flush();
  }
  if (in.bad()) return absl::InternalError("cannot read standard input");
  return absl::OkStatus();
}

// An ostream's buffer over a ResultWriter, which knows why a write failed.
class ResultBuffer : public std::streambuf {
 public:
  explicit ResultBuffer(ResultWriter* writer) : writer_(writer), buffer_(1 << 16) {
    setp(buffer_.data(), buffer_.data() + buffer_.size());
  }

 protected:
  int sync() override {
    const bool written = writer_->Write({pbase(), static_cast<size_t>(pptr() - pbase())});
    setp(buffer_.data(), buffer_.data() + buffer_.size());
    return written ? 0 : -1;
  }
  int_type overflow(int_type c) override {
    if (sync() != 0) return traits_type::eof();
    if (!traits_type::eq_int_type(c, traits_type::eof())) sputc(traits_type::to_char_type(c));
    return traits_type::not_eof(c);
  }

 private:
  ResultWriter* writer_;
  std::vector<char> buffer_;
};

}  // namespace

int RunTokenizeCommand(const TokenizeOptions& options, std::istream& in, std::ostream& out,
                       std::ostream& err) {
  const absl::StatusOr<TextTools> tools = LoadTools(options);
  if (!tools.ok()) {
    err << kErrorPrefix << std::string(tools.status().message()) << std::endl;
    return 2;
  }
  const absl::Status status = ConvertLines(options, *tools, in, out);
  out.flush();
  if (!status.ok()) {
    err << kErrorPrefix << std::string(status.message()) << std::endl;
    return 1;
  }
  return out.good() ? 0 : 1;
}

int RunTokenize(const TokenizeOptions& options) {
  std::ios::sync_with_stdio(false);
  ResultWriter writer;
  ResultBuffer buffer(&writer);
  std::ostream out(&buffer);
  const int exit_status = RunTokenizeCommand(options, std::cin, out, std::cerr);
  if (exit_status == 2 || out.good()) return exit_status;
  // The reader of the results has gone, which ends the work quietly, or they cannot be written.
  if (writer.status().ok()) return 0;
  std::cerr << kErrorPrefix << std::string(writer.status().message()) << std::endl;
  return 1;
}

}  // namespace lockstep
