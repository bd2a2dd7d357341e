// The file that a benchmark's result goes to: known to be writable before the work, there as a
// whole after it.
#pragma once

#include <string>

#include "runtime/core/status.h"

namespace lockstep {

class ResultFile {
 public:
  // Begins an unfinished file of a name of its own beside `path`, or beside what `path` leads to
  // where it is a link. InvalidArgument, with the path, when something other than a regular file is
  // there or no file can be made.
  static absl::StatusOr<ResultFile> Create(const std::string& path);
  // Leaves nothing behind but what Write has finished.
  ~ResultFile();
  ResultFile(ResultFile&& other) noexcept;
  ResultFile& operator=(ResultFile&&) = delete;

  // Once: the text takes the place of a file of that name.
  absl::Status Write(const std::string& text);

 private:
  ResultFile(std::string path, std::string unfinished, int fd)
      : path_(std::move(path)), unfinished_(std::move(unfinished)), fd_(fd) {}

  std::string path_;
  std::string unfinished_;  // empty: there is none
  int fd_;
};

}  // namespace lockstep
