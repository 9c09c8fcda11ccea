// SPDX-License-Identifier: Apache-2.0
//
// What a run says about itself: lines of events.jsonl, status.json, and `plimsoll status`.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "os/file.h"
#include "os/room.h"
#include "plimsoll/bytes.h"
#include "run/device_document.h"
#include "run/json_values.h"
#include "run/progress.h"
#include "run/recipe.h"
#include "run/recorder.h"
#include "run/run_folder.h"
#include "run/run_words.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kStatusEveryMs = 500;
constexpr std::size_t kStatusBlock = 4096;  // What a small file has of any disk.
constexpr int kReadsMost = 16;
constexpr std::size_t kDevicesShown = 64;
constexpr const char* kWaitsForRoom = "paused: disk full";

std::int64_t wall_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// One JSON object in a fixed buffer; fields that no longer fit are left out, long texts are cut.
class EventLine {
 public:
  explicit EventLine(std::size_t capacity) : capacity_(capacity) {}

  void add(const char* name, const EventValue& value) {
    const std::size_t mark = size_;
    bool fits = put(size_ == 0 ? "{\"" : ",\"") && put(name) && put("\":");
    if (const auto* text = std::get_if<std::string_view>(&value)) {
      fits = fits && put_text(*text);
    } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
      fits = fits && put_number(*integer);
    } else if (const auto* real = std::get_if<double>(&value)) {
      fits = fits && (std::isfinite(*real) ? put_number(*real) : put("null"));
    } else {
      fits = fits && put(std::get<bool>(value) ? "true" : "false");
    }
    size_ = fits ? size_ : mark;
  }

  std::string_view finish() {
    buffer_[size_] = '}';
    buffer_[size_ + 1] = '\n';
    return {buffer_.data(), size_ + 2};
  }

 private:
  [[nodiscard]] std::size_t room() const { return capacity_ - kTail - size_; }

  bool put(std::string_view text) {
    if (text.size() > room()) {
      return false;
    }
    std::memcpy(buffer_.data() + size_, text.data(), text.size());
    size_ += text.size();
    return true;
  }

  template <class T>
  bool put_number(T value) {
    const auto done = fmt::format_to_n(buffer_.data() + size_, room(), "{}", value);
    if (done.size > room()) {
      return false;
    }
    size_ += done.size;
    return true;
  }

  bool put_text(std::string_view text) {
    if (room() < 2) {
      return false;
    }
    put("\"");
    const std::size_t begin = size_;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (room() < 7) {  // The longest escape and the closing quote.
        break;
      }
      if (c == '"' || c == '\\') {
        put("\\");
        put({&c, 1});
      } else if (byte < 0x20) {
        put(fmt::format("\\u{:04x}", static_cast<unsigned int>(byte)));
      } else {
        put({&c, 1});
      }
    }
    if (room() < 7) {  // Cut: never inside a character.
      while (size_ > begin && (static_cast<unsigned char>(buffer_[size_ - 1]) & 0xC0U) == 0x80U) {
        --size_;
      }
      if (size_ > begin && (static_cast<unsigned char>(buffer_[size_ - 1]) & 0x80U) != 0) {
        --size_;
      }
    }
    return put("\"");
  }

  static constexpr std::size_t kTail = 2;  // "}\n"
  std::array<char, kEventBytesMax> buffer_{};
  std::size_t capacity_;
  std::size_t size_{0};
};

