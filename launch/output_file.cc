#include "launch/output_file.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace lockstep {

absl::Status CheckOutputIsNoInput(const std::string& option, const std::string& output,
                                  const std::string& model,
                                  const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path path = output;
  if (!fs::is_regular_file(path, error)) return absl::OkStatus();
  const auto is = [](const fs::path& a, const fs::path& b) {
    std::error_code ignored;
    return fs::equivalent(a, b, ignored);
  };
  // By what the names lead to: a link to a file of the model, or to where its links lead, is one,
  // too.
  bool is_model = is(path, model);
  if (fs::is_directory(model, error)) {
    const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
    is_model = is_model || is(folder, model);
    for (fs::directory_iterator file(model, error), end; !error && file != end;
         file.increment(error)) {
      is_model = is_model || is(path, file->path());
    }
  }
  const bool is_input = std::any_of(inputs.begin(), inputs.end(),
                                    [&](const std::string& input) { return is(path, input); });
  if (!is_model && !is_input) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s %s: is a file %s; name another", option,
                                                    output,
                                                    is_model ? "of the model" : "that is read"));
}

}  // namespace lockstep
