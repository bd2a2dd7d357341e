#include "launch/report/svg_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/core/status.h"

namespace lockstep {

namespace {

// The drawing's units; the page scales it to the width there is.
constexpr double kWidth = 460, kHeight = 270;
constexpr double kLeft = 62, kRight = 24, kTop = 12, kBottom = 44;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;

// From values to the drawing's units, linear or logarithmic.
struct Axis {
  double min = 0, max = 1;
  bool log = false;
  std::vector<double> ticks;

  // 0 at min, 1 at max.
  double Share(double value) const {
    if (log) return (std::log(value) - std::log(min)) / (std::log(max) - std::log(min));
    return (value - min) / (max - min);
  }
};

double X(const Axis& axis, double value) { return kLeft + axis.Share(value) * kPlotWidth; }
double Y(const Axis& axis, double value) { return kTop + (1 - axis.Share(value)) * kPlotHeight; }

// The smallest of 1, 2, 5 times a power of ten that is `value` or more.
double NiceStep(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

Axis LinearAxis(double min, double max, bool from_zero) {
  if (from_zero) min = std::min(min, 0.0);
  if (max <= min) max = min + (min == 0 ? 1 : std::abs(min));
  const double step = NiceStep((max - min) / 5);
  Axis axis;
  axis.min = std::floor(min / step + 1e-9) * step;
  axis.max = std::ceil(max / step - 1e-9) * step;
  const auto count = static_cast<int>(std::lround((axis.max - axis.min) / step));
  for (int i = 0; i <= count; ++i) axis.ticks.push_back(axis.min + i * step);
  return axis;
}

// Whole powers of ten around the values; 1, 2 and 5 of each where there are few of them.
Axis LogAxis(double min, double max) {
  Axis axis;
  axis.log = true;
  const bool narrow = max / min < 100;
  const auto round_down = [narrow](double value) {
    const double power = std::pow(10, std::floor(std::log10(value) + 1e-12));
    if (!narrow) return power;
    return value >= 5 * power ? 5 * power : value >= 2 * power ? 2 * power : power;
  };
  axis.min = round_down(min);
  double tick = axis.min;
  int places = 0;  // ticks so far; the loop ends for any finite max
  while (true) {
    axis.ticks.push_back(tick);
    if ((tick >= max * (1 - 1e-12) && axis.ticks.size() > 1) || ++places > 60) break;
    const double power = std::pow(10, std::floor(std::log10(tick) + 1e-9));
    const double digit = std::round(tick / power);
    tick = !narrow ? tick * 10 : digit < 2 ? 2 * power : digit < 5 ? 5 * power : 10 * power;
  }
  axis.max = axis.ticks.back();
  // More labels than fit are thinned.
  while (axis.ticks.size() > 8) {
    std::vector<double> kept;
    for (size_t i = 0; i < axis.ticks.size(); i += 2) kept.push_back(axis.ticks[i]);
    axis.ticks = kept;
  }
  return axis;
}

Axis GivenTicks(const std::vector<double>& ticks, bool log) {
  Axis axis;
  axis.log = log;
  axis.ticks = ticks;
  axis.min = *std::min_element(ticks.begin(), ticks.end());
  axis.max = *std::max_element(ticks.begin(), ticks.end());
  if (axis.max <= axis.min) axis.max = log ? axis.min * 2 : axis.min + 1;
  return axis;
}

std::string TextAt(double x, double y, const char* css, const std::string& text,
                   const std::string& more = "") {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" class=\"%s\"%s>%s</text>\n", x, y, css, more,
                         EscapeHtml(text));
}

std::string Line(double x1, double y1, double x2, double y2, const char* css) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n",
                         x1, y1, x2, y2, css);
}

std::string SvgBegin(const std::string& title) {
  return absl::StrFormat("<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n", kWidth,
                         kHeight, EscapeHtml(title));
}

std::string YAxisSvg(const Axis& axis, const std::string& label) {
  std::string svg;
  for (const double tick : axis.ticks) {
    const double y = Y(axis, tick);
    absl::StrAppend(&svg, Line(kLeft, y, kWidth - kRight, y, "grid"),
                    TextAt(kLeft - 6, y + 4, "tick end", ShortNumber(tick)));
  }
  const double middle = kTop + kPlotHeight / 2;
  absl::StrAppend(&svg, TextAt(14, middle, "label middle", label,
                               absl::StrFormat(" transform=\"rotate(-90 14 %.1f)\"", middle)));
  return svg;
}

std::string XLabelSvg(const std::string& label) {
  return TextAt(kLeft + kPlotWidth / 2, kHeight - 6, "label middle", label);
}

std::string XAxisSvg(const Axis& axis, const std::string& label) {
  const double bottom = kTop + kPlotHeight;
  std::string svg = Line(kLeft, bottom, kWidth - kRight, bottom, "axis");
  for (const double tick : axis.ticks) {
    const double x = X(axis, tick);
    absl::StrAppend(&svg, Line(x, bottom, x, bottom + 4, "axis"),
                    TextAt(x, bottom + 17, "tick middle", ShortNumber(tick)));
  }
  return svg + XLabelSvg(label);
}

std::string ColorClass(int color) {
  return color < 0 ? "grey" : absl::StrCat("s", color % kNumSeriesColors);
}

