// SPDX-License-Identifier: Apache-2.0
#include "watch/trend.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace plimsoll {
namespace {

constexpr double kSecondHalf = 0.3;     // Of the first half's slope, at least, in a leak.
constexpr double kOneStep = 0.6;        // Share of the rise that makes a single step explain it.
constexpr double kRiseOneStep = 0.9;    // The same of what is only suspected.
constexpr double kWarmUpBytes = 2e6;    // A smaller rise at first is not worth a word.
constexpr double kSawtoothBytes = 4e6;  // What comes and goes within the median window.
constexpr double kStandsOut = 2;  // Times the next, and a window's growth: what happened once.
constexpr double kStepUnits = 2;  // Windows at the least slope that make a step worth a word.
// A bend in what rises: how much less it rises at its end, and how sure that is.
struct Bend {
  double rate{0};    // At the end, of that at the beginning, at most.
  double surely{0};  // Times its standard error that it is bent, at least.
};
constexpr Bend kFades{.rate = 0.8, .surely = 4};
constexpr Bend kFadesStill{.rate = 0.85, .surely = 1.5};  // The newest two thirds of it.
constexpr double kStill = 0.3;            // Of the rate: a window that rises less stands still.
constexpr std::size_t kStillLeast = 2;    // Windows at the end that stand still and say something.
constexpr std::size_t kLongestWait = 4;   // Times the least number of windows, of slow growth.
constexpr std::size_t kNewestLeast = 12;  // Windows in which a leak that began late is looked for.
constexpr double kNormal95 = 1.959964;    // 97.5 % quantile of the normal distribution.

double as_double(std::int64_t bytes) {
  return static_cast<double>(bytes);
}

// Where a rise that slows down as it does from one half to the other would end.
std::int64_t bound_of(double first_rise, double second_rise, double last) {
  const double ratio = std::clamp(second_rise / std::max(first_rise, 1.0), 0.0, 0.9);
  return static_cast<std::int64_t>(last + std::max(second_rise, 0.0) * ratio / (1 - ratio));
}

// Takes out what was made once, say a table, which tells nothing of how the rest goes on: a step
// that stands out. It may lie within the window before; of the means those on its longer side stay.
void without_event(double width, std::vector<Point>& floors, std::vector<Point>& means) {
  std::vector<double> rates;
  for (std::size_t at = 1; at < floors.size(); ++at) {
    rates.push_back((floors[at].bytes - floors[at - 1].bytes) /
                    (floors[at].at - floors[at - 1].at));
  }
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::ranges::nth_element(rates, middle);
  const double rate = *middle;
  double event = 0;
  double next = 0;
  std::size_t event_at = 0;
  for (std::size_t at = 1; at < floors.size(); ++at) {
    const double more =
        floors[at].bytes - floors[at - 1].bytes - rate * (floors[at].at - floors[at - 1].at);
    if (more > event) {
      next = std::max(next, event);
      event = more;
      event_at = at;
    } else {
      next = std::max(next, std::abs(more));
    }
  }
  if (event <= kStandsOut * std::max(next, std::abs(rate) * width)) {
    return;
  }
  for (std::size_t at = event_at; at < floors.size(); ++at) {
    floors[at].bytes -= event;
  }
  const auto side = means.begin() + static_cast<std::ptrdiff_t>(event_at);
  if (2 * event_at > means.size() + 1) {
    means.erase(side - 1, means.end());
  } else {
    means.erase(means.begin(), side);
  }
}

// Whether a parabola through the points is bent so: least squares, in x from −1 to 1.
bool is_bent(std::span<const Point> points, Bend bend) {
  const auto count = static_cast<double>(points.size());
  const double left = points.front().at;
  const double half = (points.back().at - left) / 2;
  // Polynomials that are orthogonal over these x: 1, x − m, x² − e − f (x − m).
  double mean_x = 0;
  double mean_y = 0;
  for (const Point& one : points) {
    mean_x += ((one.at - left) / half - 1) / count;
    mean_y += one.bytes / count;
  }
  double xx = 0;
  double xy = 0;
  double x2 = 0;
  double x3 = 0;
  for (const Point& one : points) {
    const double x = (one.at - left) / half - 1 - mean_x;
    xx += x * x;
    xy += x * (one.bytes - mean_y);
    x2 += x * x / count;
    x3 += x * x * x;
  }
  const double tilt = x3 / xx;
  const auto bow = [&](double x) { return x * x - x2 - tilt * x; };
  double bows = 0;
  double by = 0;
  for (const Point& one : points) {
    const double at = bow((one.at - left) / half - 1 - mean_x);
    bows += at * at;
    by += at * (one.bytes - mean_y);
  }
  const double rise = xy / xx;
  const double bent = by / bows;
  double left_over = 0;
  for (const Point& one : points) {
    const double x = (one.at - left) / half - 1 - mean_x;
    const double off = one.bytes - mean_y - rise * x - bent * bow(x);
    left_over += off * off;
  }
  const double error = std::sqrt(left_over / std::max(count - 3, 1.0) / bows);
  const auto rate = [&](double x) { return rise + bent * (2 * x - tilt); };
  return bent < 0 && -bent > bend.surely * error &&
         rate(1 - mean_x) < bend.rate * rate(-1 - mean_x);
}

// Whether it rises ever less, to its end: a cache that fills beside a leak is full some day.
bool fades(std::span<const Point> points) {
  const std::size_t newest = points.size() - points.size() / 3;
  return newest > 3 && is_bent(points, kFades) && is_bent(points.last(newest), kFadesStill);
}

// Whether it stands still at its end, for longer than it did before.
bool stands_still(std::span<const Point> floors, double rate) {
  std::size_t longest = 0;
  std::size_t still = 0;
  for (std::size_t at = 1; at < floors.size(); ++at) {
    const double rise = floors[at].bytes - floors[at - 1].bytes;
    if (rise < kStill * rate * (floors[at].at - floors[at - 1].at)) {
      ++still;
    } else {
      longest = std::max(longest, still);
      still = 0;
    }
  }
  return still >= kStillLeast && still > longest;
}

// Windows, after warm-up, that growth at this rate has to be steady for.
std::size_t windows_for(double rate) {
  const double least = static_cast<double>(Trend::kJudgedLeast);
  const double wanted = least * Trend::kSoonSlope / std::max(rate, Trend::kLeastSlope);
  const double most = least * static_cast<double>(kLongestWait);
  return static_cast<std::size_t>(std::ceil(std::clamp(wanted, least, most)));
}

// Windows with warm-up, which is a quarter of them.
std::size_t with_warm_up(std::size_t judged) {
  std::size_t all = judged + Trend::kCutLeast;
  while (all - all / 4 < judged) {
    ++all;
  }
  return all;
}

}  // namespace

