// SPDX-License-Identifier: Apache-2.0
//
// Making, locking and tidying a run folder. What it says about itself is in run_status.cpp.
#include "run/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "os/room.h"
#include "run/control.h"
#include "run/ended_command.h"
#include "run/recorder.h"
#include "run/run_words.h"
#include "run/sealed_file.h"
#include "watch/progress.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kCheckpointPrefix = "step-";
constexpr int kManifestFormat = 2;
constexpr const char* kIdentityFile = "identity.json";
constexpr std::int64_t kLockByte = 0;

fs::path lock_path(const fs::path& root) {
  return root / ".lock";
}
fs::path manifest_path(const fs::path& root) {
  return root / "checkpoints" / "manifest.json";
}

/// The step of a checkpoint folder's name; −1 for any other name.
std::int64_t step_of(const std::string& name) {
  if (!name.starts_with(kCheckpointPrefix)) {
    return -1;
  }
  std::int64_t step = -1;
  const char* first = name.data() + kCheckpointPrefix.size();
  const char* last = name.data() + name.size();
  const auto [end, status] = std::from_chars(first, last, step);
  const bool whole = status == std::errc{} && end == last && step >= 0;
  return whole && name == checkpoint_name(step) ? step : -1;  // "step-900" is somebody's backup.
}

// Whether a kill has left it, half written.
bool is_half_checkpoint(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  return dot != std::string::npos && step_of(name.substr(0, dot)) >= 0 &&
         (name.substr(dot) == ".new" || name.substr(dot) == ".partial");
}

// Names in a folder; none when it is missing.
Result<std::vector<std::string>> names_if_there(const fs::path& folder) {
  auto names = names_in(folder);
  if (!names && names.error().os_errno == ENOENT) {
    return std::vector<std::string>{};
  }
  return names;
}

Result<void> refuse_run(const fs::path& root) {
  if (RunFolder::is_run(root)) {
    return fail(
        ErrorCode::kInvalidArgument, fmt::format("{} is a run already", root.string()),
        "go on with it by `plimsoll resume RUN` (plimsoll.resume), or by its own program; or "
        "name another folder with --out (out)");
  }
  return {};
}

// What furnish() leaves when the process is killed before run.toml is there: nothing of anyone's.
bool is_left_unfurnished(const fs::path& root, const std::string& name) {
  if (name == "checkpoints" || name == "metrics") {
    const auto names = names_in(root / name);
    return names && names->empty();
  }
  return name == ".lock" || name == "run.toml.new";
}

struct Difference {
  std::string key;
  std::string was;  // "unset" where it was not there.
  std::string is;
};

std::vector<Difference> differences_of(const RunIdentity& saved, const RunIdentity& identity) {
  constexpr const char* kUnset = "unset";
  std::vector<Difference> found;
  for (const auto& [key, value] : identity) {
    const auto was = saved.find(key);
    if (was == saved.end() || was->second != value) {
      found.push_back({key, was == saved.end() ? kUnset : was->second, value});
    }
  }
  for (const auto& [key, value] : saved) {
    if (!identity.contains(key)) {
      found.push_back({key, value, kUnset});
    }
  }
  return found;
}

bool contains(const std::vector<std::string>& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

std::string checkpoint_name(std::int64_t step) {
  return fmt::format("{}{:09}", kCheckpointPrefix, step);
}

Result<void> must_be_run(const fs::path& root) {
  if (RunFolder::is_run(root)) {
    return {};
  }
  std::error_code ignored;
  return fail(
      ErrorCode::kNotFound, fmt::format("{}: no run there (no run.toml)", root.string()),
      fs::exists(root, ignored)
          ? "`plimsoll info PATH` says what is there; `plimsoll train` or a plimsoll.Run makes "
            "a run"
          : "`plimsoll train` or a plimsoll.Run makes one");
}

bool RunFolder::is_run(const fs::path& path) {
  std::error_code status;
  return fs::is_regular_file(path / "run.toml", status);
}

bool RunFolder::is_locked(const fs::path& root) {
  const auto lock = RangeLocks::open(lock_path(root), RangeLocks::Access::kRead);
  // Who only reads is not in the way of this one.
  return lock && lock->held_by_others(kLockByte, 1, RangeLocks::Kind::kShared);
}

Result<RunFolder> RunFolder::create(const fs::path& root, const std::string& run_toml) {
  PLIMSOLL_TRY_VOID(refuse_run(root));
  std::error_code status;
  const bool exists = fs::exists(root, status);
  if (exists && !fs::is_directory(root, status)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} is not a folder", root.string()),
                "name another folder, with --out or as the first argument of a Run");
  }
  PLIMSOLL_TRY(const auto names, names_if_there(root));
  if (!std::all_of(names.begin(), names.end(),
                   [&](const auto& name) { return is_left_unfurnished(root, name); })) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{} is not empty and is no run", root.string()),
                "name a new or empty folder, with --out or as the first argument of a Run");
  }
  RunFolder folder(root);
  PLIMSOLL_TRY_VOID(make_directories(root));
  if (auto locked = folder.lock(); !locked) {
    fs::remove(root, status);  // Only when it is empty: nobody else is in it.
    return tl::unexpected(std::move(locked).error());
  }
  PLIMSOLL_TRY_VOID(refuse_run(root));  // Whoever held the lock may have made one meanwhile.
  folder.created_ = true;               // From here on it is ours alone.
  folder.created_directory_ = !exists;
  if (auto ready = folder.furnish(run_toml); !ready) {
    folder.abandon();
    return tl::unexpected(std::move(ready).error());
  }
  return folder;
}

