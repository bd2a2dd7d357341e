// A report on how a model scales over ranks: one set of numbers, written in three forms.
#pragma once

#include <string>
#include <vector>

#include "launch/report/report_data.h"
#include "launch/report/scaling.h"
#include "launch/report/step_fit.h"
#include "runtime/core/json.h"

namespace lockstep {

struct Report {
  ReportData data;
  std::vector<ScalingRow> scaling;
  std::vector<ScalingRow> emulated;
  std::vector<ThroughputRow> throughput;
  std::vector<Sameness> sameness;
  StepFit fit;
  std::vector<FitPrediction> predictions;
};

// Everything that is computed from the results. InvalidArgument when they contradict each other.
absl::StatusOr<Report> MakeReport(ReportData data);

// {"kind": "scaling", "baseline_ranks", "latency": [...], "emulated": [...], "throughput": [...],
// "profile": [...], "collectives": [...], "sameness": [...], "fit": {...}, "run": run.json}. Units
// stand in the names.
OrderedJson ReportJson(const Report& report);

// The numbers of ReportJson, one a line: section,phase,name,num_ranks,batch_size,x,metric,unit,
// value. x is what a series runs over: bytes of a collective, the rank of a profile, the prompt of
// a parting. A fit's predictions have the section "prediction". Numbers are written so that they
// read back as the same double.
std::string ReportCsv(const Report& report);

// A page of its own: inline SVG and style, no script, nothing from elsewhere. Well-formed XML, too.
std::string ReportHtml(const Report& report);

// Parts of it that are files of their own.
OrderedJson FitJson(const Report& report);
std::string FitSection(const Report& report);

// Ranks of any result, ascending.
std::vector<int> MeasuredRanks(const Report& report);
// Ranks that run.json asked for and of which there is no latency result.
std::vector<int> MissingRanks(const Report& report);

// Milliseconds by part of the rank whose step is longest; parts as in the results.
const ProfileResult::Rank& SlowestRank(const ProfileResult& profile);

}  // namespace lockstep
