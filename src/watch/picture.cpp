// SPDX-License-Identifier: Apache-2.0
#include "watch/picture.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include <fmt/format.h>

#include "base/utf8.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr std::size_t kColumns = 480;  // Points of a picture, at most.
constexpr double kWidth = 960;
constexpr double kHeight = 320;
constexpr double kLineHeight = 150;
constexpr double kLeft = 78;
constexpr double kRight = 16;
constexpr double kTop = 22;
constexpr double kBottom = 30;
constexpr double kStrip = 8;     // Of phases, below the plot.
constexpr double kFarLimit = 3;  // For a limit so many times above what is held the axis is broken.
constexpr double kBand = 34;     // Above the break.
constexpr std::size_t kPhaseColours = 6;
constexpr std::array<const char*, kPhaseColours> kPhases{"#c9d8ee", "#f3dcc0", "#cfe8d5",
                                                         "#e9cfe0", "#e4e0b8", "#d5d5d5"};

std::string escape_plain(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        const auto byte = static_cast<unsigned char>(c);
        const bool control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F;
        out += control ? std::string("\xEF\xBF\xBD") : std::string(1, c);
    }
  }
  return out;
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(seconds, 0.0)));
  if (whole >= 86'400) {
    return fmt::format("{} d {:02} h", whole / 86'400, whole / 3600 % 24);
  }
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string x_text(double x, PictureUnit unit) {
  return unit == PictureUnit::kSeconds ? duration_text(x) : fmt::format("{:.0f}", x);
}

// 1, 2 or 5 times a power of ten, so that `range` has up to `most` of them; of times, minutes.
double tick_step(double range, int most, PictureUnit unit) {
  const double raw = std::max(range / most, 1e-12);
  if (unit == PictureUnit::kSeconds && raw > 5) {
    for (const double step : {10., 15., 30., 60., 120., 300., 600., 1800., 3600., 7200., 21'600.,
                              43'200., 86'400., 172'800., 604'800.}) {
      if (step >= raw) {
        return step;
      }
    }
  }
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double times : {1., 2., 5.}) {
    if (times * power >= raw) {
      return times * power;
    }
  }
  return 10 * power;
}

// Of sizes: 1, 2, 4 … times a binary unit.
double byte_step(double range, int most) {
  return std::exp2(std::ceil(std::log2(std::max(range / most, 1.0))));
}

// Owners from the bottom up.
constexpr std::array kStack{Owner::kBefore, Owner::kTensors, Owner::kLeased,   Owner::kPython,
                            Owner::kNative, Owner::kHeap,    Owner::kRetained, Owner::kUnexplained,
                            Owner::kShared, Owner::kChildren};

class Frame {
 public:
  // Where `far_value` is above `top_value`, the axis is broken: above the break, what lies between.
  Frame(double left, double right, double top_value, double height, double far_value = 0)
      : left_(left),
        range_(std::max(right - left, 1e-9)),
        top_(std::max(top_value, 1e-12)),
        height_(height),
        far_(far_value),
        band_(far_value > top_value ? kBand : 0) {}
  [[nodiscard]] double x(double at) const {
    return kLeft + std::clamp((at - left_) / range_, 0.0, 1.0) * (kWidth - kLeft - kRight);
  }
  [[nodiscard]] double y(double value) const {
    if (band_ > 0 && value > top_) {
      return kTop + (1 - std::clamp((value - top_) / (far_ - top_), 0.0, 1.0)) * band_ / 2;
    }
    return kTop + band_ + (1 - std::clamp(value / top_, 0.0, 1.0)) * (plot() - band_);
  }
  // Two strokes across the axis, and a gap over the whole width.
  [[nodiscard]] std::string axis_break() const {
    const double y = kTop + 0.8 * band_;
    return band_ == 0
               ? ""
               : fmt::format(
                     "<path d='M{0:.1f} {1:.1f}H{2:.1f}' stroke='#fff' stroke-width='7'/><path "
                     "d='M{3:.1f} {4:.1f}l12 -5M{3:.1f} {5:.1f}l12 -5' stroke='#555' "
                     "stroke-width='1.5'/>",
                     kLeft, y, kWidth - kRight, kLeft - 6, y - 0.5, y + 6.5);
  }
  [[nodiscard]] double bottom() const { return kTop + plot(); }
  [[nodiscard]] double plot() const { return height_ - kTop - kBottom; }

