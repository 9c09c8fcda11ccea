// SPDX-License-Identifier: Apache-2.0
//
// Pictures of memory over time, as SVG: what each owner held, stacked, with the limit and phases.
//
// They stand alone: no script, no style sheet, nothing is loaded. Used by RUN/report.html and, in a
// notebook, by plimsoll.Watch.
//
// Threads: pure functions.   Memory: the text; kColumns columns at most, however many points.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "watch/owners.h"

namespace plimsoll {

/// For HTML and SVG: & < > " ' as entities, control characters as U+FFFD, what is no UTF-8 as its
/// number ("\\xe9").
[[nodiscard]] std::string escape_markup(std::string_view text);

struct PicturePoint {
  double x{0};
  std::array<std::int64_t, kOwnerCount> owners{};  ///< −1: not known apart.
  std::int64_t limit_bytes{0};                     ///< 0: none.
  std::string phase{};                             ///< What went on up to this point.
};

struct PictureMark {
  enum class Kind : std::uint8_t { kCommit, kRefusal, kEviction, kStart, kEnd };
  double x{0};
  Kind kind{Kind::kCommit};
  std::string text{};  ///< Shown under the pointer.
};

enum class PictureUnit : std::uint8_t { kSeconds, kSteps };

/// x ascends. Empty points give a picture that says so.
[[nodiscard]] std::string memory_picture(const std::vector<PicturePoint>& points,
                                         const std::vector<PictureMark>& marks, PictureUnit unit);

/// HTML: the colours of the owners that these points have.
[[nodiscard]] std::string owner_legend(const std::vector<PicturePoint>& points);

/// A line through (x, y), over x from `left` to `right`; what is not finite is left out.
[[nodiscard]] std::string line_picture(const std::string& name,
                                       const std::vector<std::pair<double, double>>& points,
                                       double left, double right, PictureUnit unit);

/// One bar of `limit_bytes`, or of all that is held, parted by owner: who holds how much of it.
[[nodiscard]] std::string bar_picture(const std::array<std::int64_t, kOwnerCount>& owners,
                                      std::int64_t limit_bytes);

/// "#0072B2": an owner's colour in all pictures.
[[nodiscard]] const char* owner_colour(Owner owner) noexcept;

/// Owners that are stacked: all but mapped files and page tables.
[[nodiscard]] bool is_stacked(Owner owner) noexcept;

}  // namespace plimsoll
