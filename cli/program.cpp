// SPDX-License-Identifier: Apache-2.0
#include "cli/program.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "recipes/config.h"
#include "recipes/control.h"

namespace plimsoll {
namespace {

constexpr const char* kExamples = R"(
Examples:
  plimsoll synth cosir --rows 100000 --out data/
  plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB --epochs 1
  plimsoll status run/            from another shell
  plimsoll stop run/              ends it at the next step, with a checkpoint
  plimsoll resume run/            goes on to the same bits
`plimsoll COMMAND --help` has more. Exit status:
  0  done, or stopped when asked        3  memory ended the run at a commit; `resume` goes on
  1  failed                             4  `stop`, `pause`, `continue`, `limit`: no process trains
  2  wrong usage                           there)";

/// MKL picks its kernels by the address of the data unless told otherwise; see docs/HACKING.md.
void fix_kernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const char* branch = __builtin_cpu_supports("avx2") != 0 ? "AVX2,STRICT" : "COMPATIBLE";
#else
  const char* branch = "COMPATIBLE";
#endif
  ::setenv("MKL_CBWR", branch, 0);
}

/// "--epoch" → "; did you mean --epochs?", of the options that `command` has; "" when none is near.
std::string suggestion(const CLI::App& command, std::string_view option) {
  if (!option.starts_with("--")) {
    return "";
  }
  std::vector<std::string> names;
  for (const CLI::Option* known : command.get_options()) {
    const auto& longs = known->get_lnames();
    names.insert(names.end(), longs.begin(), longs.end());
  }
  const std::string near = nearest_word(option.substr(2, option.find('=') - 2), names);
  return near.empty() ? "" : fmt::format("; did you mean --{}?", near);
}

int report_usage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* deepest = &app;
  std::string name = "plimsoll";
  for (bool deeper = true; deeper;) {
    const auto chosen = deepest->get_subcommands();
    deeper = !chosen.empty();
    if (deeper) {
      deepest = chosen.back();
      name += " " + deepest->get_name();
    }
  }
  std::string text = error.what();
  if (const auto extras = app.remaining(true); !extras.empty()) {
    // An unknown option explains the words beside it better than they do themselves.
    const auto option = std::find_if(extras.begin(), extras.end(),
                                     [](const std::string& word) { return word.starts_with('-'); });
    const std::string& first = option == extras.end() ? extras.front() : *option;
    text = fmt::format("'{}' is no option or command here{}", first, suggestion(*deepest, first));
  }
  std::fprintf(stderr, "plimsoll: error: %s\n  see `%s --help`\n", text.c_str(), name.c_str());
  return kUsageStatus;
}

int parse_and_run(int argc, char** argv) {
  int status = 0;
  CLI::App app{"Trains within a stated memory limit.", "plimsoll"};
  app.footer(kExamples);
  app.set_version_flag("--version", fmt::format("plimsoll {}", PLIMSOLL_VERSION));
  app.require_subcommand(1);
  add_train_commands(app, status);
  add_run_commands(app, status);
  add_guard_commands(app, status);
  add_data_commands(app, status);
  add_look_commands(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version.
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return report_usage(app, error);
  }
  return status;
}

}  // namespace

int report(const Error& error, int status) {
  if (error.detail == nullptr) {
    std::fprintf(stderr, "plimsoll: error: %s\n", error.to_string().c_str());
    return status;
  }
  std::fprintf(stderr, "plimsoll: error: %s\n", error.detail->c_str());
  if (*error.advice != '\0') {
    std::fprintf(stderr, "  %s\n", error.advice);
  }
  return status;
}

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (!text.ends_with('\n')) {
    std::fputc('\n', stdout);
  }
  std::fflush(stdout);
}

std::function<bool(std::int64_t, std::int64_t)> metered(std::shared_ptr<WorkMeter> meter) {
  return [meter = std::move(meter)](std::int64_t done, std::int64_t total) {
    meter->update(done, total);
    return StopSignals::requested() == 0;
  };
}

int run_program(int argc, char** argv) {
  fix_kernels();
  try {
    return parse_and_run(argc, argv);
  } catch (const Exception& error) {
    return report(error.error());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plimsoll: error: %s\n", error.what());
    return kFailedStatus;
  }
}

}  // namespace plimsoll
