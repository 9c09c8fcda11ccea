// SPDX-License-Identifier: Apache-2.0
//
// The program `plimsoll` as one function, for main() and for Python's console script.
//
// Reading order: program.cpp (commands), then train_commands.cpp, run_commands.cpp,
// data_commands.cpp. Each parses, calls and prints; what it calls is in src/run and src/tables.
//
// Threads: from the main thread, one call at a time.   Memory: that of the command.
#pragma once

namespace plimsoll {

/// Opens standard streams that are closed, so that no file which is opened later becomes one.
bool open_standard_streams() noexcept;

/// Runs `plimsoll argv[1] …` and returns its exit status: 0, 1 (failed) or 2 (wrong usage).
/// Sets MKL_CBWR when it is unset.
int run_program(int argc, char** argv);

}  // namespace plimsoll