nlohmann::ordered_json to_document(const RunStatus& status) {
  nlohmann::ordered_json json{
      {"status", status.status},
      {"step", status.step},
      {"steps_total", status.steps_total < 0 ? nlohmann::ordered_json(nullptr)
                                             : nlohmann::ordered_json(status.steps_total)},
      {"epoch", status.epoch},
      {"epochs", status.epochs},
      {"loss", json_number(status.loss)},
      {"rows_per_second", json_number(status.rows_per_second)},
      {"seconds", json_number(status.seconds)},
      {"seconds_left", json_number(status.seconds_left)},
      {"limit_bytes", status.limit_bytes},
      {"limit_source", status.limit_source},
      {"resident_bytes", status.resident_bytes},
      {"peak_resident_bytes", status.peak_resident_bytes},
      {"leased_bytes", status.leased_bytes},
      {"leased_peak_bytes", status.leased_peak_bytes},
      {"before_bytes", status.before_bytes},
      {"before_anonymous_bytes", status.before_anonymous_bytes},
      {"hit_rate", json_number(status.hit_rate)},
      {"checkpoint_step", status.checkpoint_step},
      {"message", status.message},
      {"cause", status.cause}};
  auto& tags = json["leased_by_tag"] = nlohmann::ordered_json::object();
  for (int tag = 0; tag < kTagCount; ++tag) {
    tags[tag_name(static_cast<Tag>(tag))] = status.leased_by_tag[static_cast<std::size_t>(tag)];
  }
  auto& devices = json["devices"] = nlohmann::ordered_json::array();
  for (const DeviceStatus& device : status.devices) {
    devices.push_back(device_document(device));
  }
  return json;
}

/// Reads members of an object; a missing or mistyped one keeps its default.
class Members {
 public:
  explicit Members(const nlohmann::json& json) : json_(json) {}

  void text(const char* key, std::string& value) const {
    if (const auto at = json_.find(key); at != json_.end() && at->is_string()) {
      value = at->get<std::string>();
    }
  }
  void integer(const char* key, std::int64_t& value) const {
    if (const auto at = json_.find(key); at != json_.end() && at->is_number_integer()) {
      value = at->get<std::int64_t>();
    }
  }
  void real(const char* key, double& value) const {
    if (const auto at = json_.find(key); at != json_.end() && at->is_number()) {
      value = at->get<double>();
    }
  }

 private:
  const nlohmann::json& json_;
};

DeviceStatus device_from(const nlohmann::json& json) {
  DeviceStatus device;
  const Members members(json);
  members.text("name", device.name);
  members.text("kind", device.kind);
  members.integer("limit_bytes", device.limit_bytes);
  members.integer("context_bytes", device.context_bytes);
  members.integer("allocated_bytes", device.allocated_bytes);
  members.integer("reserved_bytes", device.reserved_bytes);
  members.integer("peak_bytes", device.peak_bytes);
  members.integer("others_bytes", device.others_bytes);
  members.text("others", device.others);
  return device;
}

/// Reads what to_document() wrote.
RunStatus from_document(const nlohmann::json& json) {
  RunStatus status;
  const Members members(json);
  const auto text = [&](const char* key, std::string& value) { members.text(key, value); };
  const auto integer = [&](const char* key, std::int64_t& value) { members.integer(key, value); };
  const auto real = [&](const char* key, double& value) { members.real(key, value); };
  text("status", status.status);
  text("message", status.message);
  text("cause", status.cause);
  text("limit_source", status.limit_source);
  integer("step", status.step);
  integer("steps_total", status.steps_total);
  integer("epoch", status.epoch);
  integer("epochs", status.epochs);
  integer("limit_bytes", status.limit_bytes);
  integer("resident_bytes", status.resident_bytes);
  integer("peak_resident_bytes", status.peak_resident_bytes);
  integer("leased_bytes", status.leased_bytes);
  integer("leased_peak_bytes", status.leased_peak_bytes);
  integer("before_bytes", status.before_bytes);
  integer("before_anonymous_bytes", status.before_anonymous_bytes);
  integer("checkpoint_step", status.checkpoint_step);
  if (const auto at = json.find("steps_total"); at != json.end() && at->is_null()) {
    status.steps_total = kUnknownSteps;
  }
  real("loss", status.loss);
  real("rows_per_second", status.rows_per_second);
  real("seconds", status.seconds);
  real("seconds_left", status.seconds_left);
  real("hit_rate", status.hit_rate);
  if (const auto tags = json.find("leased_by_tag"); tags != json.end() && tags->is_object()) {
    for (int tag = 0; tag < kTagCount; ++tag) {
      const auto at = tags->find(tag_name(static_cast<Tag>(tag)));
      if (at != tags->end() && at->is_number_integer()) {
        status.leased_by_tag[static_cast<std::size_t>(tag)] = at->get<std::int64_t>();
      }
    }
  }
  if (const auto devices = json.find("devices"); devices != json.end() && devices->is_array()) {
    for (const auto& device : *devices) {
      if (device.is_object() && status.devices.size() < kDevicesShown) {
        status.devices.push_back(device_from(device));
      }
    }
  }
  return status;
}

}  // namespace

