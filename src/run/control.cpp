// SPDX-License-Identifier: Apache-2.0
#include "run/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "os/file.h"
#include "run/run_folder.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::array kSignals{SIGINT, SIGTERM, SIGUSR1};
constexpr int kInterruptedStatus = 128 + SIGINT;
constexpr int kPauseTickMs = 500;

// Signals belong to the process, so their flag must too. Written by the handler, read by the
// trainer; lock-free atomics are the only state a handler may touch.
std::atomic<int> requested_signal{0};
std::atomic<int> installed{0};
std::array<struct sigaction, kSignals.size()> old_actions;
// Of the StopSignals that is there; of the thread that trains.
RunControl* run_in_progress = nullptr;
constexpr const char* kGivenUp = "nothing of it is kept; the same command begins it again";
static_assert(std::atomic<int>::is_always_lock_free);

void on_signal(int number) {
  const int before = requested_signal.exchange(number);
  if (number == SIGINT && before == SIGINT) {
    constexpr std::string_view kMessage =
        "\nplimsoll: ended at once by a second Ctrl-C; the last commit can be resumed\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
    ::_exit(kInterruptedStatus);
  }
}

const char* signal_name(int number) {
  switch (number) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "";
  }
}

bool present(const fs::path& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

Result<void> touch(const fs::path& path) {
  PLIMSOLL_TRY(const int file, open_descriptor(path, O_WRONLY | O_CREAT));
  ::close(file);
  return {};
}

Result<void> untouch(const fs::path& path) {
  std::error_code failed;
  fs::remove(path, failed);
  if (failed) {
    return fail_io(failed.value(), path.string());
  }
  return {};
}

/// True when a process trains in `run`.
Result<bool> someone_trains(const fs::path& run) {
  PLIMSOLL_TRY(const RunView view, RunFolder::view(run));
  return view.alive;
}

}  // namespace

StopSignals::StopSignals(RunControl* run, bool keeps) {
  PLIMSOLL_CHECK(installed.exchange(1) == 0, "one StopSignals at a time");
  run_in_progress = run;
  if (!keeps) {
    requested_signal.store(0);
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // Reads and writes in progress go on; the step ends first.
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &old_actions[i]);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &old_actions[i], nullptr);
  }
  run_in_progress = nullptr;
  installed.store(0);
}

bool StopSignals::there() noexcept {
  return installed.load() != 0;
}

int StopSignals::requested() noexcept {
  return requested_signal.load();
}

void StopSignals::clear() noexcept {
  requested_signal.store(0);
}

bool StopSignals::asked() noexcept {
  const bool stop = run_in_progress != nullptr && run_in_progress->poll() == Request::kStop;
  return installed.load() != 0 && (requested() != 0 || stop);
}

void StopSignals::pass_on() noexcept {
  if (const int number = requested_signal.exchange(0); number != 0) {
    ::raise(number);
  }
}

tl::unexpected<Error> given_up(const char* what) {
  return fail(ErrorCode::kInvalidArgument, fmt::format("{} was given up, as asked", what),
              kGivenUp);
}

bool was_given_up(const Error& error) noexcept {
  return error.advice == kGivenUp;
}

RunControl::RunControl(const fs::path& run) : stop_(run / ".stop"), pause_(run / ".pause") {}

Request RunControl::poll() noexcept {
  if (const int number = StopSignals::requested(); number != 0) {
    reason_ = signal_name(number);
    return Request::kStop;
  }
  if (present(stop_)) {
    reason_ = ".stop";
    return Request::kStop;
  }
  return present(pause_) ? Request::kPause : Request::kNone;
}

Request RunControl::wait_while_paused(const std::function<void()>& tick) {
  Request request = poll();
  while (request == Request::kPause) {
    tick();
    // A signal ends the wait early. The file is looked for, not watched: on a network file system
    // nobody would tell us.
    ::poll(nullptr, 0, kPauseTickMs);
    request = poll();
  }
  return request;
}

Result<bool> ask_to_stop(const fs::path& run) {
  PLIMSOLL_TRY(const bool alive, someone_trains(run));
  if (alive) {
    PLIMSOLL_TRY_VOID(touch(run / ".stop"));
  }
  return alive;
}

Result<bool> ask_to_pause(const fs::path& run) {
  PLIMSOLL_TRY(const bool alive, someone_trains(run));
  if (alive) {
    PLIMSOLL_TRY_VOID(touch(run / ".pause"));
  }
  return alive;
}

Result<bool> ask_to_continue(const fs::path& run) {
  PLIMSOLL_TRY(const bool alive, someone_trains(run));
  PLIMSOLL_TRY_VOID(untouch(run / ".pause"));
  return alive;
}

}  // namespace plimsoll