  [[nodiscard]] std::string x_axis(PictureUnit unit) const {
    std::string out;
    const double step = tick_step(range_, 8, unit);
    for (double at = std::ceil(left_ / step) * step; at <= left_ + range_ + step / 1e6;
         at += step) {
      const bool parts = unit == PictureUnit::kSeconds && step < 1;
      out +=
          fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='middle' class='tick'>{}</text>",
                      x(at), height_ - 6, parts ? fmt::format("{:.2g} s", at) : x_text(at, unit));
    }
    return out;
  }
  [[nodiscard]] std::string y_line(double value, const std::string& text) const {
    return fmt::format(
        "<line x1='{:.1f}' x2='{:.1f}' y1='{:.1f}' y2='{:.1f}' class='grid'/><text x='{:.1f}' "
        "y='{:.1f}' text-anchor='end' class='tick'>{}</text>",
        kLeft, kWidth - kRight, y(value), y(value), kLeft - 6, y(value) + 4, text);
  }

 private:
  double left_;
  double range_;
  double top_;
  double height_;
  double far_;
  double band_;
};

std::string open_svg(double height, std::string_view title) {
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0:.0f} {1:.0f}' width='{0:.0f}' "
      "height='{1:.0f}' role='img' aria-label='{2}' style='max-width:100%;height:auto;"
      "font:12px system-ui,sans-serif'><style>.tick{{fill:#555}}.grid{{stroke:#ddd}}</style>"
      "<title>{2}</title>",
      kWidth, height, escape_markup(title));
}

std::int64_t stacked_bytes(const PicturePoint& point) {
  std::int64_t sum = 0;
  for (std::size_t at = 0; at < kOwnerCount; ++at) {
    if (is_stacked(static_cast<Owner>(at))) {
      sum += std::max<std::int64_t>(point.owners[at], 0);
    }
  }
  return sum;
}

// Of each group of neighbours the one that holds most, so that no peak is lost.
std::vector<PicturePoint> thinned(const std::vector<PicturePoint>& points) {
  if (points.size() <= kColumns) {
    return points;
  }
  std::vector<PicturePoint> kept;
  for (std::size_t column = 0; column < kColumns; ++column) {
    const auto first =
        points.begin() + static_cast<std::ptrdiff_t>(column * points.size() / kColumns);
    const auto last =
        points.begin() + static_cast<std::ptrdiff_t>((column + 1) * points.size() / kColumns);
    kept.push_back(*std::max_element(first, last, [](const auto& one, const auto& other) {
      return stacked_bytes(one) < stacked_bytes(other);
    }));
  }
  kept.back() = points.back();  // How it ended.
  return kept;
}

std::string draw_phases(const std::vector<PicturePoint>& points, const Frame& frame) {
  std::vector<std::string> names;
  std::string shades;
  std::string legend;
  double legend_x = kLeft;
  for (std::size_t first = 0; first < points.size();) {
    std::size_t last = first;
    while (last + 1 < points.size() && points[last + 1].phase == points[first].phase) {
      ++last;
    }
    const std::string& name = points[first].phase;
    auto known = std::ranges::find(names, name);
    if (known == names.end()) {
      names.push_back(name);
      known = std::prev(names.end());
    }
    const auto number = static_cast<std::size_t>(known - names.begin());
    const char* const colour = kPhases[number % kPhaseColours];
    const double from = frame.x(first == 0 ? points[0].x : points[first - 1].x);
    const double width = std::max(frame.x(points[last].x) - from, 0.5);
    shades += fmt::format(
        "<rect x='{0:.1f}' y='{1:.1f}' width='{2:.1f}' height='{3:.1f}' fill='{4}' opacity='.35'/>"
        "<rect x='{0:.1f}' y='{5:.1f}' width='{2:.1f}' height='{6:.0f}' fill='{4}'><title>{7}"
        "</title></rect>",
        from, kTop, width, frame.plot(), colour, frame.bottom(), kStrip, escape_markup(name));
    first = last + 1;
  }
  for (std::size_t at = 0; at < std::min(names.size(), kPhaseColours) && !names[at].empty(); ++at) {
    legend += fmt::format(
        "<rect x='{:.1f}' y='4' width='12' height='12' fill='{}'/><text x='{:.1f}' y='14' "
        "class='tick'>{}</text>",
        legend_x, kPhases[at], legend_x + 16, escape_markup(names[at]));
    legend_x += 34 + 7.2 * static_cast<double>(names[at].size());
  }
  return shades + legend;
}

