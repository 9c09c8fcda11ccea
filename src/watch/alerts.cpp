// SPDX-License-Identifier: Apache-2.0
#include "watch/alerts.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "os/oom_choice.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kGrowthMost = (4LL << 30) / 1000;  // Bytes a millisecond.
constexpr std::int64_t kLastPart = 64;  // Of the bound: below this the second signal is sent.

double since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string line_of(nlohmann::ordered_json json) {
  std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (text.size() > Alerts::kLineMost) {
    json["text"] = "…";
    json["target"] = "…";
    text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  return text;
}

}  // namespace

const char* level_name(AlertLevel level) noexcept {
  return level == AlertLevel::kCalm ? "calm" : level == AlertLevel::kHigh ? "high" : "act";
}

Alerts::~Alerts() {
  if (child_ > 0) {
    ::kill(-child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
}

AlertLevel Alerts::look(Clock::time_point now, std::int64_t held_bytes, const Room& room,
                        const std::string& who, const Finding& finding) {
  // What came to the bound, though it be from processes that `held_bytes` has not found yet.
  came_bytes_ += room.limit_bytes == room_.limit_bytes ? room_.left_bytes - room.left_bytes
                                                       : held_bytes - held_bytes_;
  const std::int64_t coming = coming_.add(now, came_bytes_);
  soon_bytes_ = soon_.add(now, came_bytes_);
  held_bytes_ = held_bytes;
  room_ = room;
  const auto bound = static_cast<double>(room.limit_bytes);
  const auto left = static_cast<double>(room.left_bytes);
  const auto reserve = static_cast<double>(std::min(options_.reserve_bytes, room.limit_bytes / 2));
  const double act = std::max(kAct * bound, reserve);
  const double high = std::max(kHigh * bound, act);
  const bool passed_soon = 2 * soon_bytes_ > room.left_bytes;
  AlertLevel level =
      left < act || passed_soon ? AlertLevel::kAct
      : left < high ? (static_cast<double>(coming) > left ? AlertLevel::kAct : AlertLevel::kHigh)
                    : AlertLevel::kCalm;
  if (level_ == AlertLevel::kAct && left < act + kBack * bound) {
    level = AlertLevel::kAct;
  } else if (level_ != AlertLevel::kCalm && left < high + kBack * bound) {
    level = std::max(level, AlertLevel::kHigh);
  }
  const std::string owner = finding.course == Course::kLeak ? owner_name(finding.owner) : "";
  const bool leaks = !owner.empty() && owner != leak_;
  leak_ = owner;
  if (level == level_ && !leaks) {
    return level_;
  }
  const std::string word = level != level_ ? level_name(level) : "leak";
  level_ = level;
  const double seconds = room.seconds_left(finding.bytes_per_second);
  Finding each_second = finding;  // A run's is by steps.
  each_second.bytes_per_unit = finding.bytes_per_second;
  nlohmann::ordered_json json{{"time", since_epoch()},
                              {"level", word},
                              {"target", who},
                              {"held_bytes", held_bytes},
                              {"left_bytes", room.left_bytes},
                              {"limit_bytes", room.limit_bytes},
                              {"source", room.source},
                              {"owner", owner},
                              {"bytes_per_second", finding.bytes_per_second},
                              {"seconds_left", seconds < 1e12 ? nlohmann::ordered_json(seconds)
                                                              : nlohmann::ordered_json()}};
  json["text"] =
      fmt::format("{}: {} held, {} left to the {} of {}{}", who, format_bytes(held_bytes),
                  format_bytes(room.left_bytes), room.source, format_bytes(room.limit_bytes),
                  owner.empty() ? "" : "; " + each_second.text("second"));
  raise(now, word, line_of(std::move(json)));
  return level_;
}

void Alerts::say(Clock::time_point now, const std::string& level, const std::string& text) {
  raise(now, level, line_of({{"time", since_epoch()}, {"level", level}, {"text", text}}));
}

void Alerts::raise(Clock::time_point now, const std::string& level, std::string json) {
  append(json);
  if (options_.command.empty() || level == "calm") {
    return;
  }
  const bool urgent = level == level_name(AlertLevel::kAct) || level == "signal";
  const bool often = started_ != Clock::time_point{} && now - started_ < kAgain && !urgent;
  Line line{.level = level, .json = std::move(json)};
  if (child_ > 0 && urgent) {
    waiting_ = std::move(line);
  } else if (!often && child_ <= 0) {
    start(now, std::move(line));
  }
}

void Alerts::append(const std::string& json) {
  if (options_.file.empty()) {
    return;
  }
  struct stat there {};
  if (::stat(options_.file.c_str(), &there) == 0 && S_ISREG(there.st_mode) &&
      there.st_size + std::ssize(json) >= kFileBytes) {
    ::rename(options_.file.c_str(), (options_.file.string() + ".1").c_str());
  }
  constexpr mode_t kMode = 0644;
  const int file = ::open(options_.file.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, kMode);
  const std::string line = json + "\n";
  const bool written = file >= 0 && ::write(file, line.data(), line.size()) == std::ssize(line);
  const int problem = errno;
  if (file >= 0) {
    ::close(file);
  }
  if (!written) {
    wonder(fmt::format("{}: {}", options_.file.string(), std::strerror(problem)));
  }
}

// Once: what is wrong with an alert is no reason to fill a log.
void Alerts::wonder(const std::string& text) {
  if (!wondered_ && options_.tell) {
    options_.tell("an alert is lost: " + text);
  }
  wondered_ = true;
}

void Alerts::start(Clock::time_point now, Line line) {
  started_ = now;
  std::array<int, 2> input{};
  if (::pipe2(input.data(), O_CLOEXEC) != 0) {
    wonder(fmt::format("pipe: {}", std::strerror(errno)));
    return;
  }
  line.json += '\n';  // Fits into the pipe: nobody need read it.
  std::ignore = ::write(input[1], line.json.data(), line.json.size());
  ::close(input[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    ChosenLast::leave_in_child();
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::setenv("PLIMSOLL_ALERT", line.level.c_str(), 1);
    if (::dup2(input[0], STDIN_FILENO) >= 0) {
      ::execl("/bin/sh", "sh", "-c", options_.command.c_str(), static_cast<char*>(nullptr));
    }
    ::_exit(127);
  }
  const int problem = errno;
  ::close(input[0]);
  if (child < 0) {
    wonder(fmt::format("fork: {}", std::strerror(problem)));
    return;
  }
  ::setpgid(child, child);  // Here too: whoever is first.
  child_ = child;
}

void Alerts::poll(Clock::time_point now) {
  if (child_ > 0) {
    if (::waitpid(child_, nullptr, WNOHANG) == child_) {
      reaped(child_);
    } else if (now - started_ > kCommandMost) {
      ::kill(-child_, SIGKILL);
    }
  }
  if (child_ <= 0 && !waiting_.empty()) {
    start(now, std::exchange(waiting_, {}));
  }
}

bool Alerts::reaped(pid_t pid) {
  if (pid != child_ || pid <= 0) {
    return false;
  }
  ::kill(-child_, SIGKILL);  // What it left behind in its group.
  child_ = -1;
  return true;
}

int Alerts::act_signal(Clock::time_point now) {
  if (signals_sent_ >= options_.signals.size() ||
      (signals_sent_ == 0 && level_ != AlertLevel::kAct)) {
    return 0;
  }
  if (signals_sent_ == 0) {
    first_signal_ = now;
  } else if (now - first_signal_ < kGrace && !nearly_gone()) {
    return 0;
  }
  return options_.signals[signals_sent_++];
}

bool Alerts::nearly_gone() const noexcept {
  return room_.limit_bytes > 0 &&
         room_.left_bytes <= std::max(room_.limit_bytes / kLastPart, soon_bytes_);
}

std::chrono::milliseconds Alerts::pause() const noexcept {
  if (options_.signals.empty() || room_.limit_bytes == 0) {
    return kLookMost;
  }
  const std::chrono::milliseconds reached{room_.left_bytes / kGrowthMost};
  return std::clamp(reached, kLookLeast, kLookMost);
}

Result<std::vector<int>> parse_signals(const std::string& text) {
  std::vector<int> found;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::string word = text.substr(begin, end - begin);
    begin = end + 1;
    if (word.starts_with("SIG")) {
      word.erase(0, 3);
    }
    int number = 0;
    const auto [stop, status] = std::from_chars(word.data(), word.data() + word.size(), number);
    const bool is_number = status == std::errc() && stop == word.data() + word.size();
    for (int signal = 1; signal < 32 && !is_number; ++signal) {
      const char* const name = ::sigabbrev_np(signal);
      number = name != nullptr && word == name ? signal : number;
    }
    if (number < 1 || number > 31 || found.size() == 2) {
      return fail(ErrorCode::kInvalidArgument, fmt::format("signals '{}'", text),
                  "one or two names: TERM, or TERM,KILL");
    }
    found.push_back(number);
  }
  return found;
}

std::string signal_text(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : fmt::format("SIG{}", name);
}

}  // namespace plimsoll
