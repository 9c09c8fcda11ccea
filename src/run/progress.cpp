// SPDX-License-Identifier: Apache-2.0
#include "run/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>

#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr int kColumnsLeast = 20;
constexpr int kColumnsMost = 500;
constexpr int kColumnsPlain = 80;
constexpr int kBarWidth = 20;
constexpr const char* kEraseLine = "\033[2K";
constexpr std::array<char, kTagCount> kOwnerLetters{'t', 'r', 'f', 'l', 'p', 'w', 'x', 'o'};
static_assert(kOwnerLetters.back() != '\0', "a tag without a letter");

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int terminal_columns(std::FILE* stream, int wanted) {
  int columns = wanted;
  if (columns <= 0) {
    winsize size{};
    columns = ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col
                                                                                   : kColumnsPlain;
  }
  return std::clamp(columns, kColumnsLeast, kColumnsMost);
}

bool is_live(const ProgressOptions& options) {
  return options.terminal < 0 ? ::isatty(::fileno(options.stream)) == 1 : options.terminal == 1;
}

/// "[======>             ]"
std::string bar(double fraction) {
  const double part = std::isfinite(fraction) ? std::clamp(fraction, 0.0, 1.0) : 0.0;
  const auto filled = static_cast<std::size_t>(part * kBarWidth);
  std::string text(kBarWidth, ' ');
  std::fill_n(text.begin(), filled, '=');
  if (filled < text.size()) {
    text[filled] = '>';
  }
  return fmt::format("[{}]", text);
}

/// The limit as a bar: a letter per owner of leased bytes, '#' for other resident bytes, '.' free.
std::string memory_bar(const RunStatus& status) {
  const auto cells = [&](std::int64_t bytes) {
    return status.limit_bytes <= 0
               ? std::size_t{0}
               : static_cast<std::size_t>(std::llround(static_cast<double>(bytes) * kBarWidth /
                                                       static_cast<double>(status.limit_bytes)));
  };
  std::string text;
  for (std::size_t tag = 0; tag < kOwnerLetters.size(); ++tag) {
    text.append(cells(status.leased_by_tag[tag]), kOwnerLetters[tag]);
  }
  if (const auto resident = cells(status.resident_bytes); text.size() < resident) {
    text.append(resident - text.size(), '#');
  }
  text.resize(kBarWidth, '.');
  return fmt::format("[{}]", text);
}

void cut(std::string& line, int columns) {
  if (line.size() > static_cast<std::size_t>(columns)) {
    line.resize(static_cast<std::size_t>(columns));
  }
}

/// "  02:10 left"; "" where it is not known.
std::string left_text(const RunStatus& status, const char* gap) {
  return std::isnan(status.seconds_left)
             ? ""
             : fmt::format("{}{} left", gap, format_duration(status.seconds_left));
}

std::string owners(const RunStatus& status) {
  std::string text;
  for (int tag = 0; tag < kTagCount; ++tag) {
    if (const auto held = status.leased_by_tag[static_cast<std::size_t>(tag)]; held > 0) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", tag_name(static_cast<Tag>(tag)),
                          format_bytes(held));
    }
  }
  return text;
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) {
    return "--:--";
  }
  const auto whole = static_cast<std::int64_t>(std::llround(std::min(seconds, 1e12)));
  const auto minutes = whole / 60;
  const auto hours = minutes / 60;
  if (hours >= 24) {
    return fmt::format("{} d {:02} h", hours / 24, hours % 24);
  }
  if (hours > 0) {
    return fmt::format("{}:{:02}:{:02}", hours, minutes % 60, whole % 60);
  }
  return fmt::format("{:02}:{:02}", minutes, whole % 60);
}

std::string format_count(std::int64_t n) {
  std::string text = fmt::format("{}", n);
  const std::size_t first = n < 0 ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) {
    at -= 3;
    text.insert(at, 1, ',');
  }
  return text;
}

std::string loss_text(double loss) {
  return std::isnan(loss) ? "-" : fmt::format("{:.4f}", loss);
}

std::string draw_progress(const RunStatus& status, double epoch_fraction, int columns) {
  std::string steps = "before the first step";
  if (status.steps_total != 0) {
    const bool known = status.steps_total > 0;
    steps = fmt::format("epoch {}/{}{} step {}{}  loss {}  {} rows/s",
                        std::min(status.epoch + 1, status.epochs), status.epochs,
                        known ? " " + bar(epoch_fraction) : "", format_count(status.step),
                        known ? "/" + format_count(status.steps_total) : "", loss_text(status.loss),
                        format_count(static_cast<std::int64_t>(status.rows_per_second)));
    steps += left_text(status, "  ");
  }
  if (status.status != "running") {
    steps += "  (" + status.status + ")";
  }
  std::string memory = fmt::format("memory    {} resident {} of {}  {}", memory_bar(status),
                                   format_bytes(status.resident_bytes),
                                   format_bytes(status.limit_bytes), owners(status));
  cut(steps, columns);
  cut(memory, columns);
  return steps + "\n" + memory;
}

