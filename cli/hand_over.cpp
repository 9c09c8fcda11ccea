// SPDX-License-Identifier: Apache-2.0
#include "cli/hand_over.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Words = std::span<char* const>;

// Status 0 where this Python can import the package, and the package can be started with -m.
constexpr const char* kProbe =
    "import importlib.util, sys; sys.exit(importlib.util.find_spec('plimsoll.__main__') is None)";

/// Whether one of these words is a file of torch.save, or says that the files are.
bool names_saved(Words words) {
  return std::ranges::any_of(words, [](std::string_view word) {
    return word.ends_with(".pt") || word == "pt" || word == "--format=pt";
  });
}

/// Whether the package in Python does what these words ask for.
bool is_pythons(Words words) {
  static constexpr std::array<std::string_view, 8> kCommands{
      "train", "plan", "resume", "eval", "export", "recipes", "config", "queue"};
  if (words.size() > 1 && words[0] == std::string_view("import")) {
    return is_python_import(words[1]) ||
           (words[1] == std::string_view("can") && names_saved(words.subspan(2)));
  }
  if (words.size() > 1 && words[0] == std::string_view("store")) {
    return words[1] == std::string_view("import") && names_saved(words.subspan(2));
  }
  return std::ranges::find(kCommands, words[0]) != kCommands.end();
}

/// An error where a bound (ulimit) is below what Python and torch take before either could say so.
std::optional<Error> address_space_missing() {
  struct Least {
    __rlimit_resource_t which;
    std::int64_t bytes;
  };
  for (const auto& [which, bytes] : {Least{RLIMIT_AS, 1 << 30}, Least{RLIMIT_DATA, 1 << 28}}) {
    rlimit bound{};
    if (::getrlimit(which, &bound) == 0 && bound.rlim_cur < static_cast<rlim_t>(bytes)) {
      return make_error(
          ErrorCode::kInvalidArgument,
          fmt::format("no memory: the address space is limited to {} (ulimit -v or -d), and Python "
                      "and torch take more than {}",
                      format_bytes(static_cast<std::int64_t>(bound.rlim_cur)), format_bytes(bytes)),
          "lift that limit (ulimit -v unlimited, ulimit -d unlimited), and bound memory by "
          "--memory-limit");
    }
  }
  return std::nullopt;
}

/// Whether `python` can start the package, with the environment as it is.
bool has_package(const std::string& python) {
  posix_spawn_file_actions_t quiet;
  if (::posix_spawn_file_actions_init(&quiet) != 0) {
    return false;
  }
  std::string name = python;
  std::string flag = "-c";
  std::string probe = kProbe;
  const std::array<char*, 4> words{name.data(), flag.data(), probe.data(), nullptr};
  pid_t child = -1;
  const bool started =
      ::posix_spawn_file_actions_addopen(&quiet, STDOUT_FILENO, "/dev/null", O_WRONLY, 0) == 0 &&
      ::posix_spawn_file_actions_adddup2(&quiet, STDOUT_FILENO, STDERR_FILENO) == 0 &&
      ::posix_spawnp(&child, name.c_str(), &quiet, nullptr, words.data(), environ) == 0;
  ::posix_spawn_file_actions_destroy(&quiet);
  int status = 0;
  return started && ::waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

/// Folder of the package that was built beside this program; "" where none was.
std::string package_beside() {
  std::error_code failed;
  const fs::path program = fs::read_symlink("/proc/self/exe", failed);
  const fs::path folder = program.parent_path().parent_path() / "python";
  return !failed && fs::exists(folder / "plimsoll" / "__init__.py", failed) ? folder.string() : "";
}

/// Keeps what find_python() is about to change: the jobs of a queue find the environment as it was
/// (python/plimsoll/cli/_queue_start.py).
void keep_environment() {
  for (const char* name : {"PYTHONPATH", "PYTHONSAFEPATH"}) {
    const char* before = std::getenv(name);
    ::setenv(fmt::format("PLIMSOLL_{}", name).c_str(), before == nullptr ? "" : before, 1);
  }
}

/// A Python that has the package, with PYTHONPATH set for it; "" where none has.
std::string find_python() {
  // The folder in which the command is typed may hold a module of any name.
  ::setenv("PYTHONSAFEPATH", "1", 0);
  if (const std::string beside = package_beside(); !beside.empty()) {
    const char* before = std::getenv("PYTHONPATH");
    const std::string kept = before == nullptr ? "" : before;
    ::setenv("PYTHONPATH", (kept.empty() ? beside : beside + ":" + kept).c_str(), 1);
    for (const char* python : {PLIMSOLL_BUILT_FOR_PYTHON, "python3", "python"}) {
      if (has_package(python)) {
        return python;
      }
    }
    kept.empty() ? ::unsetenv("PYTHONPATH") : ::setenv("PYTHONPATH", kept.c_str(), 1);
  }
  for (const char* python : {"python3", "python", PLIMSOLL_BUILT_FOR_PYTHON}) {
    if (has_package(python)) {
      return python;
    }
  }
  return "";
}

}  // namespace

std::optional<int> hand_over(int argc, char** argv) {
  const Words words(argv + 1, static_cast<std::size_t>(argc < 2 ? 0 : argc - 1));
  if (words.empty() || !is_pythons(words)) {
    return std::nullopt;
  }
  if (words[0] == std::string_view("queue")) {
    keep_environment();
  } else if (const auto missing = address_space_missing()) {
    return report(*missing);
  }
  std::string python = find_python();
  if (python.empty()) {
    const bool two =
        words[0] == std::string_view("import") || words[0] == std::string_view("store");
    return report(
        make_error(ErrorCode::kInvalidArgument,
                   fmt::format("{} is done in Python", fmt::join(words.first(two ? 2 : 1), " ")),
                   kNeedsPython));
  }
  std::string flag = "-m";
  std::string package = "plimsoll";
  std::vector<char*> all{python.data(), flag.data(), package.data()};
  all.insert(all.end(), words.begin(), words.end());
  all.push_back(nullptr);
  ::execvp(python.c_str(), all.data());
  return report(make_error(ErrorCode::kIo, fmt::format("{}: it could not be started: {}", python,
                                                       std::strerror(errno))));
}

}  // namespace plimsoll
