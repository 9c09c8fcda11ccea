// SPDX-License-Identifier: Apache-2.0
#include "cli/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "run/config.h"
#include "run/control.h"
#include "run/path_text.h"

namespace plimsoll {
namespace {

int print_problem = 0;  // The errno of a result that could not be written; the main thread's.

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

/// "unknown option '--epoch'; did you mean --epochs?"
std::string unknown_option(const CLI::App& command, std::string_view word) {
  std::vector<std::string> names;
  for (const CLI::Option* known : command.get_options()) {
    const auto& longs = known->get_lnames();
    names.insert(names.end(), longs.begin(), longs.end());
  }
  const std::string_view name =
      word.starts_with("--") ? word.substr(2, word.find('=') - 2) : std::string_view{};
  const std::string near = nearest_word(name, names);
  return fmt::format("unknown option '{}'{}", word,
                     near.empty() ? "" : fmt::format("; did you mean --{}?", near));
}

/// "unknown command 'cosri'; did you mean cosir?"
std::string unknown_command(const CLI::App& command, std::string_view word) {
  std::vector<std::string> names;
  for (const CLI::App* known : command.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(known->get_name());
  }
  const std::string near = nearest_word(word, names);
  return fmt::format("unknown command '{}'{}", word,
                     near.empty() ? fmt::format("; there are {}", fmt::join(names, ", "))
                                  : fmt::format("; did you mean {}?", near));
}

/// What is said of the first word that nobody took: the words behind it follow from it.
std::string blame(const CLI::App& command, std::string_view word) {
  if (word.starts_with('-')) {
    return unknown_option(command, word);
  }
  const bool has_commands = !command.get_subcommands([](const CLI::App*) { return true; }).empty();
  return has_commands ? unknown_command(command, word)
                      : fmt::format("'{}' is one word too many", word);
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
  auto extras = app.remaining(true);
  std::erase(extras, "--");  // Parts options from words, and says nothing by itself.
  if (!extras.empty()) {
    text = blame(*deepest, extras.front());
  }
  std::fprintf(stderr, "plimsoll: error: %s\n  see `%s --help`\n", text.c_str(), name.c_str());
  return kUsageStatus;
}

/// Paths become part of TOML and JSON files, which are UTF-8. What `run` starts may be told
/// anything.
int check_words(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[1]) != "run"; ++i) {
    if (!is_path_text(argv[i])) {
      return report(
          make_error(ErrorCode::kInvalidArgument,
                     fmt::format("word {} of the command, '{}', is not UTF-8", i, argv[i]),
                     "rename the file or folder: run.toml and the like are UTF-8"),
          kUsageStatus);
    }
  }
  return 0;
}

/// A result that nobody can read is a failure.
int after_printing(int status) {
  if (std::fflush(stdout) != 0) {
    print_problem = errno;
  }
  if (print_problem == 0 && std::ferror(stdout) == 0) {
    return status;
  }
  std::clearerr(stdout);
  const int said = report(make_error(
      ErrorCode::kIo,
      fmt::format("standard output: the result could not be written{}",
                  print_problem == 0 ? "" : fmt::format(": {}", std::strerror(print_problem))),
      "what the command made is there; only its report is lost"));
  return status == 0 ? said : status;
}

/// Behind an error that names no cause: what is known to lead to it.
std::string address_space_note() {
  const std::int64_t limit = address_limit_bytes();
  if (limit == INT64_MAX) {
    return "";
  }
  return fmt::format(
      "\n  the address space is limited to {} (ulimit -v or -d), and code, threads and torch need "
      "more: lift that limit, and bound memory by --memory-limit",
      format_bytes(limit));
}

int parse_and_run(int argc, char** argv) {
  int status = 0;
  CLI::App app{"Trains within a stated memory limit.", "plimsoll"};
  app.set_version_flag("--version", fmt::format("plimsoll {}", PLIMSOLL_VERSION));
  app.require_subcommand(1);
  add_train_commands(app, status);
  add_recipe_commands(app, status);
  add_run_commands(app, status);
  add_guard_commands(app, status);
  add_queue_command(app);
  add_watch_commands(app, status);
  add_why_commands(app, status);
  add_data_commands(app, status);
  add_look_commands(app, status);
  app.footer(kExamples);  // Now, as a command made later would begin with the same.
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
  // In one call: under `python -u` and torchrun each call is a write, among those of other ranks.
  const std::string line = text.ends_with('\n') ? text : text + '\n';
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size() || std::fflush(stdout) != 0) {
    print_problem = errno;
  }
}

std::function<bool(std::int64_t, std::int64_t)> metered(std::shared_ptr<WorkMeter> meter) {
  return [meter = std::move(meter)](std::int64_t done, std::int64_t total) {
    meter->update(done, total);
    return StopSignals::requested() == 0;
  };
}

bool open_standard_streams() noexcept {
  int opened = 0;
  do {
    opened = ::open("/dev/null", O_RDWR);
  } while (opened >= 0 && opened <= STDERR_FILENO);
  if (opened >= 0) {
    ::close(opened);
  }
  return opened >= 0;
}

int run_program(int argc, char** argv) {
  if (!open_standard_streams()) {
    return kFailedStatus;  // There is nowhere to say so.
  }
  print_problem = 0;
  fix_kernels();
  try {
    if (const int wrong = check_words(argc, argv); wrong != 0) {
      return wrong;
    }
    return after_printing(parse_and_run(argc, argv));
  } catch (const Exception& error) {
    return report(error.error());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "plimsoll: error: %s%s\n", error.what(), address_space_note().c_str());
    return kFailedStatus;
  }
}

}  // namespace plimsoll
