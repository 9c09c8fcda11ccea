// SPDX-License-Identifier: Apache-2.0
//
// bin/plimsoll.
//
// Threads, Memory: see cli/program.h.
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <tuple>

#include "cli/hand_over.h"
#include "cli/program.h"
#include "plimsoll/limits.h"

namespace {

// Without room in the address space, a library ends the process before main(), or a thread of one
// later, by an exception that no code of ours can catch.
std::terminate_handler usual_end = nullptr;

[[noreturn]] void say_and_end() noexcept {
  if (plimsoll::address_limit_bytes() == INT64_MAX) {
    usual_end();
    std::abort();
  }
  constexpr std::string_view kText =
      "plimsoll: error: no memory: the address space is limited (ulimit -v or -d)\n"
      "  lift that limit (ulimit -v unlimited, ulimit -d unlimited), and bound memory by "
      "--memory-limit\n";
  std::ignore = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(1);
}

void prepare() noexcept {
  usual_end = std::set_terminate(say_and_end);
}

// Runs before the libraries' own beginnings.
__attribute__((section(".preinit_array"), used)) void (*const kPrepare)() noexcept = prepare;

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "run") {  // What that starts has its own ways.
    // A file that may not grow (ulimit -f) is an error that names it, not the end of the process.
    std::signal(SIGXFSZ, SIG_IGN);
  }
  plimsoll::open_standard_streams();
  if (const auto status = plimsoll::hand_over(argc, argv)) {
    return *status;
  }
  return plimsoll::run_program(argc, argv);
}