Result<void> RunFolder::furnish(const std::string& run_toml) {
  for (const char* name : {"checkpoints", "metrics"}) {
    PLIMSOLL_TRY_VOID(make_directories(root_ / name));
  }
  PLIMSOLL_TRY_VOID(write_config(run_toml));
  tell_progress(fmt::format("{}: nothing committed", root_.string()));
  return open_events();
}

Result<RunFolder> RunFolder::open(const fs::path& root) {
  PLIMSOLL_TRY_VOID(must_be_run(root));
  RunFolder folder(root);
  PLIMSOLL_TRY_VOID(folder.lock());
  std::error_code ignored;
  fs::remove(root / ".stop", ignored);
  fs::remove(root / ".pause", ignored);
  fs::remove(root / ".limit", ignored);
  fs::remove(root / EndedCommand::kFile, ignored);  // Of a life before this one.
  PLIMSOLL_TRY_VOID(folder.open_events());
  // What the process before said of itself holds no longer, should this one end without a word.
  const RunStatus before = view(root).value_or(RunView{}).status;
  PLIMSOLL_TRY_VOID(folder.write_status({.step = before.step,
                                         .steps_total = before.steps_total,
                                         .epoch = before.epoch,
                                         .epochs = before.epochs,
                                         .loss = before.loss},
                                        /*force=*/true));
  if (const auto step = folder.published_step(); step && *step) {
    folder.tell_committed(**step);
  }
  return folder;
}

Result<RunFolder> RunFolder::open_to_read(const fs::path& root) {
  PLIMSOLL_TRY_VOID(must_be_run(root));
  RunFolder folder(root);
  PLIMSOLL_TRY_VOID(folder.lock_to_read());
  return folder;
}

Result<RunFolder> RunFolder::open_at_rest(const fs::path& root) {
  PLIMSOLL_TRY_VOID(must_be_run(root));
  RunFolder folder(root);
  PLIMSOLL_TRY_VOID(folder.lock());
  return folder;
}

RunFolder& RunFolder::operator=(RunFolder&& other) noexcept {
  if (this != &other) {
    close();
    root_ = std::move(other.root_);
    lock_ = std::move(other.lock_);
    created_ = other.created_;
    created_directory_ = other.created_directory_;
    words_ = std::move(other.words_);
    room_ = std::move(other.room_);
    recorder_ = std::move(other.recorder_);
  }
  return *this;
}

RunFolder::~RunFolder() {
  close();
}

void RunFolder::close() noexcept {
  end_record();
  room_.reset();
  if (words_) {
    words_->close();
    words_.reset();
  }
  lock_ = RangeLocks();
}

