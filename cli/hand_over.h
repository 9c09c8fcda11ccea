// SPDX-License-Identifier: Apache-2.0
//
// Recipes, queues and some imports are in Python. The program that a build makes hands such a
// command over to the Python that has the package.
//
// Reading order: this file, hand_over.cpp, main.cpp.
//
// Threads: from the main thread, before there are others.   Memory: a few strings.
#pragma once

#include <optional>

namespace plimsoll {

/// Becomes `python -m plimsoll argv[1] …` where Python does what these words ask for; nothing
/// otherwise. Where no Python has the package it says what to install, and returns an exit status.
///
/// The package is the one that was built beside this program, or else one that is installed for
/// `python3` or `python`.
std::optional<int> hand_over(int argc, char** argv);

}  // namespace plimsoll
