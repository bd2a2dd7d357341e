#include "runtime/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>

#include "runtime/core/file.h"

namespace lockstep {

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number that follows `key` and spaces at the start of a line of `text`.
std::optional<int64_t> FindNumber(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t start = line.find_first_not_of(' ', key.size());
    if (start == std::string::npos) return std::nullopt;
    int64_t value = 0;
    const auto [end, error] =
        std::from_chars(line.data() + start, line.data() + line.size(), value);
    if (error != std::errc()) return std::nullopt;
    return value;
  }
  return std::nullopt;
}

std::optional<int64_t> ReadNumber(const std::string& path) {
  const auto text = ReadFile(path);
  if (!text.ok()) return std::nullopt;
  return FindNumber(*text, "");  // "max" is no number
}

int64_t MemAvailable(const std::string& proc_root) {
  if (const auto text = ReadFile(proc_root + "/meminfo"); text.ok()) {
    if (const auto kib = FindNumber(*text, "MemAvailable:")) return *kib * 1024;
  }
  return int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

// What is left in one control group.
int64_t LeftInGroup(const std::string& group, const char* limit_file, const char* usage_file,
                    const char* cache_key) {
  const auto limit = ReadNumber(group + limit_file);
  const auto usage = ReadNumber(group + usage_file);
  if (!limit || !usage) return kUnlimited;
  int64_t cache = 0;
  if (const auto stat = ReadFile(group + "/memory.stat"); stat.ok()) {
    cache = FindNumber(*stat, cache_key).value_or(0);
  }
  return std::max<int64_t>(0, *limit - *usage + cache);
}

// A limit may stand at any level between the group and the root.
int64_t LeftInGroupAndParents(const std::string& root, std::string group, const char* limit_file,
                              const char* usage_file, const char* cache_key) {
  int64_t left = kUnlimited;
  while (true) {
    left = std::min(left, LeftInGroup(root + group, limit_file, usage_file, cache_key));
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return left;
    group.resize(slash);
  }
}

int64_t LeftInControlGroup(const std::string& proc_root, const std::string& cgroup_root) {
  const auto text = ReadFile(proc_root + "/self/cgroup");
  if (!text.ok()) return kUnlimited;
  int64_t left = kUnlimited;
  // Lines are "0::/path" (v2) and "4:memory:/path" (v1).
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers == ",,") {
      left = std::min(left, LeftInGroupAndParents(cgroup_root, group, "/memory.max",
                                                  "/memory.current", "inactive_file "));
    } else if (controllers.find(",memory,") != std::string::npos) {
      left = std::min(
          left, LeftInGroupAndParents(cgroup_root + "/memory", group, "/memory.limit_in_bytes",
                                      "/memory.usage_in_bytes", "total_inactive_file "));
    }
  }
  return left;
}

}  // namespace

int64_t AvailableHostMemoryBytes(const std::string& proc_root, const std::string& cgroup_root) {
  return std::min(MemAvailable(proc_root), LeftInControlGroup(proc_root, cgroup_root));
}

}  // namespace lockstep