std::string SeriesSvg(const ChartSeries& series, const Axis& x_axis, const Axis& y_axis) {
  const std::string css = ColorClass(series.color);
  std::string path, marks;
  for (const auto& [x, y] : series.points) {
    const double at_x = X(x_axis, x), at_y = Y(y_axis, y);
    absl::StrAppend(&path, absl::StrFormat("%s%.1f,%.1f", path.empty() ? "" : " ", at_x, at_y));
    if (series.dashed) continue;
    absl::StrAppend(
        &marks,
        absl::StrFormat("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" class=\"mark %s\"><title>%s: "
                        "%s, %s</title></circle>\n",
                        at_x, at_y, css, EscapeHtml(series.name), ShortNumber(x), ShortNumber(y)));
  }
  return absl::StrFormat("<polyline points=\"%s\" class=\"line %s%s\"/>\n%s", path, css,
                         series.dashed ? " dashed" : "", marks);
}

std::string Figure(const std::string& title, const std::string& svg, const std::string& legend) {
  return absl::StrFormat(
      "<figure>\n<figcaption>%s</figcaption>\n%s</svg>\n<ul class=\"legend\">\n%s</ul>\n"
      "</figure>\n",
      EscapeHtml(title), svg, legend);
}

std::string LegendItem(const std::string& css, const std::string& name) {
  return absl::StrFormat(
      "<li><svg viewBox=\"0 0 16 10\" class=\"key\"><rect width=\"16\" height=\"10\" "
      "class=\"%s\"/></svg> %s</li>\n",
      css, EscapeHtml(name));
}

std::string LineLegend(const std::vector<ChartSeries>& series) {
  std::string legend;
  for (const ChartSeries& one : series) {
    absl::StrAppend(
        &legend,
        absl::StrFormat("<li><svg viewBox=\"0 0 22 10\" class=\"key\"><line x1=\"0\" y1=\"5\" "
                        "x2=\"22\" y2=\"5\" class=\"line %s%s\"/></svg> %s</li>\n",
                        ColorClass(one.color), one.dashed ? " dashed" : "", EscapeHtml(one.name)));
  }
  return legend;
}

std::string PartClass(size_t part) {
  const bool repeats = part >= static_cast<size_t>(kNumSeriesColors);
  return absl::StrCat("bar ", ColorClass(static_cast<int>(part)), repeats ? " pale" : "");
}

}  // namespace

std::string EscapeHtml(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string ShortNumber(double value) {
  const double size = std::abs(value);
  for (const auto& [unit, name] : {std::pair(1e12, "T"), {1e9, "G"}, {1e6, "M"}, {1e4, "k"}}) {
    if (size < unit * (1 - 1e-9)) continue;
    return absl::StrFormat("%.4g%s", value / (unit == 1e4 ? 1e3 : unit), name);
  }
  return absl::StrFormat("%.4g", size < 1e-12 ? 0 : value);
}

std::string LineChartHtml(const LineChart& chart) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double min_x = kInfinity, max_x = -kInfinity, min_y = kInfinity, max_y = -kInfinity;
  for (const ChartSeries& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      min_x = std::min(min_x, x), max_x = std::max(max_x, x);
      min_y = std::min(min_y, y), max_y = std::max(max_y, y);
    }
  }
  if (min_x == kInfinity) return "";
  const Axis x_axis = !chart.x_ticks.empty() ? GivenTicks(chart.x_ticks, chart.log_x)
                      : chart.log_x          ? LogAxis(min_x, max_x)
                                             : LinearAxis(min_x, max_x, true);
  const Axis y_axis =
      chart.log_y ? LogAxis(min_y, max_y) : LinearAxis(min_y, max_y, chart.y_from_zero);
  std::string svg = SvgBegin(chart.title);
  absl::StrAppend(&svg, YAxisSvg(y_axis, chart.y_label), XAxisSvg(x_axis, chart.x_label));
  for (const ChartSeries& series : chart.series) {
    absl::StrAppend(&svg, SeriesSvg(series, x_axis, y_axis));
  }
  return Figure(chart.title, svg, LineLegend(chart.series));
}

std::string StackedBarChartHtml(const StackedBarChart& chart) {
  if (chart.bars.empty()) return "";
  double highest = 0;
  for (const StackedBar& bar : chart.bars) {
    double sum = 0;
    for (const double value : bar.values) sum += value;
    highest = std::max(highest, sum);
  }
  const Axis axis = LinearAxis(0, highest, true);
  const double bottom = kTop + kPlotHeight;
  const double pitch = kPlotWidth / static_cast<double>(chart.bars.size());
  const double width = std::min(64.0, pitch * 0.7);
  std::string svg = SvgBegin(chart.title);
  absl::StrAppend(&svg, YAxisSvg(axis, chart.y_label));
  for (size_t b = 0; b < chart.bars.size(); ++b) {
    const StackedBar& bar = chart.bars[b];
    const double middle = kLeft + (static_cast<double>(b) + 0.5) * pitch;
    double below = 0;
    for (size_t part = 0; part < bar.values.size(); ++part) {
      const double top = Y(axis, below + bar.values[part]);
      absl::StrAppend(
          &svg, absl::StrFormat("<rect x=\"%.1f\" y=\"%.2f\" width=\"%.1f\" height=\"%.2f\" "
                                "class=\"%s\"><title>%s, %s: %s</title></rect>\n",
                                middle - width / 2, top, width, Y(axis, below) - top,
                                PartClass(part), EscapeHtml(bar.label),
                                EscapeHtml(chart.parts[part]), ShortNumber(bar.values[part])));
      below += bar.values[part];
    }
    absl::StrAppend(&svg, TextAt(middle, bottom + 17, "tick middle", bar.label));
  }
  absl::StrAppend(&svg, Line(kLeft, bottom, kWidth - kRight, bottom, "axis"), XLabelSvg("ranks"));
  std::string legend;
  for (size_t part = 0; part < chart.parts.size(); ++part) {
    absl::StrAppend(&legend, LegendItem(PartClass(part), chart.parts[part]));
  }
  return Figure(chart.title, svg, legend);
}

}  // namespace lockstep