std::string draw_areas(const std::vector<PicturePoint>& points, const Frame& frame) {
  std::string out;
  std::vector<double> floor(points.size(), 0);
  for (const Owner owner : kStack) {
    const auto at = static_cast<std::size_t>(owner);
    if (std::ranges::none_of(points, [&](const auto& one) { return one.owners[at] > 0; })) {
      continue;
    }
    std::string upper;
    std::string lower;
    for (std::size_t k = 0; k < points.size(); ++k) {
      const double top =
          floor[k] + static_cast<double>(std::max<std::int64_t>(points[k].owners[at], 0));
      upper +=
          fmt::format("{}{:.1f} {:.1f}", k == 0 ? "M" : "L", frame.x(points[k].x), frame.y(top));
      lower.insert(0, fmt::format("L{:.1f} {:.1f}", frame.x(points[k].x), frame.y(floor[k])));
      floor[k] = top;
    }
    out += fmt::format("<path d='{}{}Z' fill='{}' opacity='.88'><title>{}</title></path>", upper,
                       lower, owner_colour(owner), owner_name(owner));
  }
  return out;
}

std::string draw_limit(const std::vector<PicturePoint>& points, const Frame& frame) {
  std::string line;
  std::int64_t last = 0;  // The one that is drawn last.
  bool drawing = false;
  for (const PicturePoint& point : points) {
    if (point.limit_bytes <= 0) {
      drawing = false;
      continue;
    }
    const double x = frame.x(point.x);
    const double y = frame.y(static_cast<double>(point.limit_bytes));
    line += drawing ? fmt::format("H{:.1f}V{:.1f}", x, y) : fmt::format("M{:.1f} {:.1f}", x, y);
    last = point.limit_bytes;
    drawing = true;
  }
  if (last == 0) {
    return "";
  }
  const double y = frame.y(static_cast<double>(last));
  return fmt::format(
      "<path d='{}' fill='none' stroke='#c1121f' stroke-width='2' stroke-dasharray='6 3'/><text "
      "x='{:.1f}' y='{:.1f}' text-anchor='end' fill='#c1121f' font-weight='600'>limit {}</text>",
      line, kWidth - kRight - 4, y < kTop + 12 ? y + 15 : y - 5, format_bytes(last));
}

std::string draw_marks(const std::vector<PictureMark>& marks, const Frame& frame) {
  std::string out;
  for (const PictureMark& mark : marks) {
    const double x = frame.x(mark.x);
    const std::string title = "<title>" + escape_markup(mark.text) + "</title>";
    switch (mark.kind) {
      case PictureMark::Kind::kCommit:
        out += fmt::format("<path d='M{:.1f} {:.1f}l4 7h-8z' fill='#2a7f3f'>{}</path>", x,
                           frame.bottom() + kStrip + 1, title);
        break;
      case PictureMark::Kind::kStart:
        out += fmt::format(
            "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2:.1f}' stroke='#333' "
            "stroke-dasharray='2 3'>{3}</line>",
            x, kTop, frame.bottom(), title);
        break;
      case PictureMark::Kind::kEnd:
        out += fmt::format(
            "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2:.1f}' stroke='#c1121f' "
            "stroke-width='2'>{3}</line>",
            x, kTop, frame.bottom(), title);
        break;
      default:
        out += fmt::format(
            "<line x1='{0:.1f}' x2='{0:.1f}' y1='{1}' y2='{2}' stroke='{3}' stroke-width='3'>{4}"
            "</line>",
            x, kTop, kTop + 14, mark.kind == PictureMark::Kind::kRefusal ? "#c1121f" : "#e07b00",
            title);
    }
  }
  return out;
}

}  // namespace

