// SPDX-License-Identifier: Apache-2.0
//
// Threads: see plots.h.   Memory: see plots.h.
#include "recipes/can_kd/plots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <system_error>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "recipes/can_kd/svg_canvas.h"

namespace plimsoll::can_kd {
namespace {

// Okabe and Ito's palette, told apart by colour-blind readers too; then again with dashes.
constexpr std::array<std::string_view, 7> kColours{"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                   "#E69F00", "#56B4E9", "#000000"};
constexpr std::string_view kFaint = "#999999";
constexpr PlotPoint kCorner{72, 44};
constexpr PlotPoint kFrame{420, 380};
constexpr double kLegendLine = 19;
constexpr double kLegendSample = 26;   // The piece of line before a name.
constexpr double kCharacter = 7;       // About one at font size 12.
constexpr std::size_t kNameMost = 64;  // Bytes of a name in the legend.
constexpr std::array<double, 6> kUnitTicks{0.0, 0.2, 0.4, 0.6, 0.8, 1.0};

struct LegendLine {
  std::string name{};
  std::string_view colour{};
  std::string_view dashes{};
};

std::string_view colour_of(std::size_t curve) {
  return kColours[curve % kColours.size()];
}
std::string_view dashes_of(std::size_t curve) {
  constexpr std::array<std::string_view, 3> kDashes{"", "6 3", "2 3"};
  return kDashes[curve / kColours.size() % kDashes.size()];
}

std::string shortened(const std::string& name) {
  return name.size() <= kNameMost ? name : "…" + name.substr(name.size() - kNameMost);
}

/// A canvas with room for the frame and a legend beside it.
SvgCanvas canvas_for(std::string_view title, std::span<const LegendLine> legend) {
  std::size_t longest = 0;
  for (const LegendLine& line : legend) {
    longest = std::max(longest, line.name.size());
  }
  const double legend_width = kLegendSample + kCharacter * static_cast<double>(longest) + 16;
  const double legend_height = kLegendLine * static_cast<double>(legend.size()) + 16;
  SvgCanvas canvas{kCorner.x + kFrame.x + 20 + legend_width,
                   kCorner.y + std::max(kFrame.y + 56, legend_height)};
  canvas.text({kCorner.x, 26}, title, Anchor::kStart, 15);
  double y = kCorner.y + 12;
  for (const LegendLine& line : legend) {
    const double x = kCorner.x + kFrame.x + 16;
    canvas.line({x, y - 4}, {x + kLegendSample - 6, y - 4}, line.colour, line.dashes);
    canvas.text({x + kLegendSample, y}, line.name, Anchor::kStart);
    y += kLegendLine;
  }
  return canvas;
}

std::vector<LegendLine> legend_of(std::span<const NamedCurve> curves) {
  std::vector<LegendLine> legend;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const std::string name = shortened(curves[i].name);
    legend.push_back(
        {std::isfinite(curves[i].area) ? fmt::format("{} ({:.4f})", name, curves[i].area) : name,
         colour_of(i), dashes_of(i)});
  }
  return legend;
}

/// Lines between the points that are numbers; what is not interrupts them.
void draw_line(SvgCanvas& canvas, const Axes& axes, std::span<const PlotPoint> points,
               std::string_view colour, std::string_view dashes) {
  std::vector<PlotPoint> piece;
  const auto flush = [&] {
    if (!piece.empty()) {
      piece.push_back(piece.back());  // One point alone is a dot.
      canvas.polyline(piece, colour, dashes);
    }
    piece.clear();
  };
  for (const PlotPoint& point : points) {
    if (std::isfinite(point.x) && std::isfinite(point.y)) {
      piece.push_back(axes.at(point));
    } else {
      flush();
    }
  }
  flush();
}

std::string curve_plot(std::string_view title, std::span<const NamedCurve> curves,
                       std::string_view x_title, std::string_view y_title, bool diagonal) {
  SvgCanvas canvas = canvas_for(title, legend_of(curves));
  const Axes axes{kCorner, kFrame, {0, 1}, {0, 1}};
  axes.draw(canvas, kUnitTicks, kUnitTicks, x_title, y_title);
  if (diagonal) {
    canvas.line(axes.at({0, 0}), axes.at({1, 1}), kFaint, "4 4");
  }
  for (std::size_t i = 0; i < curves.size(); ++i) {
    std::vector<PlotPoint> points;
    for (const CurvePoint& point : curves[i].points) {
      points.push_back({point.x, point.y});
    }
    draw_line(canvas, axes, points, colour_of(i), dashes_of(i));
  }
  return std::move(canvas).finish();
}

std::string cell_text(std::int64_t count, std::int64_t row) {
  return row == 0 ? std::string{"-"}
                  : fmt::format("{:.2f} %",
                                100.0 * static_cast<double>(count) / static_cast<double>(row));
}

Range padded(Range range) {
  if (!(range.low <= range.high)) {
    return {0, 1};  // Nothing was a number.
  }
  const double beside = std::max(0.5, std::abs(range.low) * 0.1);
  return range.low < range.high ? range : Range{range.low - beside, range.high + beside};
}

Range ticks_range(std::span<const double> ticks) {
  return {ticks.front(), ticks.back()};
}

std::vector<double> epoch_ticks(Range epochs) {
  std::vector<double> ticks = round_ticks(epochs.low, epochs.high);
  std::erase_if(ticks, [](double tick) { return tick != std::floor(tick); });
  return ticks;
}

/// From the lowest to the highest number there is.
Range difficulty_range(std::span<const DifficultyPoint> points) {
  Range range{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  const auto see = [&range](float value) {
    if (std::isfinite(value)) {
      range.low = std::min(range.low, static_cast<double>(value));
      range.high = std::max(range.high, static_cast<double>(value));
    }
  };
  for (const DifficultyPoint& point : points) {
    std::for_each(point.quantiles.begin(), point.quantiles.end(), see);
    see(point.threshold);
  }
  return padded(range);
}

}  // namespace

std::string roc_plot(std::string_view title, std::span<const NamedCurve> curves) {
  return curve_plot(title, curves, "false positive rate", "recall", true);
}

std::string pr_plot(std::string_view title, std::span<const NamedCurve> curves) {
  return curve_plot(title, curves, "recall", "precision", false);
}

std::string confusion_plot(std::string_view title, const BinaryScores& s) {
  constexpr double kCell = 150;
  constexpr PlotPoint kOrigin{110, 76};
  SvgCanvas canvas{kOrigin.x + 2 * kCell + 30, kOrigin.y + 2 * kCell + 60};
  canvas.text({20, 26}, title, Anchor::kStart, 15);
  const std::array<std::array<std::int64_t, 2>, 2> counts{{{s.tn, s.fp}, {s.fn, s.tp}}};
  constexpr std::array<std::string_view, 2> kClasses{"normal", "attack"};
  for (std::size_t row = 0; row < 2; ++row) {
    const std::int64_t all = counts[row][0] + counts[row][1];
    const double y = kOrigin.y + kCell * static_cast<double>(row);
    canvas.text({kOrigin.x - 10, y + kCell / 2 + 4}, kClasses[row], Anchor::kEnd);
    for (std::size_t column = 0; column < 2; ++column) {
      const std::int64_t count = counts[row][column];
      const double x = kOrigin.x + kCell * static_cast<double>(column);
      const double share = all == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(all);
      // From white to the palette's blue: 0, 114, 178.
      const auto mix = [share](double to) { return static_cast<int>(255 + (to - 255) * share); };
      canvas.rect({x, y}, {kCell, kCell},
                  fmt::format("#{:02x}{:02x}{:02x}", mix(0), mix(114), mix(178)), "#444444");
      const std::string_view ink = share > 0.5 ? "#ffffff" : "#222222";
      canvas.text({x + kCell / 2, y + kCell / 2}, fmt::format("{}", count), Anchor::kMiddle, 18,
                  ink);
      canvas.text({x + kCell / 2, y + kCell / 2 + 22}, cell_text(count, all), Anchor::kMiddle, 12,
                  ink);
    }
  }
  for (std::size_t column = 0; column < 2; ++column) {
    canvas.text({kOrigin.x + kCell * (static_cast<double>(column) + 0.5), kOrigin.y - 8},
                kClasses[column], Anchor::kMiddle);
  }
  canvas.text({kOrigin.x + kCell, kOrigin.y - 28}, "called", Anchor::kMiddle);
  canvas.text({28, kOrigin.y + kCell}, "is", Anchor::kMiddle, 12, "#222222", true);
  canvas.text({kOrigin.x + kCell, kOrigin.y + 2 * kCell + 34},
              fmt::format("{} graphs, threshold {:.6g}", s.graphs, s.threshold), Anchor::kMiddle,
              12, "#444444");
  return std::move(canvas).finish();
}

std::string difficulty_plot(std::string_view title, std::span<const DifficultyPoint> points) {
  constexpr std::array<std::string_view, 5> kNames{"5 %", "25 %", "median", "75 %", "95 %"};
  constexpr std::string_view kThresholdColour = "#D55E00";
  std::vector<LegendLine> legend;
  const std::array<std::string_view, 5> dashes{"2 3", "6 3", "", "6 3", "2 3"};
  for (std::size_t q = kNames.size(); q-- > 0;) {
    legend.push_back({std::string{kNames[q]}, colour_of(0), dashes[q]});
  }
  legend.push_back({"threshold", kThresholdColour, ""});
  Range epochs{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  for (const DifficultyPoint& point : points) {
    epochs.low = std::min(epochs.low, static_cast<double>(point.epoch));
    epochs.high = std::max(epochs.high, static_cast<double>(point.epoch));
  }
  const Range heights = difficulty_range(points);
  const auto y_ticks = round_ticks(heights.low, heights.high);
  epochs = padded(epochs);
  auto x_ticks = epoch_ticks(epochs);
  std::erase_if(x_ticks, [&](double tick) { return tick < epochs.low || tick > epochs.high; });
  SvgCanvas canvas = canvas_for(title, legend);
  const Axes axes{kCorner, kFrame, epochs, ticks_range(y_ticks)};
  axes.draw(canvas, x_ticks, y_ticks, "epoch", "difficulty");
  const auto series = [&](const auto& value_of) {
    std::vector<PlotPoint> out;
    for (const DifficultyPoint& point : points) {
      out.push_back({static_cast<double>(point.epoch), static_cast<double>(value_of(point))});
    }
    return out;
  };
  for (std::size_t q = 0; q < kNames.size(); ++q) {
    draw_line(canvas, axes,
              series([q](const DifficultyPoint& point) { return point.quantiles[q]; }),
              colour_of(0), dashes[q]);
  }
  draw_line(canvas, axes, series([](const DifficultyPoint& point) { return point.threshold; }),
            kThresholdColour, "");
  return std::move(canvas).finish();
}

Result<void> write_plot(const std::filesystem::path& run, std::string_view name,
                        std::string_view svg) {
  const auto folder = run / "plots";
  PLIMSOLL_TRY_VOID(make_directories(folder));
  return replace_file(folder / fmt::format("{}.svg", name), svg);
}

}  // namespace plimsoll::can_kd
