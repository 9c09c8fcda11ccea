// SPDX-License-Identifier: Apache-2.0
//
// Threads: see svg_canvas.h.   Memory: see svg_canvas.h.
#include "recipes/can_kd/svg_canvas.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace plimsoll::can_kd {
namespace {

constexpr std::string_view kGrid = "#e6e6e6";
constexpr std::string_view kInk = "#444444";
constexpr double kTickText = 8.0;  // Between the frame and the numbers at it.

std::string dash_attribute(std::string_view dashes) {
  return dashes.empty() ? std::string{} : fmt::format(" stroke-dasharray=\"{}\"", dashes);
}

/// Bytes of the UTF-8 character that begins at `at`; 0 when none does.
std::size_t character_bytes(std::string_view text, std::size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const std::size_t bytes = first < 0x80   ? 1
                            : first < 0xC2 ? 0
                            : first < 0xE0 ? 2
                            : first < 0xF0 ? 3
                            : first < 0xF5 ? 4
                                           : 0;
  if (bytes == 0 || at + bytes > text.size()) {
    return 0;
  }
  for (std::size_t i = 1; i < bytes; ++i) {
    const auto next = static_cast<unsigned char>(text[at + i]);
    // The second byte alone tells overlong forms, surrogates and what is beyond U+10FFFF.
    const unsigned low = i == 1 && first == 0xE0 ? 0xA0U : i == 1 && first == 0xF0 ? 0x90U : 0x80U;
    const unsigned high = i == 1 && first == 0xED ? 0x9FU : i == 1 && first == 0xF4 ? 0x8FU : 0xBFU;
    if (next < low || next > high) {
      return 0;
    }
  }
  return bytes;
}

std::string tick_text(double value) {
  return fmt::format("{:.6g}", value == 0.0 ? 0.0 : value);
}

}  // namespace

std::string xml_text(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t bytes = character_bytes(text, i);
    const std::string_view one = text.substr(i, bytes);
    i += std::max<std::size_t>(bytes, 1);
    if (bytes == 0 || one < std::string_view{" "} || one == "\x7F" || one == "\xEF\xBF\xBE" ||
        one == "\xEF\xBF\xBF") {
      continue;
    }
    out += one == "<"    ? std::string_view{"&lt;"}
           : one == ">"  ? std::string_view{"&gt;"}
           : one == "&"  ? std::string_view{"&amp;"}
           : one == "\"" ? std::string_view{"&quot;"}
                         : one;
  }
  return out;
}

std::vector<double> round_ticks(double low, double high) {
  PLIMSOLL_CHECK(low < high && std::isfinite(high - low), "an axis has a length");
  constexpr double kAbout = 5.0;
  const double rough = (high - low) / kAbout;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double lead = rough / power;
  const double step = power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
  std::vector<double> ticks;
  const double first = std::floor(low / step);
  const auto count = static_cast<std::int64_t>(std::ceil(high / step) - first);
  for (std::int64_t i = 0; i <= count; ++i) {
    ticks.push_back((first + static_cast<double>(i)) * step);
  }
  return ticks;
}

SvgCanvas::SvgCanvas(double width, double height) {
  text_ = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" "
      "viewBox=\"0 0 {0:g} {1:g}\" font-family=\"sans-serif\">\n",
      width, height);
  rect({0, 0}, {width, height}, "#ffffff", "none");
}

void SvgCanvas::rect(PlotPoint corner, PlotPoint size, std::string_view fill,
                     std::string_view stroke) {
  text_ += fmt::format(
      "<rect x=\"{:.6g}\" y=\"{:.6g}\" width=\"{:.6g}\" height=\"{:.6g}\" fill=\"{}\" "
      "stroke=\"{}\"/>\n",
      corner.x, corner.y, size.x, size.y, fill, stroke);
}

void SvgCanvas::line(PlotPoint from, PlotPoint to, std::string_view stroke,
                     std::string_view dashes) {
  text_ += fmt::format(
      "<line x1=\"{:.6g}\" y1=\"{:.6g}\" x2=\"{:.6g}\" y2=\"{:.6g}\" stroke=\"{}\"{}/>\n", from.x,
      from.y, to.x, to.y, stroke, dash_attribute(dashes));
}

void SvgCanvas::points_attribute(std::span<const PlotPoint> points) {
  text_ += " points=\"";
  for (const PlotPoint& point : points) {
    fmt::format_to(std::back_inserter(text_), "{}{:.6g},{:.6g}", &point == points.data() ? "" : " ",
                   point.x, point.y);
  }
  text_ += '"';
}

void SvgCanvas::polyline(std::span<const PlotPoint> points, std::string_view stroke,
                         std::string_view dashes) {
  text_ += "<polyline";
  points_attribute(points);
  text_ += fmt::format(
      " fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" stroke-linejoin=\"round\"{}/>\n", stroke,
      dash_attribute(dashes));
}

void SvgCanvas::text(PlotPoint at, std::string_view words, Anchor anchor, int size,
                     std::string_view fill, bool quarter_turn) {
  const std::string_view place = anchor == Anchor::kStart    ? "start"
                                 : anchor == Anchor::kMiddle ? "middle"
                                                             : "end";
  const std::string turn = quarter_turn
                               ? fmt::format(" transform=\"rotate(-90 {:.6g} {:.6g})\"", at.x, at.y)
                               : std::string{};
  text_ += fmt::format(
      "<text x=\"{:.6g}\" y=\"{:.6g}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{}\"{}>{}"
      "</text>\n",
      at.x, at.y, size, fill, place, turn, xml_text(words));
}

std::string SvgCanvas::finish() && {
  text_ += "</svg>\n";
  return std::move(text_);
}

void Axes::draw(SvgCanvas& canvas, std::span<const double> x_ticks, std::span<const double> y_ticks,
                std::string_view x_title, std::string_view y_title) const {
  const double right = corner_.x + size_.x;
  const double bottom = corner_.y + size_.y;
  for (const double tick : x_ticks) {
    const double x = at({tick, y_.low}).x;
    canvas.line({x, corner_.y}, {x, bottom}, kGrid);
    canvas.text({x, bottom + kTickText + 10}, tick_text(tick), Anchor::kMiddle, 11, kInk);
  }
  for (const double tick : y_ticks) {
    const double y = at({x_.low, tick}).y;
    canvas.line({corner_.x, y}, {right, y}, kGrid);
    canvas.text({corner_.x - kTickText, y + 4}, tick_text(tick), Anchor::kEnd, 11, kInk);
  }
  canvas.rect(corner_, size_, "none", kInk);
  canvas.text({corner_.x + size_.x / 2, bottom + 40}, x_title, Anchor::kMiddle);
  canvas.text({corner_.x - 52, corner_.y + size_.y / 2}, y_title, Anchor::kMiddle, 12, "#222222",
              true);
}

PlotPoint Axes::at(PlotPoint value) const {
  const auto share = [](double v, const Range& range) {
    return std::clamp((v - range.low) / (range.high - range.low), 0.0, 1.0);
  };
  return {corner_.x + size_.x * share(value.x, x_), corner_.y + size_.y * (1 - share(value.y, y_))};
}

}  // namespace plimsoll::can_kd