std::string escape_markup(std::string_view text) {
  return escape_plain(as_utf8(std::string(text)));
}

const char* owner_colour(Owner owner) noexcept {
  constexpr std::array<const char*, kOwnerCount> kColours{
      "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#D55E00", "#F0E442",
      "#8d8d8d", "#CC79A7", "#009E73", "#cccccc", "#aaaaaa", "#d4dbe3"};
  return kColours[static_cast<std::size_t>(owner)];
}

bool is_stacked(Owner owner) noexcept {
  return std::ranges::find(kStack, owner) != kStack.end();
}

std::string memory_picture(const std::vector<PicturePoint>& all,
                           const std::vector<PictureMark>& marks, PictureUnit unit) {
  std::string out = open_svg(kHeight, "memory by owner over time");
  if (all.empty()) {
    return out + fmt::format(
                     "<text x='{:.0f}' y='{:.0f}' text-anchor='middle' class='tick'>no looks "
                     "were kept</text></svg>",
                     kWidth / 2, kHeight / 2);
  }
  std::vector<PicturePoint> points = thinned(all);
  double left = points.front().x;
  double right = points.back().x;
  for (const PictureMark& mark : marks) {
    right = std::max(right, mark.x);
  }
  if (points.size() == 1) {  // One look is drawn as wide as the picture.
    points.push_back(points.front());
    right = std::max(right, left + 1);
    points.back().x = right;
  }
  double held = 1 << 20;
  double limit = 0;
  for (const PicturePoint& point : points) {
    held = std::max(held, static_cast<double>(stacked_bytes(point)));
    limit = std::max(limit, static_cast<double>(point.limit_bytes));
  }
  const bool far = limit > kFarLimit * held;
  const double top = 1.08 * (far ? held : std::max(held, limit));
  const Frame frame(left, right, top, kHeight, far ? limit : 0);
  out += draw_phases(points, frame);
  const double step = byte_step(top, 6);
  for (double at = 0; at <= top; at += step) {
    out += frame.y_line(at, format_bytes(static_cast<std::int64_t>(at)));
  }
  if (far) {
    out += frame.y_line(limit, format_bytes(static_cast<std::int64_t>(limit)));
  }
  return out + draw_areas(points, frame) + frame.axis_break() + draw_limit(points, frame) +
         draw_marks(marks, frame) + frame.x_axis(unit) + "</svg>";
}

std::string owner_legend(const std::vector<PicturePoint>& points) {
  std::string out = "<div>";
  for (const Owner owner : kStack) {
    const auto at = static_cast<std::size_t>(owner);
    if (std::ranges::any_of(points, [&](const auto& one) { return one.owners[at] > 0; })) {
      out += fmt::format(
          "<span style='margin-right:14px;font-size:13px;white-space:nowrap'><i style='display:"
          "inline-block;width:11px;height:11px;margin-right:5px;background:{}'></i>{}</span>",
          owner_colour(owner), owner_name(owner));
    }
  }
  return out + "</div>";
}

