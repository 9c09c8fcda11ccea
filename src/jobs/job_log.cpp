// SPDX-License-Identifier: Apache-2.0
#include "jobs/job_log.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/utf8.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr std::size_t kReadBytes = 64 << 10;
constexpr milliseconds kFinishMost{5000};
constexpr milliseconds kFinishPause{10};

// What happens in the process: until all writers are gone.
class Taker {
 public:
  Taker(fs::path path, const IncidentRules& rules, int found)
      : path_(std::move(path)), rules_(rules), found_(found), lines_(rules.all().size()) {
    line_.reserve(JobLog::kLineBytesMost);
    begin_file();
  }

  void run(int input) {
    std::vector<char> buffer(kReadBytes);
    for (;;) {
      const ssize_t got = ::read(input, buffer.data(), buffer.size());
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got <= 0) {
        break;
      }
      const std::string_view part(buffer.data(), static_cast<std::size_t>(got));
      keep(part);
      look(part);
    }
    end_line();
    tell();
  }

 private:
  void begin_file() {
    if (file_ >= 0) {
      ::close(file_);
    }
    ::rename(path_.c_str(), (path_.string() + ".old").c_str());
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    bytes_ = 0;
  }

  void keep(std::string_view part) {
    if (bytes_ + std::ssize(part) > JobLog::kBytesMost) {
      begin_file();
    }
    bytes_ += std::ssize(part);
    while (!part.empty()) {
      const ssize_t written = ::write(file_, part.data(), part.size());
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        return;  // A full disk: these lines are lost.
      }
      part.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  void look(std::string_view part) {
    while (!part.empty()) {
      const std::size_t end = part.find_first_of("\n\r");  // A bar begins its line anew.
      const std::string_view words = part.substr(0, end);
      line_.append(words.substr(0, JobLog::kLineBytesMost - line_.size()));
      if (end == std::string_view::npos) {
        return;
      }
      end_line();
      number_ += part[end] == '\n' ? 1 : 0;
      part.remove_prefix(end + 1);
    }
  }

  void end_line() {
    for (char& one : line_) {
      one = one == '\0' ? ' ' : one;
    }
    for (std::size_t at = 0; at < lines_.size() && !line_.empty(); ++at) {
      if (lines_[at].empty() && rules_.all()[at].matches_line(line_)) {
        lines_[at] =
            fmt::format("line {}: {}", number_, line_.substr(0, JobLog::kEvidenceBytesMost));
      }
    }
    line_.clear();
  }

  void tell() const {
    std::string text;
    for (const std::string& line : lines_) {
      text += line + "\n";
    }
    std::ignore = ::pwrite(found_, text.data(), text.size(), 0);
  }

  const fs::path path_;
  const IncidentRules& rules_;
  const int found_;
  int file_{-1};
  std::int64_t bytes_{0};
  std::int64_t number_{1};
  std::string line_{};
  std::vector<std::string> lines_;
};

}  // namespace

Result<JobLog> JobLog::start(const fs::path& path, const IncidentRules& rules) {
  JobLog log;
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) {
    return fail_io(errno, "a pipe for what a job prints");
  }
  log.input_ = pipe[1];
  log.rules_ = rules.all().size();
  log.found_ = ::memfd_create("plimsoll-incidents", MFD_CLOEXEC);
  log.process_ = ::fork();
  if (log.process_ == 0) {
    for (const int one : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) {
      std::signal(one, SIG_IGN);  // It ends with the last who writes.
    }
    ::setpgid(0, 0);
    ::close(pipe[1]);
    // Who reads what the runner says must not wait for this one, too.
    if (const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC); nothing >= 0) {
      for (const int one : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        ::dup2(nothing, one);
      }
    }
    Taker(path, rules, log.found_).run(pipe[0]);
    ::_exit(0);
  }
  const int problem = errno;
  ::close(pipe[0]);
  if (log.process_ < 0 || log.found_ < 0) {
    return fail_io(problem, "a process that takes what a job prints");
  }
  return log;
}

JobLog::JobLog(JobLog&& other) noexcept
    : process_(std::exchange(other.process_, -1)),
      input_(std::exchange(other.input_, -1)),
      found_(std::exchange(other.found_, -1)),
      rules_(other.rules_) {}

JobLog::~JobLog() {
  close_input();
  if (process_ > 0) {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  if (found_ >= 0) {
    ::close(found_);
  }
}

void JobLog::close_input() noexcept {
  if (input_ >= 0) {
    ::close(std::exchange(input_, -1));
  }
}

std::vector<std::string> JobLog::finish() {
  close_input();
  const auto deadline = std::chrono::steady_clock::now() + kFinishMost;
  while (process_ > 0) {
    const pid_t done = ::waitpid(process_, nullptr, WNOHANG);
    if (done != 0) {
      process_ = -1;
    } else if (std::chrono::steady_clock::now() >= deadline) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, nullptr, 0);
      process_ = -1;
    } else {
      std::this_thread::sleep_for(kFinishPause);
    }
  }
  std::vector<std::string> lines(rules_);
  std::string text((rules_ + 1) * (JobLog::kEvidenceBytesMost + 64), '\0');
  const ssize_t got = ::pread(found_, text.data(), text.size(), 0);
  std::string_view left(text.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  for (std::string& line : lines) {
    const std::size_t end = left.find('\n');
    line = left.substr(0, end);
    left.remove_prefix(end == std::string_view::npos ? left.size() : end + 1);
  }
  return lines;
}

}  // namespace plimsoll
