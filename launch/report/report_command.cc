#include "launch/report/report_command.h"

#include <array>
#include <utility>
#include <vector>

#include "launch/bench/result_file.h"
#include "launch/report/report.h"
#include "launch/result_writer.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

absl::StatusOr<Report> ReadAndMake(const std::string& folder) {
  LOCKSTEP_ASSIGN_OR_RETURN(ReportData data, ReadReportData(folder));
  return MakeReport(std::move(data));
}

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, std::string(status.message()));
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ? 2 : 1;
}

}  // namespace

int RunReport(const ReportOptions& options) {
  const absl::StatusOr<Report> report = ReadAndMake(options.folder);
  if (!report.ok()) return Fail(report.status());
  const std::array<std::pair<const char*, std::string>, 3> forms = {
      {{"report.json", DumpJson(ReportJson(*report)) + "\n"},
       {"report.csv", ReportCsv(*report)},
       {"report.html", ReportHtml(*report)}}};
  // All three can be written before the first one is.
  std::vector<ResultFile> files;
  for (const auto& [name, text] : forms) {
    absl::StatusOr<ResultFile> file = ResultFile::Create(options.folder + "/" + name);
    if (!file.ok()) return Fail(file.status());
    files.push_back(*std::move(file));
  }
  std::string written;
  for (size_t i = 0; i < forms.size(); ++i) {
    if (absl::Status status = files[i].Write(forms[i].second); !status.ok()) return Fail(status);
    absl::StrAppend(&written, options.folder, "/", forms[i].first, "\n");
  }
  return PrintResult(written);
}

}  // namespace lockstep