void RunStatus::read_memory(const Governor& governor) {
  const LedgerState ledger = governor.state();
  limit_bytes = ledger.limit_bytes;
  limit_source = governor.valid() ? governor.limit().explain() : "";
  leased_bytes = ledger.leased_bytes;
  leased_peak_bytes = ledger.leased_peak_bytes;
  before_bytes = ledger.baseline_bytes;
  for (std::size_t tag = 0; tag < leased_by_tag.size(); ++tag) {
    leased_by_tag[tag] = ledger.pools[tag].leased_bytes;
  }
  if (const auto resident = read_resident(); resident) {
    resident_bytes = resident->total();
    peak_resident_bytes = resident->peak;
    if (before_anonymous_bytes < 0) {  // The run begins.
      before_anonymous_bytes = std::max<std::int64_t>(0, resident->anonymous - leased_bytes);
    }
  }
}

RunFolder::Words& RunFolder::words() {
  if (!words_) {
    words_ = std::make_shared<Words>(root_);
  }
  return *words_;
}

std::string RunStatus::place() const {
  std::string text = format_count(step);
  text += steps_total > 0 ? fmt::format(" of {}", format_count(steps_total)) : "";
  text += epochs > 0 ? fmt::format(", epoch {} of {}", std::min(epoch + 1, epochs), epochs) : "";
  return text;
}

Result<void> RunFolder::event(const char* name, std::span<const EventField> fields) {
  EventLine line(std::string_view(name) == "step" ? kStepEventBytesMax : kEventBytesMax);
  line.add("time", static_cast<double>(wall_ms()) / 1000.0);
  line.add("event", std::string_view(name));
  for (const EventField& field : fields) {
    line.add(field.name, field.value);
  }
  Words& told = words();
  const MutexLock lock(told.mutex);
  return told.append(line.finish());
}

Result<void> RunFolder::Words::append(std::string_view line) {
  if (kept.size() + line.size() > kKeptMost) {
    ++left_out;
    return flush();
  }
  const std::size_t before = kept.size();
  kept += line;
  auto written = flush();
  if (!written) {
    kept.resize(std::min(before, kept.size()));
  }
  return written;
}

Result<void> RunFolder::Words::flush() {
  while (!kept.empty()) {
    // One write: with O_APPEND a reader never sees half a line of a living process.
    const ssize_t written = ::write(events.get(), kept.data(), kept.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0 && is_full(errno)) {
      return {};
    }
    if (written < 0) {
      return fail_io(errno, (root / "events.jsonl").string(),
                     "mend the disk, then `plimsoll resume RUN` or start its program again");
    }
    kept.erase(0, static_cast<std::size_t>(written));
    if (kept.empty() && left_out > 0) {
      EventLine line(kEventBytesMax);
      line.add("time", static_cast<double>(wall_ms()) / 1000.0);
      line.add("event", std::string_view("left_out"));
      line.add("events", std::exchange(left_out, 0));
      kept = line.finish();
    }
  }
  return {};
}

