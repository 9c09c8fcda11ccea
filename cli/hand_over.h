// SPDX-License-Identifier: Apache-2.0
//
// Some recipes and imports are in Python alone. The program that a build makes hands such a command
// over to the Python that has the package.
//
// Reading order: this file, hand_over.cpp, main.cpp.
//
// Threads: from the main thread, before there are others.   Memory: a few strings.
#pragma once

namespace plimsoll {

/// Becomes `python -m plimsoll argv[1] …` where these words name a recipe, an import or a run that
/// this program does not know, or ask for a list of recipes. Returns where they do not, and where
/// no Python has the package: the program then says what to install.
///
/// The package is the one that was built beside this program, or else one that is installed for
/// `python3` or `python`. Requires: the recipes of this program are added (add_recipes()).
void hand_over(int argc, char** argv);

}  // namespace plimsoll
