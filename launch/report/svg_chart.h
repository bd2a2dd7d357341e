// Charts as inline SVG, without scripts and without colours of their own: lines and bars carry the
// classes s0, s1, ... (kNumSeriesColors of them), text and axes theirs, and the page's style sheet
// colours them for light and dark.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

inline constexpr int kNumSeriesColors = 8;

// For text between tags and in attributes.
std::string EscapeHtml(const std::string& text);

// At most 4 significant digits, thousands and millions as "12k" and "3.4M".
std::string ShortNumber(double value);

struct ChartSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // in the order in which they are joined
  bool dashed = false;                            // an ideal or a prediction
  int color = 0;                                  // below kNumSeriesColors; -1: grey
};

struct LineChart {
  std::string title = {};
  std::string x_label = {};  // with its unit
  std::string y_label = {};
  bool log_x = false;  // then x above 0 only
  bool log_y = false;
  bool y_from_zero = true;           // without log_y
  std::vector<double> x_ticks = {};  // empty: chosen from the points
  std::vector<ChartSeries> series = {};
};
// A figure: title, drawing, legend. Each point's values are its tooltip. Empty without points.
std::string LineChartHtml(const LineChart& chart);

struct StackedBar {
  std::string label;
  std::vector<double> values;  // one a part, 0 or more
};
struct StackedBarChart {
  std::string title = {};
  std::string y_label = {};
  std::vector<std::string> parts;  // from the bottom up; of those beyond the colours some repeat,
                                   // hatched
  std::vector<StackedBar> bars;
};
std::string StackedBarChartHtml(const StackedBarChart& chart);

}  // namespace lockstep
