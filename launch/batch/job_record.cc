#include "launch/batch/job_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "launch/batch/line_reader.h"
#include "runtime/core/file.h"
#include "runtime/core/hash.h"

namespace lockstep {

namespace {

namespace fs = std::filesystem;

constexpr char kFormat[] = "lockstep batch job 1";
constexpr int64_t kSampleBytes = 256 << 10;
constexpr int64_t kNumSamples = 64;  // of a file: evenly spaced, the first and last bytes included

std::string HashText(uint64_t hash) { return absl::StrFormat("%016x", hash); }

absl::Status AddFile(const fs::path& path, uint64_t* hash) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info;
  const auto fail = [&] {
    const std::string why = std::strerror(errno);
    if (fd >= 0) close(fd);
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path.string(), why));
  };
  if (fd < 0 || fstat(fd, &info) != 0) return fail();
  const int64_t size = info.st_size;
  const std::string name = path.filename().string();
  *hash = HashBytes(name.data(), name.size(), *hash);
  *hash = HashBytes(&size, sizeof(size), *hash);
  std::string sample(kSampleBytes, '\0');
  const int64_t last = std::max<int64_t>(0, size - kSampleBytes);
  const int64_t samples =
      std::clamp<int64_t>((size + kSampleBytes - 1) / kSampleBytes, 1, kNumSamples);
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t at = samples == 1 ? 0 : last / (samples - 1) * i;
    const ssize_t got = pread(fd, sample.data(), sample.size(), i + 1 == samples ? last : at);
    if (got < 0) return fail();
    *hash = HashBytes(sample.data(), static_cast<size_t>(got), *hash);
  }
  close(fd);
  return absl::OkStatus();
}

bool IsOfModel(const fs::path& path) {
  constexpr std::string_view kKinds[] = {".json", ".safetensors", ".gguf", ".jinja", ".model"};
  const std::string kind = path.extension().string();
  return std::find(std::begin(kKinds), std::end(kKinds), kind) != std::end(kKinds);
}

}  // namespace

absl::StatusOr<InputScan> ScanInput(int fd, const std::string& name, int64_t max_line_bytes,
                                    const LineSet& done) {
  if (lseek(fd, 0, SEEK_SET) < 0) {
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", name, std::strerror(errno)));
  }
  InputScan scan;
  uint64_t hash = 0;
  LineReader reader(fd, name, max_line_bytes);
  InputLine line;
  while (true) {
    LOCKSTEP_ASSIGN_OR_RETURN(const bool more, reader.Next(&line));
    if (!more) break;
    hash = HashBytes(line.text.data(), line.text.size(), hash);
    if (line.too_long) hash = HashBytes(&line.num_bytes, sizeof(line.num_bytes), hash);
    if (!line.too_long && IsBlankLine(line.text)) continue;
    ++scan.num_lines;
    if (done.Contains(line.number)) continue;
    ++scan.num_pending;
    scan.has_gap = scan.has_gap || line.number < done.largest();
  }
  scan.digest = HashText(hash);
  lseek(fd, 0, SEEK_SET);
  return scan;
}

absl::StatusOr<std::string> ModelDigest(const std::string& model) {
  std::vector<fs::path> files;
  std::error_code error;
  if (fs::is_directory(model, error)) {
    for (fs::directory_iterator file(model, error), end; !error && file != end;
         file.increment(error)) {
      if (file->is_regular_file() && IsOfModel(file->path())) files.push_back(file->path());
    }
    if (error) return absl::FailedPreconditionError(model + ": " + error.message());
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(model);
  }
  uint64_t hash = 0;
  for (const fs::path& file : files) LOCKSTEP_RETURN_IF_ERROR(AddFile(file, &hash));
  return HashText(hash);
}

std::string JobRecordPath(const std::string& output) { return output + ".job"; }

absl::StatusOr<std::optional<JobRecord>> ReadJobRecord(const std::string& output) {
  const std::string path = JobRecordPath(output);
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  if (!text.ok()) return text.status();
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseJson(*text, path));
  if (!json.is_object() || json.value("format", Json()) != kFormat || !json.contains("model") ||
      !json.contains("input") || !json.contains("sampling")) {
    return absl::InvalidArgumentError(path + ": it is no record of a batch job");
  }
  return JobRecord{json["model"], json["input"], json["sampling"]};
}

absl::Status WriteJobRecord(const std::string& output, const JobRecord& record) {
  const std::string path = JobRecordPath(output), next = path + ".next";
  const OrderedJson json = {{"format", kFormat},
                            {"model", OrderedJson(record.model)},
                            {"input", OrderedJson(record.input)},
                            {"sampling", OrderedJson(record.sampling)}};
  const std::string text = json.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
  const int fd = ::open(next.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == std::ssize(text) &&
                       fsync(fd) == 0 && rename(next.c_str(), path.c_str()) == 0;
  const std::string why = std::strerror(errno);
  if (fd >= 0) close(fd);
  if (written) return absl::OkStatus();
  unlink(next.c_str());
  return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path, why));
}

std::vector<std::string> Differences(const JobRecord& old_record, const JobRecord& new_record) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* part, const Json& before, const Json& now) {
    if (!before.is_object()) return differences.push_back(part);
    for (const auto& [key, value] : now.items()) {
      if (key == "path" || before.value(key, Json()) == value) continue;
      differences.push_back(key == "digest" ? std::string("the ") + part
                                            : absl::StrFormat("%s (%s, was %s)", key, value.dump(),
                                                              before.value(key, Json()).dump()));
    }
  };
  compare("model", old_record.model, new_record.model);
  if (new_record.input["digest"].is_null()) {
    differences.push_back("what comes from stdin, which cannot be compared,");
  } else {
    compare("input", old_record.input, new_record.input);
  }
  compare("sampling", old_record.sampling, new_record.sampling);
  return differences;
}

}  // namespace lockstep