std::string line_picture(const std::string& name,
                         const std::vector<std::pair<double, double>>& points, double left,
                         double right, PictureUnit unit) {
  std::string out = open_svg(kLineHeight, name + " over time");
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto& [x, y] : points) {
    if (std::isfinite(y)) {
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (!(low <= high)) {
    return out + fmt::format(
                     "<text x='{:.0f}' y='{:.0f}' text-anchor='middle' class='tick'>no {} "
                     "was told</text></svg>",
                     kWidth / 2, kLineHeight / 2, escape_markup(name));
  }
  low = std::min(low, 0.0);
  const double range = std::max(high - low, 1e-12);
  const Frame frame(left, right, range * 1.08, kLineHeight);
  const double step = tick_step(range, 3, PictureUnit::kSteps);
  for (double at = std::ceil(low / step) * step; at <= low + range * 1.08; at += step) {
    out += frame.y_line(at - low, fmt::format("{:.4g}", std::abs(at) < step / 1e6 ? 0.0 : at));
  }
  std::string line;
  const std::size_t every = points.size() / (2 * kColumns) + 1;
  for (std::size_t at = 0; at < points.size(); at += every) {
    const auto& [x, y] = points[at];
    if (std::isfinite(y)) {
      line +=
          fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", frame.x(x), frame.y(y - low));
    }
  }
  line += points.size() == 1 ? "h4" : "";
  return out +
         fmt::format(
             "<path d='{}' fill='none' stroke='#0072B2' stroke-width='1.6'/><text x='{:.1f}' "
             "y='14' "
             "font-weight='600'>{}</text>",
             line, kLeft, escape_markup(name)) +
         frame.x_axis(unit) + "</svg>";
}

std::string bar_picture(const std::array<std::int64_t, kOwnerCount>& owners,
                        std::int64_t limit_bytes) {
  constexpr double kBarHeight = 66;
  constexpr double kBar = 26;
  constexpr double kBeforeBreak = 0.82;  // Of the width, where the axis is broken.
  PicturePoint point{.owners = owners};
  const std::int64_t held = stacked_bytes(point);
  const auto limit = static_cast<double>(limit_bytes);
  const bool far = limit > kFarLimit * static_cast<double>(std::max<std::int64_t>(held, 1));
  const double whole = far ? static_cast<double>(std::max<std::int64_t>(held, 1)) / kBeforeBreak
                           : std::max({static_cast<double>(held), limit, 1.0});
  std::string out = open_svg(kBarHeight, "who holds how much of the limit");
  double x = 0;
  for (const Owner owner : kStack) {
    const auto at = static_cast<std::size_t>(owner);
    if (owners[at] <= 0) {
      continue;
    }
    const double width = static_cast<double>(owners[at]) / whole * kWidth;
    const std::string text = fmt::format("{} {}", owner_name(owner), format_bytes(owners[at]));
    out += fmt::format(
        "<rect x='{:.1f}' y='22' width='{:.1f}' height='{:.0f}' fill='{}'><title>{}</title></rect>",
        x, std::max(width, 0.5), kBar, owner_colour(owner), text);
    if (width > 7.0 * static_cast<double>(text.size())) {
      out +=
          fmt::format("<text x='{:.1f}' y='40' fill='{}' font-weight='600'>{}</text>", x + 6,
                      owner == Owner::kRetained || owner == Owner::kBefore ? "#000" : "#fff", text);
    }
    x += width;
  }
  out +=
      fmt::format("<rect x='.5' y='22' width='{:.1f}' height='{:.0f}' fill='none' stroke='#888'/>",
                  kWidth - 1, kBar);
  if (limit_bytes > 0) {
    if (far) {
      out += fmt::format(
          "<path d='M{0:.1f} 52l8 -34M{1:.1f} 52l8 -34' stroke='#555' stroke-width='1.5'/>",
          0.9 * kWidth, 0.9 * kWidth + 7);
    }
    const double at = far ? kWidth : limit / whole * kWidth;
    out += fmt::format(
        "<line x1='{0:.1f}' x2='{0:.1f}' y1='16' y2='54' stroke='#c1121f' stroke-width='3'/><text "
        "x='{0:.1f}' y='12' text-anchor='end' fill='#c1121f' font-weight='600'>limit {1}</text>",
        std::min(at, kWidth - 2), format_bytes(limit_bytes));
  }
  return out +
         fmt::format("<text x='0' y='63' class='tick'>held {}</text></svg>", format_bytes(held));
}

}  // namespace plimsoll
