// SPDX-License-Identifier: Apache-2.0
//
// Keys of `can-kd` that are no field of CanKdConfig: presets, and the original's spellings.
//
// Each one comes down to fields or is accepted with a note that says why it means nothing here, so
// that a command line or a configuration file of the original works as it is.
// Reading order: run/config.h (Shorthand, IgnoredKey, KeyGroup), config.h, this file.
//
// Threads: constants.   Memory: none of its own.
#pragma once

#include <span>

#include "run/config.h"

namespace plimsoll::can_kd {

[[nodiscard]] std::span<const Shorthand> shorthands() noexcept;
[[nodiscard]] std::span<const IgnoredKey> ignored_keys() noexcept;

/// The original's nested configuration: {"vgae": {"heads": 4}, "training": {"lr": 0.002}}.
[[nodiscard]] std::span<const KeyGroup> key_groups() noexcept;

}  // namespace plimsoll::can_kd
