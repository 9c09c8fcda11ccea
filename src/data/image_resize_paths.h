// SPDX-License-Identifier: Apache-2.0
//
// The two ways resize_image() goes across rows, named so that a test can compare them.
//
// Everyone else calls resize_image() (plimsoll/image.h), which picks the faster one there is.
//
// Threads: pure functions.   Memory: resize_scratch_bytes().
#pragma once

#include <cstdint>
#include <span>

#include "plimsoll/image.h"

namespace plimsoll {

/// Whether this CPU has AVX2.
[[nodiscard]] bool resize_has_wide() noexcept;

/// As resize_image(). Requires: resize_has_wide() where `wide`.
Result<void> resize_image_by(bool wide, std::span<const std::uint8_t> pixels, ImageSize from,
                             std::span<std::uint8_t> out, ImageSize to, ImageFilter filter);

}  // namespace plimsoll
