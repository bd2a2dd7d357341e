// The pieces of a report's page. Text that is passed in is escaped here; parameters called html are
// not.
#pragma once

#include <string>
#include <vector>

#include "runtime/core/json.h"

namespace lockstep {

std::string HtmlText(const std::string& text);     // a paragraph
std::string HtmlWarning(const std::string& text);  // a paragraph that stands out
std::string HtmlSection(const std::string& title, const std::string& html);
std::string HtmlCharts(const std::string& html);  // figures side by side where there is room

// Columns of numbers are aligned to the right: those whose cells all begin with a digit or "-".
class HtmlTable {
 public:
  explicit HtmlTable(std::vector<std::string> heads) : heads_(std::move(heads)) {}
  void Row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string Html() const;  // empty without rows

 private:
  std::vector<std::string> heads_;
  std::vector<std::vector<std::string>> rows_;
};

// Machine, versions and commands of run.json, and the files that were read. `run` may be null.
std::string RunSection(const OrderedJson& run, const std::vector<std::string>& files);

// machine/cores of run.json; 0 where it does not say.
int64_t CoresOfRun(const OrderedJson& run);

// A whole document with the style sheet.
std::string HtmlPage(const std::string& title, const std::string& body_html);

}  // namespace lockstep