const char* course_name(Course course) noexcept {
  constexpr std::array<const char*, 10> kNames{
      "too short",           "plateau",   "warm-up", "saturating", "step", "sawtooth", "leak",
      "uncollected garbage", "retention", "cache"};
  return kNames[static_cast<std::size_t>(course)];
}

Slope theil_sen(std::span<const Point> points) {
  std::vector<double> slopes;
  slopes.reserve(points.size() * (points.size() - 1) / 2);
  for (std::size_t i = 0; i < points.size(); ++i) {
    for (std::size_t j = i + 1; j < points.size(); ++j) {
      slopes.push_back((points[j].bytes - points[i].bytes) / (points[j].at - points[i].at));
    }
  }
  const double pairs = static_cast<double>(slopes.size());
  const double n = static_cast<double>(points.size());
  const double spread = kNormal95 * std::sqrt(n * (n - 1) * (2 * n + 5) / 18);
  const auto of_rank = [&](std::size_t rank) {
    const auto at = slopes.begin() + static_cast<std::ptrdiff_t>(rank);
    std::ranges::nth_element(slopes, at);
    return *at;
  };
  const auto near = [&](double rank) {
    return of_rank(static_cast<std::size_t>(std::clamp(std::round(rank), 0.0, pairs - 1)));
  };
  const std::size_t middle = slopes.size() / 2;
  const double median = of_rank(middle);
  return {.median = slopes.size() % 2 == 1 ? median : (of_rank(middle - 1) + median) / 2,
          .lower = near((pairs - spread) / 2 - 1),
          .upper = near((pairs + spread) / 2)};
}