Result<void> RunFolder::Words::put() {
  status_written_ms = wall_ms();
  RunStatus shown = status;
  if (!waits.empty()) {
    shown.status = kWaitsForRoom;
    shown.message = waits;
    shown.cause = "disk";
  }
  auto json = to_document(shown);
  json["pid"] = ::getpid();
  json["time"] = static_cast<double>(status_written_ms) / 1000.0;
  std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text += "\n";
  const fs::path path = root / "status.json";
  // Renamed, so that a reader sees a whole file; not synced, since nothing depends on it later.
  auto written = replace_file(path, text, Durable::kNo);
  if (written || !is_full(written.error().os_errno)) {
    return written;
  }
  // In its place, over what has room already: a reader who comes upon half of it reads again.
  const auto there = OwnDescriptor::open(path, O_RDWR | O_NOFOLLOW);
  const off_t size = there.get() < 0 ? 0 : ::lseek(there.get(), 0, SEEK_END);
  text.resize(std::max(text.size(), static_cast<std::size_t>(std::max<off_t>(size, 0))), ' ');
  if (size > 0 && text.size() <= kStatusBlock) {
    std::ignore = ::pwrite(there.get(), text.data(), text.size(), 0);
  }
  return {};
}

void RunFolder::Words::wait_for_room(const std::string& what) {
  const MutexLock lock(mutex);
  EventLine line(kEventBytesMax);
  line.add("time", static_cast<double>(wall_ms()) / 1000.0);
  line.add("event", std::string_view(what.empty() ? "disk_room" : "disk_full"));
  line.add("step", status.step);
  if (!what.empty()) {
    line.add("message", std::string_view(what));
  }
  waits = what;
  std::ignore = append(line.finish());
  std::ignore = put();
  const std::string text =
      what.empty() ? fmt::format("{}: the disk has room again: goes on\n", root.string())
                   : fmt::format(
                         "{}: paused: disk full: {}; free some and it goes on, or ask it to "
                         "stop without this commit\n",
                         root.string(), what);
  std::ignore = ::write(STDERR_FILENO, text.data(), text.size());
}

void RunFolder::Words::close() noexcept {
  if (!mark.forked()) {
    try {
      const MutexLock lock(mutex);
      std::ignore = flush();
      events = OwnDescriptor();
    } catch (const std::exception&) {
      // No memory for an error's text: the events are gone, as if there were no room.
    }
  }
}

const char* cause_of(const Error& error) noexcept {
  if (error.code == ErrorCode::kOverBudget) {
    return "refused";
  }
  return is_full(error.os_errno) ? "disk" : "error";
}

void RunFolder::record(const Governor& governor, std::function<Inside()> inside) {
  auto started = Recorder::start(root_, governor, std::move(inside));
  if (started) {
    recorder_ = std::move(*started);
    return;
  }
  const std::string why = "looks are not kept: " + started.error().to_string();
  static_cast<void>(event("warning", {{"message", std::string_view(why)}}));
}

void RunFolder::end_record() noexcept {
  recorder_.reset();
}

void RunFolder::phase(std::string_view name) {
  if (recorder_) {
    recorder_->phase(name);
  }
}

Result<void> RunFolder::write_status(const RunStatus& status, bool force) {
  if (recorder_) {
    recorder_->note(status);
    if (const auto found = recorder_->news()) {
      const std::string text = found->text("step");
      PLIMSOLL_TRY_VOID(event("verdict", {{"step", status.step},
                                          {"course", std::string_view(course_name(found->course))},
                                          {"owner", std::string_view(owner_name(found->owner))},
                                          {"bytes_per_step", found->bytes_per_unit},
                                          {"phase", std::string_view(found->phase)},
                                          {"process", std::string_view(found->process)},
                                          {"text", std::string_view(text)}}));
    }
  }
  Words& told = words();
  const MutexLock lock(told.mutex);
  told.status = status;
  const std::int64_t since = wall_ms() - told.status_written_ms;
  if (!force && since >= 0 && since < kStatusEveryMs) {
    return {};
  }
  std::ignore = told.flush();
  return told.put();
}

