#include "launch/version_command.h"

#include <mpi.h>  // version macros alone: nothing here starts MPI
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "launch/result_writer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

using Entries = std::vector<std::pair<std::string, std::string>>;

std::string Dotted(int major, int minor, int patch) {
  return absl::StrFormat("%d.%d.%d", major, minor, patch);
}

Entries Libraries() {
  return {
      {"open_mpi", Dotted(OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION)},
      {"mpi_standard", absl::StrCat(MPI_VERSION, ".", MPI_SUBVERSION)},
#ifdef ABSL_LTS_RELEASE_VERSION
      {"abseil", absl::StrCat(ABSL_LTS_RELEASE_VERSION, ".", ABSL_LTS_RELEASE_PATCH_LEVEL)},
#else
      {"abseil", "live at head"},
#endif
      {"nlohmann_json", Dotted(NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                               NLOHMANN_JSON_VERSION_PATCH)},
      {"pcre2", absl::StrCat(PCRE2_MAJOR, ".", PCRE2_MINOR)},
      {"utf8proc", Dotted(UTF8PROC_VERSION_MAJOR, UTF8PROC_VERSION_MINOR, UTF8PROC_VERSION_PATCH)},
  };
}

// Of the instruction sets that kernels are chosen by, those this processor has.
std::vector<std::string> CpuFeatures() {
  std::vector<std::string> features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) features.push_back("avx2");
  if (__builtin_cpu_supports("fma")) features.push_back("fma");
  if (__builtin_cpu_supports("avx512f")) features.push_back("avx512f");
  if (__builtin_cpu_supports("avx512bf16")) features.push_back("avx512bf16");
#endif
  return features;
}

std::string AsJson() {
  OrderedJson json;
  json["version"] = LOCKSTEP_VERSION;
  json["build_type"] = LOCKSTEP_BUILD_TYPE;
  json["compiler"] = "g++ " __VERSION__;
  json["cuda"] = BuiltWithCuda();
  json["cpu_features"] = CpuFeatures();
  for (const auto& [name, version] : Libraries()) json["libraries"][name] = version;
  return DumpJson(json) + "\n";
}

std::string AsText() {
  std::string out = absl::StrFormat("lockstep %s (%s, %s)\n", LOCKSTEP_VERSION, LOCKSTEP_BUILD_TYPE,
                                    "g++ " __VERSION__);
  absl::StrAppend(&out, "cuda: ", BuiltWithCuda() ? "built in" : "not built in", "\ncpu features:");
  for (const std::string& feature : CpuFeatures()) absl::StrAppend(&out, " ", feature);
  absl::StrAppend(&out, "\nlibraries:");
  for (const auto& [name, version] : Libraries()) absl::StrAppend(&out, " ", name, " ", version);
  return out + "\n";
}

}  // namespace

int RunVersion(const VersionOptions& options) {
  return PrintResult(options.json ? AsJson() : AsText());
}

}  // namespace lockstep
