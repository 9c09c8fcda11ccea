// SPDX-License-Identifier: Apache-2.0
#include "run/page.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "os/file.h"
#include "plimsoll/bytes.h"
#include "run/json_values.h"
#include "run/page_events.h"
#include "run/path_text.h"
#include "run/progress.h"
#include "run/why.h"
#include "watch/picture.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

constexpr double kGap = 30;  // Seconds without a look that are drawn as kGapDrawn.
constexpr double kGapDrawn = 2;
constexpr std::size_t kTextMost = 1000;            // Bytes of one text from the run, …
constexpr std::size_t kEnvironmentMost = 300'000;  // … and of all that is said of its environment.

constexpr const char* kStyle = R"(<style>
body{font:15px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff;max-width:980px;
margin:24px auto;padding:0 16px}
h1{font-size:21px;margin:0 0 2px}h2{font-size:16px;margin:26px 0 6px}p{margin:4px 0}
.sub{color:#555;font-size:13px}.end{border-left:6px solid;padding:10px 14px;margin:14px 0;
background:#f6f6f6}.good{border-color:#2a7f3f}.bad{border-color:#c1121f}.mid{border-color:#e07b00}
.end b{font-size:17px}ul{margin:4px 0;padding-left:20px}
table{border-collapse:collapse;font-size:13px;width:100%}
td,th{text-align:left;padding:3px 10px 3px 0;border-bottom:1px solid #e5e5e5;vertical-align:top;
overflow-wrap:anywhere}th{color:#555;font-weight:600}svg{display:block;margin:4px 0}
details{margin-top:8px}summary{cursor:pointer;color:#333}
</style>)";

std::string text_of(std::string_view text) {
  if (text.size() <= kTextMost) {
    return escape_markup(text);
  }
  return escape_markup(cut_text(text, kTextMost)) + " …";
}

std::string when(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  std::tm utc{};
  ::gmtime_r(&whole, &utc);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC", utc.tm_year + 1900, utc.tm_mon + 1,
                     utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec);
}

// "28 November 2026".
std::string day(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  std::tm utc{};
  ::gmtime_r(&whole, &utc);
  constexpr std::array<const char*, 12> kMonths{"January",   "February", "March",    "April",
                                                "May",       "June",     "July",     "August",
                                                "September", "October",  "November", "December"};
  return fmt::format("{} {} {}", utc.tm_mday, kMonths[static_cast<std::size_t>(utc.tm_mon)],
                     utc.tm_year + 1900);
}

// Where the looks are along the picture: in seconds of running, as time between lives is nobody's.
class TimeLine {
 public:
  explicit TimeLine(const std::vector<KeptLook>& looks) {
    double x = 0;
    for (std::size_t at = 0; at < looks.size(); ++at) {
      if (at > 0) {
        const double gap = std::max(looks[at].time - looks[at - 1].time, 0.0);
        const bool other_life = looks[at].life != looks[at - 1].life;
        x += other_life && gap > kGap ? kGapDrawn : gap;
      }
      marks_.emplace_back(looks[at].time, x);
    }
  }
  [[nodiscard]] double at(double time) const {
    if (marks_.empty()) {
      return 0;
    }
    const auto after =
        std::ranges::upper_bound(marks_, time, {}, &std::pair<double, double>::first);
    if (after == marks_.begin()) {
      return after->second;
    }
    const auto& [before_time, before_x] = *std::prev(after);
    const double x = before_x + time - before_time;
    return after == marks_.end() ? before_x + std::min(time - before_time, kGap)
                                 : std::min(x, after->second);
  }
  [[nodiscard]] double x(std::size_t look) const { return marks_[look].second; }
  [[nodiscard]] double end() const { return marks_.empty() ? 1 : marks_.back().second; }

 private:
  std::vector<std::pair<double, double>> marks_{};
};

class Page {
 public:
  Page(const fs::path& root, const Why& why, const PageEvents& events)
      : root_(root), why_(why), events_(events), time_(why.kept.looks) {}

  std::string make() {
    head();
    end_box();
    holders();
    memory();
    devices();
    curves();
    acts();
    advice();
    environment();
    out_ += "</body></html>\n";
    return std::move(out_);
  }

 private:
  void head() {
    const fs::path folder = fs::absolute(root_).lexically_normal();
    const fs::path last =
        folder.has_filename() ? folder.filename() : folder.parent_path().filename();
    std::string title = text_of(last.string());
    if (!why_.kept.looks.empty()) {
      title += " · " + day(why_.kept.looks.front().time);
    }
    title += fmt::format(" · {}", cause_title());
    out_ += fmt::format(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta "
        "http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src "
        "'unsafe-inline'\"><meta name='viewport' content='width=device-width'><title>{0}"
        "</title>{1}</head><body><h1>{0}</h1>",
        title, kStyle);
    std::vector<std::string> parts;
    if (why_.run) {
      if (!why_.run->recipe.empty()) {
        parts.push_back(text_of(why_.run->recipe));
      }
      parts.push_back("step " + why_.run->status.place());
    } else if (!why_.kept.life.command.empty()) {
      parts.push_back(text_of(why_.kept.life.command));
    }
    if (!why_.kept.looks.empty()) {
      parts.push_back(fmt::format("{} to {}", when(why_.kept.looks.front().time),
                                  when(why_.kept.looks.back().time)));
    }
    if (why_.kept.life.number > 1) {
      parts.push_back(fmt::format("started {} times", why_.kept.life.number));
    }
    parts.push_back(text_of(folder.string()));
    out_ += fmt::format("<p class='sub'>{}</p>", fmt::join(parts, " · "));
  }

  [[nodiscard]] const char* cause_title() const {
    switch (why_.cause) {
      case EndCause::kRunning:
        return "It runs";
      case EndCause::kFinished:
        return "Finished";
      case EndCause::kAsked:
        return "Stopped by hand";
      case EndCause::kPressure:
        return "Memory ran short: it stopped itself, with a commit";
      case EndCause::kRefused:
        return "Memory was refused";
      case EndCause::kStopped:
        return "Memory ran short: it was stopped";
      case EndCause::kKilledAtLimit:
      case EndCause::kKilledCgroup:
      case EndCause::kKilledMachine:
        return "Memory ran out: the kernel killed it";
      case EndCause::kKilled:
        return "Killed";
      case EndCause::kDisk:
        return "The disk is full";
      case EndCause::kRestarted:
        return "The machine was restarted";
      case EndCause::kFailed:
        break;
    }
    return "Failed";
  }

  void end_box() {
    const bool good = !why_.incident();
    const char* const colour = good ? "good" : why_.cause == EndCause::kPressure ? "mid" : "bad";
    out_ += fmt::format("<div class='end {}'><b>{}</b><p>{}</p><ul class='sub'>", colour,
                        cause_title(), text_of(why_.summary));
    for (const std::string& line : why_.evidence) {
      out_ += "<li>" + text_of(line) + "</li>";
    }
    out_ += "</ul></div>";
  }

  // The look at which most was held in the newest life: what ran out, and who held it.
  void holders() {
    const auto of_life = [&](const KeptLook& look) { return look.life == why_.kept.life.number; };
    const KeptLook* most = nullptr;
    for (const KeptLook& look : why_.kept.looks) {
      if (of_life(look) && (most == nullptr || look.held_bytes >= most->held_bytes)) {
        most = &look;
      }
    }
    if (most == nullptr) {
      return;
    }
    std::size_t top = 0;
    for (std::size_t at = 0; at < kOwnerCount; ++at) {
      const auto owner = static_cast<Owner>(at);
      if (is_stacked(owner) && owner != Owner::kBefore && most->owners[at] > most->owners[top]) {
        top = at;
      }
    }
    const std::int64_t before = most->owners[static_cast<std::size_t>(Owner::kBefore)];
    out_ += fmt::format(
        "<h2>Who held the memory</h2><p>At its fullest, {} into the run, {} were held{}{}; most of "
        "{}, "
        "{}, by <b>{}</b>: {}.</p>{}",
        format_duration(time_.at(most->time)), format_bytes(most->held_bytes),
        most->limit_bytes > 0 ? fmt::format(" of a limit of {}", format_bytes(most->limit_bytes))
                              : "",
        before > 0
            ? fmt::format(", {} of them by {}", format_bytes(before), owner_words(Owner::kBefore))
            : "",
        before > 0 ? "the rest" : "it", format_bytes(most->owners[top]),
        owner_name(static_cast<Owner>(top)), owner_words(static_cast<Owner>(top)),
        bar_picture(most->owners, most->limit_bytes));
    if (!most->largest.empty()) {
      out_ += "<table><tr><th>process</th><th>PID</th><th>resident</th></tr>";
      for (const auto& process : most->largest) {
        out_ += fmt::format("<tr><td>{}{}</td><td>{}</td><td>{}</td></tr>", text_of(process.name),
                            process.pid == why_.kept.life.pid ? " (the run itself)" : "",
                            process.pid, format_bytes(process.bytes));
      }
      out_ += "</table>";
    }
  }

  static const char* owner_words(Owner owner) {
    constexpr std::array<const char*, kOwnerCount> kWords{
        "torch's tensors, leased from the limit",
        "rows, features and the loader's ring, leased from the limit",
        "Python's objects",
        "memory that libraries and extensions took with malloc()",
        "memory of the process itself",
        "freed, and kept by malloc()",
        "what came since the run began and has no other owner: NumPy, objects, extensions",
        "shared memory, in which workers pass batches",
        "worker processes and other children",
        "mapped files",
        "page tables",
        "what was there before the run: code, interpreter, libraries, and what was loaded already"};
    return kWords[static_cast<std::size_t>(owner)];
  }

  void memory() {
    const auto& looks = why_.kept.looks;
    std::vector<PicturePoint> points;
    std::vector<PictureMark> marks;
    for (std::size_t at = 0; at < looks.size(); ++at) {
      points.push_back({.x = time_.x(at),
                        .owners = looks[at].owners,
                        .limit_bytes = looks[at].limit_bytes,
                        .phase = looks[at].phase});
      if (at > 0 && looks[at].life != looks[at - 1].life) {
        marks.push_back({.x = time_.x(at),
                         .kind = PictureMark::Kind::kStart,
                         .text = fmt::format("started again ({})", looks[at].life)});
      }
    }
    add_marks(marks);
    out_ +=
        "<h2>Memory by owner</h2>" + owner_legend(points) +
        memory_picture(points, marks, PictureUnit::kSeconds) +
        "<p class='sub'>Time of running. ▲ commit, orange: memory given back under pressure, red "
        "tick: a refusal, red line: the end.</p>";
  }

  void devices() {
    if (!why_.run || why_.run->status.devices.empty()) {
      return;
    }
    out_ +=
        "<h2>Device memory</h2><table><tr><th>device</th><th>tensors</th><th>cache</th>"
        "<th>context</th><th>peak</th><th>limit</th><th>others</th></tr>";
    for (const DeviceStatus& one : why_.run->status.devices) {
      out_ += fmt::format(
          "<tr><td>{}, {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
          "<td>{}</td></tr>",
          text_of(one.name), text_of(one.kind), format_bytes(one.allocated_bytes),
          format_bytes(one.reserved_bytes - one.allocated_bytes), format_bytes(one.context_bytes),
          format_bytes(one.peak_bytes), format_bytes(one.limit_bytes), text_of(one.others));
    }
    out_ += "</table>";
    for (const auto& [name, series] : events_.devices) {
      std::vector<std::pair<double, double>> held;
      for (const auto& [time, bytes] : series.points()) {
        held.emplace_back(time_.at(time), bytes / static_cast<double>(1LL << 30));
      }
      out_ += line_picture(fmt::format("GiB held of {}, at commits", name), held, 0, time_.end(),
                           PictureUnit::kSeconds);
    }
  }

  void add_marks(std::vector<PictureMark>& marks) const {
    constexpr std::size_t kMarksMost = 200;
    const auto add = [&](const ThinnedSeries& series, PictureMark::Kind kind, auto text) {
      const auto& points = series.points();
      const std::size_t every = points.size() / kMarksMost + 1;
      for (std::size_t at = 0; at < points.size(); at += every) {
        marks.push_back(
            {.x = time_.at(points[at].first), .kind = kind, .text = text(points[at].second)});
      }
    };
    add(events_.commits, PictureMark::Kind::kCommit,
        [](double step) { return fmt::format("commit of step {:.0f}", step); });
    add(events_.eviction_times, PictureMark::Kind::kEviction, [](double bytes) {
      return "given back: " + format_bytes(static_cast<std::int64_t>(bytes));
    });
    for (const PageEvents::Line& line : events_.refusals) {
      marks.push_back({.x = time_.at(line.time),
                       .kind = PictureMark::Kind::kRefusal,
                       .text = line.text.substr(0, 300)});
    }
    if (why_.incident() && !why_.kept.looks.empty()) {
      marks.push_back({.x = time_.end(), .kind = PictureMark::Kind::kEnd, .text = why_.summary});
    }
  }

  void curves() {
    std::vector<std::pair<double, double>> loss;
    std::vector<std::pair<double, double>> rows;
    for (std::size_t at = 0; at < why_.kept.looks.size(); ++at) {
      const KeptLook& look = why_.kept.looks[at];
      if (look.rows_per_second > 0) {
        rows.emplace_back(time_.x(at), look.rows_per_second);
        loss.emplace_back(time_.x(at), look.loss);
      }
    }
    if (events_.loss.points().size() >= 2) {
      loss.clear();
      for (const auto& [time, value] : events_.loss.points()) {
        loss.emplace_back(time_.at(time), value);
      }
    }
    if (!why_.run) {
      return;  // Of a command that tells neither.
    }
    out_ += "<h2>Loss and throughput</h2>" +
            line_picture("loss", loss, 0, time_.end(), PictureUnit::kSeconds) +
            line_picture(fmt::format("{} per second", why_.run->unit), rows, 0, time_.end(),
                         PictureUnit::kSeconds);
  }

  void lines(const char* title, const std::vector<PageEvents::Line>& all, std::int64_t count) {
    if (all.empty()) {
      return;
    }
    out_ += fmt::format(
        "<h2>{}{}</h2><table><tr><th>when</th><th>step</th><th>what</th></tr>", title,
        count > std::ssize(all) ? fmt::format(" ({} in all, the newest {})", count, all.size())
                                : "");
    for (const PageEvents::Line& line : all) {
      out_ += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>", when(line.time),
                          format_count(line.step), text_of(line.text));
    }
    out_ += "</table>";
  }

  void acts() {
    lines("Refused", events_.refusals, events_.refusal_count);
    if (!events_.evictions.empty() || events_.cleanups > 0) {
      out_ +=
          "<h2>Given back under pressure</h2><table><tr><th>owner</th><th>how</th><th>times</th>"
          "<th>bytes</th></tr>";
      for (const auto& [key, given] : events_.evictions) {
        out_ +=
            fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>", text_of(key.first),
                        text_of(key.second), format_count(given.times), format_bytes(given.bytes));
      }
      if (events_.cleanups > 0) {
        out_ +=
            fmt::format("<tr><td>what nobody used</td><td>clean-up</td><td>{}</td><td>{}</td></tr>",
                        format_count(events_.cleanups), format_bytes(events_.cleanup_bytes));
      }
      out_ += "</table>";
    }
    lines("The limit was changed", events_.limits, std::ssize(events_.limits));
    if (events_.commit_count > 0) {
      out_ += fmt::format(
          "<h2>Commits</h2><p>{}; the longest took {:.2f} s, and the loop waited {:.2f} s "
          "for "
          "all of them.{}</p>",
          events_.commit_count == 1 ? "1 commit" : format_count(events_.commit_count) + " commits",
          events_.commit_seconds_most, events_.stall_seconds,
          why_.run && why_.run->status.checkpoint_step >= 0 && why_.cause != EndCause::kFinished
              ? fmt::format(" A new start goes on from step {}.",
                            format_count(why_.run->status.checkpoint_step))
              : "");
    }
    lines("Verdicts on growth", events_.verdicts, std::ssize(events_.verdicts));
    lines("Warnings", events_.warnings, std::ssize(events_.warnings));
  }

  void advice() {
    if (why_.advice.empty()) {
      return;
    }
    out_ += "<h2>What would help</h2><ul>";
    for (const std::string& line : why_.advice) {
      out_ += "<li>" + text_of(line) + "</li>";
    }
    out_ += "</ul>";
  }

  void environment() {
    std::string rows;
    std::size_t count = 0;
    const auto row = [&](const std::string& key, const std::string& value) {
      ++count;
      if (rows.size() < kEnvironmentMost) {
        rows += fmt::format("<tr><td>{}</td><td>{}</td></tr>", text_of(key), text_of(value));
      }
    };
    row("command", why_.kept.life.command);
    if (!why_.kept.life.cgroup.empty()) {
      row("memory cgroup", why_.kept.life.cgroup);
    }
    if (why_.run) {
      row("limit", why_.run->status.limit_source);
    }
    if (const auto text = read_small_file(root_ / "identity.json")) {
      const auto identity = json_object(*text);
      for (const auto& [key, value] : identity.items()) {
        if (key != "crc32c") {
          row(key, value.is_string() ? value.get<std::string>() : value.dump());
        }
      }
    }
    if (const auto text = read_small_file(root_ / "run.toml")) {
      std::istringstream file(*text);
      for (std::string line; std::getline(file, line);) {
        const std::size_t equals = line.find(" = ");
        if (equals != std::string::npos && !line.starts_with('#')) {
          row(line.substr(0, equals), line.substr(equals + 3));
        }
      }
    }
    out_ += "<h2>Environment</h2><details><summary>" + fmt::format("{} entries", count) +
            "</summary><table>" + rows + "</table></details>";
  }

  const fs::path& root_;
  const Why& why_;
  const PageEvents& events_;
  TimeLine time_;
  std::string out_{};
};

}  // namespace

Result<std::string> report_page(const fs::path& root) {
  PLIMSOLL_TRY(const Why why, explain_end(root));
  PLIMSOLL_TRY(const PageEvents events, read_page_events(root));
  std::string page = Page(root, why, events).make();
  PLIMSOLL_CHECK(page.size() <= kPageBytesMost, "a report has a bound");
  return page;
}

Result<fs::path> write_report(const fs::path& root, const fs::path& file) {
  PLIMSOLL_TRY(const std::string page, report_page(root));
  const fs::path path = file.empty() ? root / kReportFile : file;
  PLIMSOLL_TRY_VOID(replace_file(path, page, Durable::kNo));
  return path;
}

}  // namespace plimsoll