Result<RunView> RunFolder::view(const fs::path& root) {
  PLIMSOLL_TRY_VOID(must_be_run(root));
  RunView view;
  view.recipe = recipe_name_of_run(root).value_or("");
  if (const Recipe* known = find_recipe(view.recipe); known != nullptr) {
    view.unit = known->unit;
  }
  view.alive = is_locked(root);
  std::error_code status;
  if (fs::exists(root / "status.json", status)) {
    nlohmann::json json;
    for (int time = 0; time < kReadsMost && !json.is_object(); ++time) {  // See Words::put().
      PLIMSOLL_TRY(const std::string text, read_small_file(root / "status.json"));
      json = nlohmann::json::parse(text, nullptr, false);
    }
    if (!json.is_object()) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: not a JSON object", (root / "status.json").string()));
    }
    view.status = from_document(json);
    if (const auto at = json.find("time"); at != json.end() && at->is_number()) {
      view.age_seconds = static_cast<double>(wall_ms()) / 1000.0 - at->get<double>();
    }
  }
  // The manifest knows; what the last process had heard of it may be older, or nothing.
  PLIMSOLL_TRY(const auto published, RunFolder(root).published_step());
  view.status.checkpoint_step = published.value_or(-1);
  if (const auto text = read_small_file(root / ".lock"); text) {
    view.pid = std::atoi(text->c_str());
  }
  const bool ended = view.status.status == "finished" || view.status.status == "stopped" ||
                     view.status.status == "failed";
  if (!view.alive && !ended) {
    view.status.status = "interrupted";  // Killed, or the machine went away.
  }
  return view;
}

std::string RunView::to_json() const {
  auto json = to_document(status);
  json["recipe"] = recipe;
  json["alive"] = alive;
  json["pid"] = pid;
  json["age_seconds"] = json_number(age_seconds);
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string RunView::to_text() const {
  std::string text = fmt::format(
      "{}{}\n  step      {}\n  loss      {}\n  speed     {} {}/s\n", status.status,
      alive ? fmt::format(" (process {})", pid) : "", status.place(), loss_text(status.loss),
      format_count(static_cast<std::int64_t>(status.rows_per_second)), unit);
  if (alive && status.status == "running" && std::isfinite(status.seconds_left)) {
    text += fmt::format("  left      {}\n", format_duration(status.seconds_left));
  }
  text += fmt::format("  memory    {} resident (peak {}), {} leased; limit {}\n",
                      format_bytes(status.resident_bytes), format_bytes(status.peak_resident_bytes),
                      format_bytes(status.leased_bytes), format_bytes(status.limit_bytes));
  if (!status.limit_source.empty()) {
    text += fmt::format("            limit of {}\n", status.limit_source);
  }
  std::string owners = status.before_bytes > 0
                           ? "before the run " + format_bytes(status.before_bytes)
                           : std::string();
  for (int tag = 0; tag < kTagCount; ++tag) {
    if (const auto held = status.leased_by_tag[static_cast<std::size_t>(tag)]; held > 0) {
      owners += fmt::format("{}{} {}", owners.empty() ? "" : ", ", tag_name(static_cast<Tag>(tag)),
                            format_bytes(held));
    }
  }
  text += owners.empty() ? "" : fmt::format("            {}\n", owners);
  for (const DeviceStatus& device : status.devices) {
    text += fmt::format("  device    {}\n            {}\n", device_words(device), device.kind);
  }
  text += unit != "rows" ? "" : fmt::format("  store     {:.1f} % hits\n", 100 * status.hit_rate);
  text += status.checkpoint_step < 0
              ? "  resumable no checkpoint yet\n"
              : fmt::format("  resumable from step {}\n", format_count(status.checkpoint_step));
  if (!status.message.empty()) {
    text += fmt::format("  message   {}\n", status.message);
  }
  return text;
}

}  // namespace plimsoll