std::vector<Point> Trend::floors() const {
  std::vector<Point> floors;
  for (const Window& window : windows_) {
    floors.push_back({.at = origin_ + static_cast<double>(window.number) * width_,
                      .bytes = as_double(window.floor)});
  }
  return floors;
}

void Trend::add(double at, std::int64_t bytes) {
  if (windows_.empty()) {
    windows_.reserve(kWindowsMost);
    origin_ = at;
  }
  const auto number_at = [&] { return static_cast<std::int64_t>((at - origin_) / width_); };
  if (windows_.empty() || number_at() > windows_.back().number) {
    while (windows_.size() == kWindowsMost) {
      thin();
    }
  }
  const std::int64_t number = number_at();  // Windows may be longer now.
  if (windows_.empty() || number > windows_.back().number) {
    windows_.push_back({.number = number, .floor = bytes, .top = bytes});
  }
  const double after = at - origin_;
  windows_.back().join(
      {.floor = bytes, .top = bytes, .looks = 1, .at_sum = after, .bytes_sum = as_double(bytes)});
}

void Trend::Window::join(const Window& other) noexcept {
  floor = std::min(floor, other.floor);
  top = std::max(top, other.top);
  looks += other.looks;
  at_sum += other.at_sum;
  bytes_sum += other.bytes_sum;
}

Point Trend::Window::mean() const noexcept {
  const double count = as_double(looks);
  return {.at = at_sum / count, .bytes = bytes_sum / count};
}

void Trend::thin() {
  width_ *= 2;
  std::size_t kept = 0;
  for (const Window& one : windows_) {
    const std::int64_t number = one.number / 2;
    if (kept > 0 && windows_[kept - 1].number == number) {
      windows_[kept - 1].join(one);
    } else {
      windows_[kept] = one;
      windows_[kept].number = number;
      ++kept;
    }
  }
  windows_.resize(kept);
}

double Trend::rise() const {
  constexpr std::size_t kLeast = 4;
  const std::span<const Window> over(windows_.data(), windows());
  if (over.size() < kLeast) {
    return 0;
  }
  const auto newest = over.last(std::max(kLeast, over.size() / 2));
  const double rise = as_double(newest.back().floor - newest.front().floor);
  const double units = width_ * as_double(newest.back().number - newest.front().number);
  double largest = 0;
  for (std::size_t at = 1; at < newest.size(); ++at) {
    largest = std::max(largest, as_double(newest[at].floor - newest[at - 1].floor));
  }
  const bool highest = newest.back().floor == std::ranges::max(over, {}, &Window::floor).floor;
  return highest && rise > kLeastSlope * units && largest < kRiseOneStep * rise ? rise / units : 0;
}

double Trend::so_far() const {
  if (windows_.size() < 2) {
    return 0;
  }
  const double rise = as_double(windows_.back().floor - windows_.front().floor);
  return std::max(rise, 0.0) /
         (width_ * as_double(windows_.back().number - windows_.front().number));
}

