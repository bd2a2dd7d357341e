// `lockstep report DIR`: a report from the results in a folder. No model, no MPI.
#pragma once

#include <string>

namespace lockstep {

struct ReportOptions {
  std::string folder;
};

// Writes report.json, report.csv and report.html into the folder, in the place of ones that are
// there; none of them when the results are wrong. Exit status: 0; 2 for results that are missing,
// wrong or do not belong together; 1 when a file cannot be written.
int RunReport(const ReportOptions& options);

}  // namespace lockstep
