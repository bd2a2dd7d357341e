#include "launch/report/html_parts.h"

#include "launch/report/svg_chart.h"

namespace lockstep {

namespace {

// Colours of series: eight that differ for most eyes, a set for light and one for dark grounds.
constexpr char kStyle[] = R"(
:root { color-scheme: light dark; --ground: #fff; --text: #1c2128; --soft: #59636e; --line: #d8dee4; --warn: #fff4d6;
  --c0: #0969da; --c1: #d9480f; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989; --c6: #0b7285; --c7: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --text: #e2e6ea; --soft: #9aa4ae; --line: #343b44; --warn: #3d3212;
    --c0: #58a6ff; --c1: #ff9157; --c2: #56d364; --c3: #bc8cff; --c4: #e3b341; --c5: #f778ba; --c6: #39c5cf; --c7: #a0a8b1; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 1080px; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 75ch; } .warn { background: var(--warn); padding: .4rem .7rem; border-radius: 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; max-width: 560px; } figcaption { font-weight: 600; margin-bottom: .2rem; }
figure > svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); } td.number, th.number { text-align: right; } td.number { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: color-mix(in srgb, var(--line) 40%, transparent); padding: .6rem; border-radius: 4px; font-size: .8rem; }
.legend { list-style: none; margin: .2rem 0 0; padding: 0 0 0 13%; display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; color: var(--soft); }
.key { width: 22px; height: 10px; vertical-align: baseline; }
.tick { fill: var(--soft); font-size: 12px; } .label { fill: var(--soft); font-size: 12.5px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 5 4; } .mark { stroke: var(--ground); stroke-width: 1; }
.line.grey { stroke: var(--soft); }
.pale { opacity: .5; }
)";

std::string SeriesStyle() {
  std::string style;
  for (int i = 0; i < kNumSeriesColors; ++i) {
    absl::StrAppend(&style, absl::StrFormat(".line.s%d { stroke: var(--c%d); } .mark.s%d, .bar.s%d "
                                            "{ fill: var(--c%d); }\n",
                                            i, i, i, i, i));
  }
  return style;
}

bool LooksLikeNumber(const std::string& cell) {
  return cell.empty() || cell == "-" || (cell[0] >= '0' && cell[0] <= '9') ||
         (cell[0] == '-' && cell.size() > 1 && cell[1] >= '0' && cell[1] <= '9');
}

// What a JSON value of run.json looks like to people.
std::string ValueText(const OrderedJson& value) {
  return value.is_string() ? value.get<std::string>() : DumpJson(value);
}

void AddRows(const OrderedJson& object, const std::string& prefix, HtmlTable* table) {
  if (!object.is_object()) return;
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) {
      AddRows(value, prefix + name + " ", table);
    } else {
      table->Row({prefix + name, ValueText(value)});
    }
  }
}

}  // namespace

std::string HtmlText(const std::string& text) { return "<p>" + EscapeHtml(text) + "</p>\n"; }

std::string HtmlWarning(const std::string& text) {
  return "<p class=\"warn\">" + EscapeHtml(text) + "</p>\n";
}

std::string HtmlSection(const std::string& title, const std::string& html) {
  return "<section>\n<h2>" + EscapeHtml(title) + "</h2>\n" + html + "</section>\n";
}

std::string HtmlCharts(const std::string& html) {
  return html.empty() ? "" : "<div class=\"charts\">\n" + html + "</div>\n";
}

std::string HtmlTable::Html() const {
  if (rows_.empty()) return "";
  std::vector<bool> numbers(heads_.size(), true);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) numbers[c] = numbers[c] && LooksLikeNumber(row[c]);
  }
  const auto line = [&numbers](const std::vector<std::string>& cells, const char* tag) {
    std::string html = "<tr>";
    for (size_t c = 0; c < cells.size(); ++c) {
      absl::StrAppend(&html, "<", tag, numbers[c] ? " class=\"number\"" : "", ">",
                      EscapeHtml(cells[c]), "</", tag, ">");
    }
    return html + "</tr>\n";
  };
  std::string html = "<div class=\"scroll\"><table>\n" + line(heads_, "th");
  for (const auto& row : rows_) html += line(row, "td");
  return html + "</table></div>\n";
}

int64_t CoresOfRun(const OrderedJson& run) {
  if (!run.is_object() || !run.contains("machine") || !run["machine"].is_object()) return 0;
  const OrderedJson& machine = run["machine"];
  if (!machine.contains("cores") || !machine["cores"].is_number_integer()) return 0;
  return machine["cores"].get<int64_t>();
}

std::string RunSection(const OrderedJson& run, const std::vector<std::string>& files) {
  std::string names;
  for (const std::string& file : files) absl::StrAppend(&names, names.empty() ? "" : ", ", file);
  std::string html;
  if (!run.is_object()) {
    html = HtmlText("Machine, versions and commands are not known: there is no run.json.");
  } else {
    HtmlTable table({"what", "value"});
    for (const char* name : {"machine", "version"}) {
      if (run.contains(name)) AddRows(run[name], std::string(name) + " ", &table);
    }
    html = table.Html();
    if (run.contains("commands") && run["commands"].is_array()) {
      html += "<pre>";
      for (const OrderedJson& command : run["commands"]) {
        html += EscapeHtml(ValueText(command)) + "\n";
      }
      html += "</pre>\n";
    }
  }
  return HtmlSection("How this was measured", html + HtmlText("Made from " + names + "."));
}

std::string HtmlPage(const std::string& title, const std::string& body_html) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>",
      EscapeHtml(title), "</title>\n<style>", kStyle, SeriesStyle(), "</style>\n</head>\n<body>\n",
      "<h1>", EscapeHtml(title), "</h1>\n", body_html, "</body>\n</html>\n");
}

}  // namespace lockstep
