// SPDX-License-Identifier: Apache-2.0
//
// Plots of a run as SVG: each a file by itself that any browser shows.
//
// Reading order: curves.h, difficulties.h, this file, plots.cpp, svg_canvas.h.
//
// Threads: pure functions, but write_plot().   Memory: the text, about 15 bytes a point of a curve.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plimsoll/result.h"
#include "recipes/can_kd/curves.h"
#include "recipes/can_kd/difficulties.h"
#include "recipes/can_kd/scores.h"

namespace plimsoll::can_kd {

inline constexpr std::int64_t kPlotPoints = 500;  ///< Enough of a curve for a plot.

struct NamedCurve {
  std::string name{};  ///< In the legend; "name (0.987)" with an area that is a number.
  std::vector<CurvePoint> points{};
  double area{0};
};

/// Each returns a whole SVG document. A curve without points stands in the legend alone.
[[nodiscard]] std::string roc_plot(std::string_view title, std::span<const NamedCurve> curves);
[[nodiscard]] std::string pr_plot(std::string_view title, std::span<const NamedCurve> curves);
[[nodiscard]] std::string confusion_plot(std::string_view title, const BinaryScores& scores);
/// Quantiles of difficulty, and the threshold, over epochs.
[[nodiscard]] std::string difficulty_plot(std::string_view title,
                                          std::span<const DifficultyPoint> points);

/// Writes RUN/plots/NAME.svg durably; the old one stays until the new one is whole. Errors: kIo.
Result<void> write_plot(const std::filesystem::path& run, std::string_view name,
                        std::string_view svg);

}  // namespace plimsoll::can_kd