std::string plain_progress(const RunStatus& status) {
  const auto memory =
      fmt::format("{} leased, {} resident of {}", format_bytes(status.leased_bytes),
                  format_bytes(status.resident_bytes), format_bytes(status.limit_bytes));
  if (status.steps_total == 0) {  // Before the first step.
    return fmt::format("{}, {}", status.status, memory);
  }
  return fmt::format("{} epoch {}/{} step {}{} loss {} {} rows/s{}, {}", status.status,
                     std::min(status.epoch + 1, status.epochs), status.epochs, status.step,
                     status.steps_total > 0 ? fmt::format("/{}", status.steps_total) : "",
                     loss_text(status.loss), std::llround(status.rows_per_second),
                     left_text(status, " "), memory);
}

Progress::Progress(const ProgressOptions& options) : options_(options), live_(is_live(options)) {}

Progress::~Progress() {
  if (lines_shown_ > 0) {
    std::fputc('\n', options_.stream);
    std::fflush(options_.stream);
  }
}

void Progress::update(const RunStatus& status, double epoch_fraction, bool force) {
  if (options_.quiet) {
    return;
  }
  const double now = now_seconds();
  const double least = live_ ? options_.live_seconds : options_.plain_seconds;
  if (!force && now - last_seconds_ < least) {
    return;
  }
  last_seconds_ = now;
  if (!live_) {
    buffer_ = plain_progress(status) + "\n";
    std::fwrite(buffer_.data(), 1, buffer_.size(), options_.stream);
    std::fflush(options_.stream);
    return;
  }
  // One column stays free: a full last column would wrap on some terminals.
  const std::string drawn = draw_progress(status, epoch_fraction,
                                          terminal_columns(options_.stream, options_.columns) - 1);
  const auto line_end = drawn.find('\n');
  buffer_.clear();
  if (lines_shown_ > 0) {
    buffer_ += "\r\033[1A";
  }
  fmt::format_to(std::back_inserter(buffer_), "{}{}\n{}{}", kEraseLine, drawn.substr(0, line_end),
                 kEraseLine, drawn.substr(line_end + 1));
  std::fwrite(buffer_.data(), 1, buffer_.size(), options_.stream);
  std::fflush(options_.stream);
  lines_shown_ = 2;
}

void Progress::clear() {
  if (lines_shown_ > 0) {
    std::fprintf(options_.stream, "\r%s\033[1A%s", kEraseLine, kEraseLine);
    std::fflush(options_.stream);
    lines_shown_ = 0;
    last_seconds_ = -1e9;
  }
}

void Progress::text(std::string_view message) {
  clear();
  std::fwrite(message.data(), 1, message.size(), options_.stream);
  if (!message.ends_with('\n')) {
    std::fputc('\n', options_.stream);
  }
  std::fflush(options_.stream);
}

WorkMeter::WorkMeter(std::string label, const ProgressOptions& options)
    : label_(std::move(label)),
      options_(options),
      live_(is_live(options)),
      began_seconds_(now_seconds()),
      last_seconds_(began_seconds_) {}

WorkMeter::~WorkMeter() {
  if (shown_ && live_) {
    std::fputc('\n', options_.stream);
    std::fflush(options_.stream);
  }
}

void WorkMeter::update(std::int64_t done, std::int64_t total) {
  const double now = now_seconds();
  const double least = live_ ? options_.live_seconds : options_.plain_seconds;
  const bool last = done >= total && shown_;
  if (options_.quiet || (now - last_seconds_ < least && !last)) {
    return;
  }
  last_seconds_ = now;
  shown_ = true;
  const double part =
      total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0)
                : 1.0;
  const double left = part > 0 ? (now - began_seconds_) * (1 - part) / part : std::nan("");
  const auto text = fmt::format("{} {} {:3.0f} %  {} left", label_, bar(part),
                                std::floor(100 * part), format_duration(left));
  std::fprintf(options_.stream, live_ ? "\r\033[2K%s" : "%s\n", text.c_str());
  std::fflush(options_.stream);
}

}  // namespace plimsoll