Result<void> RunFolder::lock() {
  const auto path = lock_path(root_);
  PLIMSOLL_TRY(lock_, RangeLocks::open(path, RangeLocks::Access::kCreate));
  PLIMSOLL_TRY_VOID(take_lock(RangeLocks::Kind::kExclusive));
  // Whoever made the folder may have removed it again between our open and our lock.
  const int descriptor = lock_.descriptor();
  struct stat mine {};
  struct stat there {};
  if (::fstat(descriptor, &mine) != 0 || ::stat(path.c_str(), &there) != 0 ||
      mine.st_ino != there.st_ino || mine.st_dev != there.st_dev) {
    return fail(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: another process has just removed this folder", root_.string()),
        "start again, or name another folder, with --out or as the first argument of a Run");
  }
  const auto pid = fmt::format("{}\n", ::getpid());
  if (::ftruncate(descriptor, 0) != 0 ||
      ::pwrite(descriptor, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return fail_io(errno, path.string());
  }
  return {};
}

Result<void> RunFolder::take_lock(RangeLocks::Kind kind) {
  switch (lock_.try_lock(kLockByte, kind)) {
    case RangeLocks::Taken::kYes:
      return {};
    case RangeLocks::Taken::kHeldByOthers:
      return tl::unexpected(held_by_another());
    case RangeLocks::Taken::kNoLocksThere:
      break;
  }
  return fail_io(errno, lock_path(root_).string());
}

Error RunFolder::held_by_another() const {
  if (is_locked(root_)) {
    return make_error(ErrorCode::kInvalidArgument,
                      fmt::format("{}: another process trains in this run", root_.string()),
                      "`plimsoll status RUN` shows it, `plimsoll stop RUN` ends it");
  }
  return make_error(ErrorCode::kInvalidArgument,
                    fmt::format("{}: another process evaluates this run", root_.string()),
                    "wait until that `plimsoll eval` has ended");
}

Result<void> RunFolder::lock_to_read() {
  auto opened = RangeLocks::open(lock_path(root_), RangeLocks::Access::kRead);
  if (!opened) {
    return opened.error().code == ErrorCode::kNotFound  // A copy may lack it.
               ? Result<void>{}
               : tl::unexpected(std::move(opened).error());
  }
  lock_ = std::move(*opened);
  return take_lock(RangeLocks::Kind::kShared);
}

Result<void> RunFolder::open_events() {
  const auto path = root_ / "events.jsonl";
  constexpr int kFlags = O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW;
  auto words = std::make_shared<Words>(root_);
  {
    const MutexLock lock(words->mutex);
    words->events = OwnDescriptor::open(path, kFlags);
    const int events = words->events.get();
    if (events < 0) {
      return open_failed(path, kFlags);
    }
    // A kill can cut the last line short; what follows must not continue it.
    const off_t size = ::lseek(events, 0, SEEK_END);
    char last = '\n';
    if (size > 0 && ::pread(events, &last, 1, size - 1) == 1 && last != '\n') {
      words->kept = "\n";
      PLIMSOLL_TRY_VOID(words->flush());
    }
  }
  room_ = room_of_run(root_, [words](const std::string& what) { words->wait_for_room(what); });
  words_ = std::move(words);
  return {};
}

bool RunFolder::waits_for_room() const {
  return room_ != nullptr && room_->waits();
}

bool RunFolder::wait_for_room() const {
  return room_ == nullptr || room_->wait_until_written();
}

std::shared_ptr<RoomWait> room_of_run(const fs::path& root,
                                      std::function<void(const std::string&)> tell) {
  const auto control = std::make_shared<RunControl>(root);  // Asked under one lock.
  return std::make_shared<RoomWait>(
      std::vector<fs::path>{root / "checkpoints", root / "embeddings"},
      RoomWait::Hooks{.may_wait = StopSignals::there,
                      .stops = [control] { return control->poll() == Request::kStop; },
                      .tell = std::move(tell)});
}

Result<RunIdentity> RunFolder::saved_identity() const {
  const auto path = root_ / kIdentityFile;
  PLIMSOLL_TRY(const std::string text, read_sealed(path));
  const auto saved = nlohmann::json::parse(text, nullptr, false);
  RunIdentity identity;
  for (const auto& [key, value] : saved.items()) {
    if (!value.is_string()) {
      return fail(ErrorCode::kCorrupt, fmt::format("{}: '{}' is no text", path.string(), key));
    }
    if (key != kSealKey) {
      // Runs of Python programs had "threads" before 0.2.
      identity[key == "threads" ? "compute_threads" : key] = value.get<std::string>();
    }
  }
  return identity;
}

Result<void> RunFolder::check_identity(const RunIdentity& identity,
                                       const IdentityChanges& allowed) {
  const auto path = root_ / kIdentityFile;
  const auto write = [&] { return write_sealed(path, nlohmann::json(identity).dump(2) + "\n"); };
  std::error_code status;
  if (!fs::exists(path, status)) {
    return write();
  }
  PLIMSOLL_TRY(const RunIdentity saved, saved_identity());
  const std::vector<Difference> differences = differences_of(saved, identity);
  std::string refused;
  bool wish_would_do = true;
  for (const Difference& one : differences) {
    if (contains(allowed.any, one.key)) {
      continue;
    }
    refused +=
        fmt::format("{}{} was {} and is {}", refused.empty() ? "" : "; ", one.key, one.was, one.is);
    wish_would_do = wish_would_do && contains(allowed.wishes, one.key);
  }
  if (!refused.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: this run cannot go on here: {}", root_.string(), refused),
                wish_would_do && allowed.advice != nullptr
                    ? allowed.advice
                    : "the same bits need the same identity; resume where it was started, or train "
                      "anew");
  }
  for (const Difference& one : differences) {
    PLIMSOLL_TRY_VOID(event("identity", {{"key", std::string_view(one.key)},
                                         {"was", std::string_view(one.was)},
                                         {"is", std::string_view(one.is)}}));
  }
  return differences.empty() ? Result<void>{} : write();
}