Judged Trend::judge() const {
  const std::span<const Window> over(windows_.data(), windows());
  const Judged whole = judge(over);
  if (whole.course == Course::kLeak || whole.course == Course::kSaturating ||
      whole.course == Course::kTooShort) {
    return whole;  // The end of what slows down may look straight.
  }
  for (std::size_t newest = over.size() / 2; newest >= kNewestLeast; newest /= 2) {
    const auto before = over.first(over.size() - newest);
    const Judged late = judge(over.last(newest));
    if (late.course == Course::kLeak &&
        over.back().floor > std::ranges::max(before, {}, &Window::floor).floor) {
      return late;
    }
  }
  return whole;
}

Judged Trend::judge(std::span<const Window> windows) const {
  const std::size_t cut = std::max<std::size_t>(kCutLeast, windows.size() / 4);
  if (windows.size() < cut + kJudgedLeast) {
    return {.windows_wanted = kWindowsLeast};
  }
  const auto judged = windows.subspan(cut);
  std::vector<Point> floors;
  std::vector<Point> means;
  std::vector<std::int64_t> swings;
  double largest_step = 0;
  double largest_window = 0;
  double highest = 0;
  double largest_fall = 0;
  for (std::size_t at = 0; at < judged.size(); ++at) {
    const Window& one = judged[at];
    const double bytes = as_double(one.floor);
    if (at > 0) {
      // Windows in which nobody looked share a rise: where looks are ever rarer, the last rise of a
      // steady leak is most of it.
      const double rise = bytes - floors.back().bytes;
      largest_step = std::max(largest_step, rise);
      largest_window =
          std::max(largest_window, rise / as_double(one.number - judged[at - 1].number));
    }
    highest = std::max(highest, bytes);
    largest_fall = std::max(largest_fall, highest - bytes);
    floors.push_back({.at = width_ * as_double(one.number), .bytes = bytes});
    means.push_back(one.mean());
    swings.push_back(one.top - one.floor);
  }
  const double last = floors.back().bytes;
  const double total = last - floors.front().bytes;
  without_event(width_, floors, means);
  const std::span<const Point> all(floors);
  const std::size_t half = all.size() / 2;
  const Slope slope = theil_sen(all);
  const double first = theil_sen(all.first(half + 1)).median;
  const double second = theil_sen(all.subspan(half)).median;
  const double warm_up = as_double(judged.front().floor - windows.front().floor);
  Judged result{.course = Course::kPlateau,
                .slope = theil_sen(means).median,
                .slope_lower = slope.lower,
                .grown_bytes = static_cast<std::int64_t>(total)};
  const double most = kOneStep * std::max(total, 1.0);
  const bool rises = slope.lower > kLeastSlope;
  const bool halves = rises && first > kLeastSlope;
  if (rises && largest_fall >= std::max(total, 1.0)) {
    result.course = Course::kSawtooth;  // Of longer teeth than a window.
  } else if (halves && (second < kSecondHalf * first || fades(means))) {
    result.course = Course::kSaturating;
    result.bound_bytes =
        bound_of(all[half].bytes - all.front().bytes, all.back().bytes - all[half].bytes, last);
  } else if (halves && second > kLeastSlope && largest_window < most) {
    const std::size_t wanted = windows_for(result.slope);
    const bool sure = judged.size() >= wanted && !stands_still(all, slope.median);
    result.course = sure ? Course::kLeak : Course::kTooShort;
    result.windows_wanted = sure ? 0 : with_warm_up(std::max(wanted, judged.size() + 1));
  } else if (largest_step >= most && total > kStepUnits * kLeastSlope * width_) {
    result.course = Course::kStep;
  } else if (warm_up > kWarmUpBytes) {
    result.course = Course::kWarmUp;
    result.grown_bytes = static_cast<std::int64_t>(warm_up);
  } else {
    const auto middle = swings.begin() + static_cast<std::ptrdiff_t>(swings.size() / 2);
    std::ranges::nth_element(swings, middle);
    if (as_double(*middle) > kSawtoothBytes) {
      result.course = Course::kSawtooth;
    }
  }
  return result;
}

}  // namespace plimsoll
