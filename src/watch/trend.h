// SPDX-License-Identifier: Apache-2.0
//
// Trend: whether what somebody holds grows without an end, by a series of (when, bytes).
//
// When is a step or a second; all below is per unit of it. The series is cut into windows of
// `width` units, and of each its floor is kept, so that what comes and goes within a window does
// not count. When kWindowsMost are full, two neighbours become one, and windows are twice as long.
//
// The rule of a leak, on the floors without the first quarter, which is warm-up: the lower bound of
// Theil and Sen's slope is above kLeastSlope, both halves rise, the second at least 0.3 times as
// fast as the first, no single step explains 0.6 of it, and no fall takes all of it back. A step
// that stands out of the median rate happened once, and is no part of the slopes. A leak that began
// after a plateau is found by the same rule on the newest half, quarter and so on, where they reach
// a new height.
//
// Growth that fades is no leak: a parabola through the means of the windows is bent downwards, by
// more than chance bends one, and rises less at its end than at its beginning. Growth that stands
// still at the end, for longer than it did before, has to show that it goes on. Growth below
// kSoonSlope has to be steady over more windows, as many as it takes to come to as much, but four
// times at most: a cache that fills looks the same for as long as it fills.
//
// How steep it is, Theil and Sen's median says of the windows' means: what is counted in steps (an
// arena of Python's is 1 MiB) lies below its line by half a step everywhere, where floors may lie
// anywhere between.
//
// Threads: single-owner.   Memory: 48 bytes × kWindowsMost (6 KiB); 66 KiB while it is judged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace plimsoll {

enum class Course : std::uint8_t {
  kTooShort,    ///< Not enough windows to say; with a slope where what rises may yet be a leak.
  kPlateau,     ///< It stays where it is.
  kWarmUp,      ///< It rose in the first quarter, and stays there since.
  kSaturating,  ///< It rises ever slower: a cache that fills.
  kStep,        ///< It rose once.
  kSawtooth,    ///< It comes and goes.
  kLeak,        ///< It grows and goes on growing.
  kGarbage,     ///< It grows until the garbage collector runs. Of an owner, not of a series.
  kRetention,   ///< malloc() keeps more and more of what was freed. Of an owner, not of a series.
  kCache        ///< Mapped files grow, which the kernel takes back. Of an owner, not of a series.
};

/// "too short", "plateau", "warm-up", "saturating", "step", "sawtooth", "leak",
/// "uncollected garbage", "retention", "cache".
[[nodiscard]] const char* course_name(Course course) noexcept;

struct Point {
  double at{0};
  double bytes{0};
};

/// Median of the slopes of all pairs of points, with the bounds of its confidence interval of 95 %.
///
/// Source: Theil, "A rank-invariant method of linear and polynomial regression analysis", I (Proc.
///         Kon. Ned. Akad. v. Wetensch. A 53, 1950) for the median; Sen, "Estimates of the
///         regression coefficient based on Kendall's tau" (JASA 63, 1968), section 3 for the
///         bounds, in the normal approximation and without its correction for ties, which would
///         narrow them.
struct Slope {
  double median{0};
  double lower{0};
  double upper{0};
};
/// Requires: two points at least, no two of them at the same place.
[[nodiscard]] Slope theil_sen(std::span<const Point> points);

/// What a series was judged to be.
struct Judged {
  Course course{Course::kTooShort};
  double slope{0};              ///< Bytes a unit; of a leak, of what may be one, while saturating.
  double slope_lower{0};        ///< Its lower bound.
  std::int64_t grown_bytes{0};  ///< From the first floor judged to the last; of a warm-up, before.
  std::int64_t bound_bytes{0};  ///< Saturating: where it is expected to end.
  std::size_t windows_wanted{0};  ///< Too short: windows that have to be over for a verdict.
};

class Trend {
 public:
  static constexpr std::size_t kWindowsMost = 128;
  static constexpr std::size_t kJudgedLeast = 5;  ///< Floors, after the first quarter.
  static constexpr double kLeastSlope = 5000;     ///< Bytes a unit.
  /// Below it, a verdict takes longer: what comes to less than kJudgedLeast windows at this rate.
  static constexpr double kSoonSlope = 100 * 1024;
  static constexpr std::size_t kCutLeast = 2;  ///< Windows of warm-up, at least.
  /// Windows that have to be over for any verdict.
  static constexpr std::size_t kWindowsLeast = kCutLeast + kJudgedLeast;

  Trend() = default;
  /// `width` of a window, in units.
  explicit Trend(double width) : width_(width) {}

  /// Requires: `at` never goes back.
  void add(double at, std::int64_t bytes);

  /// By the windows that are over.
  [[nodiscard]] Judged judge() const;

  /// How fast its newest half rises, four windows at least, where that is a new height, faster than
  /// kLeastSlope and no single step; else 0. By two passes over its windows: long before a verdict.
  [[nodiscard]] double rise() const;

  /// How fast it has risen so far, bytes a unit, by as little as two windows; 0 where it has not.
  [[nodiscard]] double so_far() const;

  /// Windows that are over.
  [[nodiscard]] std::size_t windows() const noexcept {
    return windows_.empty() ? 0 : windows_.size() - 1;
  }
  [[nodiscard]] double width() const noexcept { return width_; }
  /// (where it began, its floor) of each window, the one that is not over included.
  [[nodiscard]] std::vector<Point> floors() const;

 private:
  struct Window {
    std::int64_t number{0};  // It began at origin_ + number × width_.
    std::int64_t floor{0};
    std::int64_t top{0};
    std::int64_t looks{0};
    double at_sum{0};  // Of its looks, from origin_.
    double bytes_sum{0};
    void join(const Window& other) noexcept;
    [[nodiscard]] Point mean() const noexcept;
  };
  void thin();
  [[nodiscard]] Judged judge(std::span<const Window> windows) const;

  double width_{25};
  double origin_{0};
  std::vector<Window> windows_{};  // Ascending; the last is not over yet.
};

}  // namespace plimsoll