Result<void> RunFolder::check_data(const std::string& data, const std::string& fingerprint) const {
  PLIMSOLL_TRY(const RunIdentity saved, saved_identity());
  const auto trained = saved.find(kDataKey);
  if (trained == saved.end() || trained->second != fingerprint) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: trained on data of fingerprint {}, but {} has {}", root_.string(),
                            trained == saved.end() ? "unset" : trained->second, data, fingerprint),
                "put back the data that the run was trained on, or train anew");
  }
  return {};
}

Result<void> RunFolder::write_config(const std::string& run_toml) {
  return write_sealed(config_file(), run_toml);
}

fs::path RunFolder::checkpoint_path(std::int64_t step) const {
  return root_ / "checkpoints" / checkpoint_name(step);
}

Result<std::optional<std::int64_t>> RunFolder::published_step() const {
  const auto path = manifest_path(root_);
  std::error_code status;
  if (!fs::exists(path, status)) {
    return std::optional<std::int64_t>{};
  }
  PLIMSOLL_TRY(const std::string text, read_sealed(path));
  const auto manifest = nlohmann::json::parse(text, nullptr, false);
  const bool sound =
      manifest.is_object() && manifest.contains("step") && manifest["step"].is_number_unsigned() &&
      manifest["step"].get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max() &&
      manifest.contains("format") && manifest["format"] == kManifestFormat &&
      manifest.contains("checkpoint") &&
      manifest["checkpoint"] == checkpoint_name(manifest["step"].get<std::int64_t>());
  if (!sound) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: not a manifest of format {}", path.string(), kManifestFormat));
  }
  return std::optional<std::int64_t>{manifest["step"].get<std::int64_t>()};
}

void RunFolder::tell_committed(std::int64_t step) const {
  tell_progress(fmt::format("{}: step {}", root_.string(), step));
}

Result<void> RunFolder::publish(std::int64_t step, std::int64_t keep) {
  PLIMSOLL_CHECK(keep >= 1, "the newest checkpoint must be kept");
  const nlohmann::ordered_json manifest{
      {"format", kManifestFormat}, {"step", step}, {"checkpoint", checkpoint_name(step)}};
  PLIMSOLL_TRY_VOID(write_sealed(manifest_path(root_), manifest.dump() + "\n"));
  tell_committed(step);
  PLIMSOLL_TRY(const auto steps, checkpoint_steps());
  const auto count = static_cast<std::int64_t>(steps.size());
  for (std::int64_t i = 0; i < count - keep; ++i) {
    if (const auto old = steps[static_cast<std::size_t>(i)]; old != step) {
      PLIMSOLL_TRY_VOID(remove_tree(checkpoint_path(old)));
    }
  }
  return {};
}

Result<std::vector<std::int64_t>> RunFolder::checkpoint_steps() const {
  PLIMSOLL_TRY(const auto names, names_if_there(root_ / "checkpoints"));
  std::vector<std::int64_t> steps;
  for (const auto& name : names) {
    if (const auto step = step_of(name); step >= 0) {
      steps.push_back(step);
    }
  }
  std::sort(steps.begin(), steps.end());  // By number: "step-10" comes after "step-9".
  return steps;
}

Result<void> RunFolder::discard_unpublished() {
  PLIMSOLL_TRY(const auto published, published_step());
  PLIMSOLL_TRY(const auto names, names_if_there(root_ / "checkpoints"));
  for (const auto& name : names) {
    if (is_half_checkpoint(name) || step_of(name) > published.value_or(-1)) {
      PLIMSOLL_TRY_VOID(remove_tree(root_ / "checkpoints" / name));
    }
  }
  return {};
}

Result<void> RunFolder::discard_rows() {
  return remove_tree(embeddings());
}

void RunFolder::abandon() noexcept {
  const bool created = std::exchange(created_, false);
  close();
  if (!created) {
    return;
  }
  try {  // The folder was new or empty when it was made, so everything in it is this run's.
    for (const std::string& name : names_in(root_).value_or(std::vector<std::string>{})) {
      static_cast<void>(remove_tree(root_ / name));
    }
    if (created_directory_) {
      static_cast<void>(remove_file(root_));
    }
  } catch (const std::bad_alloc&) {
    // No room for the names: what is left has to be removed by hand.
  }
}

std::string instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  std::string text = "x86-64";
  const auto add = [&text](bool has, const char* name) { text += has ? name : ""; };
  add(__builtin_cpu_supports("avx2") != 0, " avx2");
  add(__builtin_cpu_supports("fma") != 0, " fma");
  add(__builtin_cpu_supports("avx512f") != 0, " avx512f");
  add(__builtin_cpu_supports("avx512bw") != 0, " avx512bw");
  add(__builtin_cpu_supports("avx512vl") != 0, " avx512vl");
  add(__builtin_cpu_supports("avx512vnni") != 0, " avx512vnni");
  return text;
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "other";
#endif
}

}  // namespace plimsoll
