// SPDX-License-Identifier: Apache-2.0
//
// What the commands of the program share: exit statuses, and how an error is printed.
//
// A command adds itself to the parser; its callback stores the exit status in `status`.
//
// Threads: single-owner.   Memory: a few strings.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plimsoll/result.h"
#include "run/progress.h"

namespace CLI {
class App;
}

namespace plimsoll {

struct Recipe;

inline constexpr int kFailedStatus = 1;
inline constexpr int kUsageStatus = 2;
inline constexpr int kMemoryStatus = 3;  ///< Memory ended a run at a commit; resume goes on.
inline constexpr int kNobodyStatus = 4;  ///< No process trains in the run that was asked.

/// Largest whole number that an option may be where nothing else bounds it.
inline constexpr std::int64_t kNumberMost = std::int64_t{1} << 40;

/// Why a command of Python's cannot be done here, and what to do.
inline constexpr const char* kNeedsPython =
    "no Python here has the package plimsoll; `pip install '.[chat,vision,pairs]'` in Plimsoll's "
    "source folder installs it";

/// Prints "plimsoll: error: …" and the advice on standard error; returns `status`.
int report(const Error& error, int status = kFailedStatus);

/// Prints a line on standard output.
void print(const std::string& text);

/// For callbacks that may be told to cancel by Ctrl-C: shows progress, false once asked to stop.
std::function<bool(std::int64_t, std::int64_t)> metered(std::shared_ptr<WorkMeter> meter);

/// Adds --config FILE; its help names the presets of the recipe.
void add_config(CLI::App& command, std::string& config, const Recipe& recipe);

/// Each adds its commands to `app`.
void add_train_commands(CLI::App& app, int& status);   ///< train, plan, resume, eval, export
void add_recipe_commands(CLI::App& app, int& status);  ///< recipes, config
void add_run_commands(CLI::App& app, int& status);     ///< stop, pause, continue, status
void add_guard_commands(CLI::App& app, int& status);   ///< run
void add_queue_command(CLI::App& app);                 ///< queue, which is Python's
void add_watch_commands(CLI::App& app, int& status);   ///< watch
void add_why_commands(CLI::App& app, int& status);     ///< why, report
void add_data_commands(CLI::App& app, int& status);    ///< synth, import, store
/// Whether `import NAME` is done in Python.
[[nodiscard]] bool is_python_import(std::string_view name) noexcept;
void add_import_can(CLI::App& command, int& status);  ///< import can, below `import`
void add_look_commands(CLI::App& app, int& status);   ///< info, limits

}  // namespace plimsoll
