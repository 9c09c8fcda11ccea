// SPDX-License-Identifier: Apache-2.0
//
// SvgCanvas: shapes and text of one SVG document; Axes: where a plot's numbers are on it.
//
// Reading order: plots.h, this file, plots.cpp.
//
// Threads: single-owner.   Memory: the text of the document.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace plimsoll::can_kd {

struct PlotPoint {
  double x{0};
  double y{0};
};

enum class Anchor : std::uint8_t { kStart, kMiddle, kEnd };

/// Coordinates in pixels from the upper left corner; colours as in CSS.
class SvgCanvas {
 public:
  SvgCanvas(double width, double height);

  void rect(PlotPoint corner, PlotPoint size, std::string_view fill, std::string_view stroke);
  void line(PlotPoint from, PlotPoint to, std::string_view stroke, std::string_view dashes = "");
  void polyline(std::span<const PlotPoint> points, std::string_view stroke,
                std::string_view dashes = "");
  /// `quarter_turn`: read from below upwards. Any UTF-8; control characters are left out.
  void text(PlotPoint at, std::string_view words, Anchor anchor, int size = 12,
            std::string_view fill = "#222222", bool quarter_turn = false);

  /// The whole document. To be called once.
  [[nodiscard]] std::string finish() &&;

 private:
  void points_attribute(std::span<const PlotPoint> points);
  std::string text_;
};

/// `text` where XML wants text: markup escaped, control characters and stray bytes left out.
[[nodiscard]] std::string xml_text(std::string_view text);

/// A few round numbers from `low` to `high`, both within the first and last of them or equal.
/// Requires: low < high, both finite.
[[nodiscard]] std::vector<double> round_ticks(double low, double high);

struct Range {
  double low{0};
  double high{1};
};

/// A frame with ticks and titles; maps numbers to pixels, cut off at the frame.
class Axes {
 public:
  Axes(PlotPoint corner, PlotPoint size, Range x, Range y)
      : corner_(corner), size_(size), x_(x), y_(y) {}

  void draw(SvgCanvas& canvas, std::span<const double> x_ticks, std::span<const double> y_ticks,
            std::string_view x_title, std::string_view y_title) const;
  [[nodiscard]] PlotPoint at(PlotPoint value) const;

 private:
  PlotPoint corner_;
  PlotPoint size_;
  Range x_;
  Range y_;
};

}  // namespace plimsoll::can_kd
