// SPDX-License-Identifier: Apache-2.0
#include "jobs/attempt.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/process_tree.h"
#include "run/json_values.h"

namespace plimsoll {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kEndPause{50};
constexpr milliseconds kKilledMost{5000};  // For the kernel to end what was killed.
constexpr int kCannotStart = 126;

// All of a job's processes, and not its guard, which then ends by itself and tells.
void kill_below(pid_t guard) noexcept {
  const auto below = descendants(guard);
  for (const int pid : below ? *below : std::vector<int>{}) {
    ::kill(pid, SIGKILL);
  }
}

// In the child: becomes what runs the job, when it is told to by a byte of `go`.
[[noreturn]] void become_guard(const Job& job, const JobWork& work, int output, int report, int go,
                               const WaitedSignals& signals, pid_t runner) {
  ::setpgid(0, 0);  // Ctrl-C is the runner's: it hands on what it is told.
  std::signal(SIGXFSZ, SIG_DFL);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const bool ready = nothing >= 0 && ::dup2(nothing, STDIN_FILENO) >= 0 &&
                     ::dup2(output, STDOUT_FILENO) >= 0 && ::dup2(output, STDERR_FILENO) >= 0;
  ::close(output);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  char told = 0;
  if (::getppid() != runner || ::read(go, &told, 1) != 1) {
    ::_exit(kCannotStart);
  }
  ::close(go);
  int status = kCannotStart;
  if (ready && ::chdir(job.directory.c_str()) == 0) {
    signals.restore();
    status = work(job, [&](const std::string& text) {
      std::ignore = ::pwrite(report, text.data(), text.size(), 0);
    });
  } else {
    std::fprintf(stderr, "plimsoll queue: %s: cannot be entered\n", job.directory.c_str());
  }
  std::fflush(stdout);
  ::_exit(status);
}

template <class T>
T member(const nlohmann::ordered_json& report, const char* key, T otherwise) {
  const auto found = report.find(key);
  if (found == report.end()) {
    return otherwise;
  }
  const bool fits = std::is_same_v<T, std::string> ? found->is_string() : found->is_number();
  return fits ? found->template get<T>() : otherwise;
}

}  // namespace

Result<std::unique_ptr<Attempt>> Attempt::start(const Job& job, const JobWork& work,
                                                const std::filesystem::path& log,
                                                const IncidentRules& rules,
                                                const WaitedSignals& signals) {
  PLIMSOLL_TRY(JobLog taker, JobLog::start(log, rules));
  PLIMSOLL_TRY(ProgressNote note, ProgressNote::create());
  const int report = ::memfd_create("plimsoll-report", MFD_CLOEXEC);
  std::unique_ptr<Attempt> attempt(new Attempt(std::move(taker), std::move(note), report));
  if (report < 0) {
    return fail_io(errno, "what becomes of a job");
  }
  std::array<int, 2> go{};
  if (::pipe2(go.data(), O_CLOEXEC) != 0) {
    return fail_io(errno, "a pipe to a job");
  }
  attempt->go_ = go[1];
  std::fflush(nullptr);  // A child must not print again what waits to be printed.
  const pid_t runner = ::getpid();
  attempt->guard_ = ::fork();
  if (attempt->guard_ == 0) {
    ::close(go[1]);
    become_guard(job, work, attempt->log_.input(), report, go[0], signals, runner);
  }
  ::close(go[0]);
  if (attempt->guard_ < 0) {
    return fail_io(errno, "a process for a job");
  }
  attempt->log_.close_input();
  return attempt;
}

void Attempt::go() noexcept {
  std::ignore = ::write(go_, "g", 1);
  ::close(std::exchange(go_, -1));
}

Attempt::~Attempt() {
  if (go_ >= 0) {
    ::close(go_);  // It never began.
  }
  if (guard_ > 0) {
    const auto deadline = Clock::now() + kKilledMost;
    while (::waitpid(guard_, nullptr, WNOHANG) == 0 && Clock::now() < deadline) {
      kill_below(guard_);
      std::this_thread::sleep_for(kEndPause);
    }
    ::kill(guard_, SIGKILL);
  }
  if (report_ >= 0) {
    ::close(report_);
  }
}

void Attempt::ask(milliseconds grace) noexcept {
  if (!deadline_ && guard_ > 0) {
    deadline_ = Clock::now() + grace;
    ::kill(guard_, SIGTERM);
  }
}

std::optional<AttemptEnd> Attempt::look() {
  int status = 0;
  if (::waitpid(guard_, &status, WNOHANG) == guard_) {
    guard_ = -1;
    return end(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }
  if (deadline_ && Clock::now() >= *deadline_) {
    kill_below(guard_);
  }
  return std::nullopt;
}

AttemptEnd Attempt::end(int status) {
  AttemptEnd end;
  end.lines = log_.finish();
  std::string text(kReportBytesMost, '\0');
  const ssize_t got = ::pread(report_, text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  const auto report = json_object(text);
  end.told = !report.empty();
  end.status = member(report, "status", status);
  end.ending = member<std::string>(report, "ending", "");
  end.stopped = end.ending == "stopped";
  end.summary = member<std::string>(report, "summary", "");
  end.seconds = member(report, "seconds", 0.0);
  end.limit_bytes = member<std::int64_t>(report, "limit_bytes", 0);
  end.peak_bytes = member<std::int64_t>(report, "peak_bytes", 0);
  end.stalled_seconds = member(report, "stalled_seconds", 0.0);
  if (const auto advice = report.find("advice"); advice != report.end() && advice->is_array()) {
    for (const auto& line : *advice) {
      if (line.is_string()) {
        end.advice.push_back(line.get<std::string>());
      }
    }
  }
  return end;
}

bool end_leftover(std::int64_t pid, std::int64_t began, milliseconds grace,
                  const std::function<bool()>& wait) {
  const auto guard = static_cast<pid_t>(pid);
  const auto there = [&] { return guard > 0 && process_began(guard) == began; };
  if (!there()) {
    return true;
  }
  ::kill(guard, SIGTERM);
  const auto deadline = Clock::now() + grace;
  while (there() && Clock::now() < deadline + kKilledMost) {
    if (Clock::now() >= deadline) {
      kill_below(guard);
    }
    if (!wait()) {
      return false;
    }
  }
  if (there()) {
    ::kill(guard, SIGKILL);
  }
  return true;
}

}  // namespace plimsoll
