// SPDX-License-Identifier: Apache-2.0
//
// RunFolder: the files of one run, and the lock that lets one process at a time train in it.
//
//   run.toml        resolved configuration      identity.json   what decides the run's bits
//   events.jsonl    one line per event          status.json     what `plimsoll status` prints
//   checkpoints/    step-NNNNNNNNN/ and manifest.json, the one step every part agrees on
//   looks.bin       memory, look by look        ending.json  how `plimsoll run` saw it end
//   metrics/ embeddings/ report.html            .stop .pause .limit  requests; .lock: the pid
//
// Reading order: this file, checkpoint.h, control.h, then run_folder.cpp.
//
// Threads: single-owner; a write that waits for room says so from its own thread. A forked child
//          has no part in it: its lock ends with this process.
// Memory:  one line buffer of kEventBytesMax; nothing grows with the run. On disk, events.jsonl
//          grows by at most kStepEventBytesMax per step; looks.bin has a fixed size.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "os/fork.h"
#include "os/range_locks.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// Name → value; two runs with equal identities end in equal bits.
using RunIdentity = std::map<std::string, std::string>;

/// What of an identity a resumption may change; each change is written to events.jsonl.
struct IdentityChanges {
  std::vector<std::string> any{};     ///< These keys may differ, by the user's own wish.
  std::vector<std::string> wishes{};  ///< These might by another wish, which was not made.
  const char* advice{nullptr};        ///< How to make that.
};

inline constexpr const char* kDataKey = "data_fingerprint";  ///< Of the data it is trained on.
/// The one option of an identity that a resumption may raise: its epochs are the last of a run and
/// have a constant learning rate.
inline constexpr const char* kGrowingKey = "phase2_epochs";

/// One value of an event. Numbers that are not finite are written as null.
using EventValue = std::variant<std::int64_t, double, bool, std::string_view>;
struct EventField {
  const char* name;
  EventValue value;
};

inline constexpr std::size_t kStepEventBytesMax = 512;  ///< An event line named "step".
inline constexpr std::size_t kEventBytesMax = 4096;     ///< Any other; longer texts are cut.

inline constexpr std::int64_t kUnknownSteps = -1;
inline constexpr double kUnknownNumber = std::numeric_limits<double>::quiet_NaN();

/// What status.json holds. A number that is not known is NaN, and null in JSON.
/// Memory of a device whose limit the run keeps, in bytes.
struct DeviceStatus {
  std::string name{};  ///< As the limit was given: "cuda".
  std::string kind{};  ///< "cuda (NVIDIA H100)".
  std::int64_t limit_bytes{0};
  std::int64_t context_bytes{0};    ///< Kernels, libraries, other processes.
  std::int64_t allocated_bytes{0};  ///< Tensors.
  std::int64_t reserved_bytes{0};   ///< Tensors and torch's cache.
  std::int64_t peak_bytes{0};       ///< The most that context and reserved memory were together.
  std::int64_t others_bytes{-1};    ///< Of other processes on the device; −1: nobody knows.
  std::string others{};             ///< Who they are, in words.
};
/// "9.0 GiB held (peak 9.5 GiB): tensors 8.0 GiB, cache 512.0 MiB, context 500.0 MiB; limit 20.0
/// GiB", and other processes where they are known.
[[nodiscard]] std::string device_words(const DeviceStatus& device);

struct RunStatus {
  /// starting running paused evaluating stopped finished failed, "paused: disk full".
  std::string status{"starting"};
  std::int64_t step{0};
  std::int64_t steps_total{
      0};  ///< 0: before the first step; kUnknownSteps: the data has no length.
  std::int64_t epoch{0};
  std::int64_t epochs{0};
  double loss{kUnknownNumber};
  double rows_per_second{0.0};
  double seconds{0.0};
  double seconds_left{kUnknownNumber};
  std::int64_t limit_bytes{0};
  std::int64_t resident_bytes{0};
  std::int64_t peak_resident_bytes{0};
  std::string limit_source{};  ///< "6.0 GiB (user: plimsoll limit)": the one asked for last.
  std::int64_t leased_bytes{0};
  std::int64_t leased_peak_bytes{0};
  std::array<std::int64_t, kTagCount> leased_by_tag{};
  std::int64_t before_bytes{-1};            ///< Resident before the run: code, interpreter, …
  std::int64_t before_anonymous_bytes{-1};  ///< … libraries; of that, no part of a file. −1: old.
  std::vector<DeviceStatus> devices{};
  double hit_rate{0.0};
  std::int64_t checkpoint_step{-1};  ///< −1 before the first.
  std::string message{};             ///< Of the error, when failed; the reason, when stopped.
  std::string cause{};  ///< Of the end: "finished", "asked", "memory", "refused", "disk", "error".

  /// Fills the memory figures from the governor's ledger and /proc.
  void read_memory(const Governor& governor);
  /// "29 of 60, epoch 2 of 3": the step and the epoch. A total that is not known is left out.
  [[nodiscard]] std::string place() const;
};

/// What another process sees of a run; for `plimsoll status`.
struct RunView {
  RunStatus status{};
  std::string recipe{};      ///< "cosir", "can-kd"; "" when run.toml cannot be read.
  std::string unit{"rows"};  ///< What its recipe counts; only rows are in a store.
  bool alive{false};         ///< Some process holds the run's lock.
  int pid{0};                ///< Of that process, or of the last one.
  double age_seconds{0.0};   ///< Since status.json was written.
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] std::string to_text() const;
};

class Recorder;
class RoomWait;
struct Inside;

class RunFolder {
 public:
  /// Makes the folder of a new run and writes run.toml.
  /// Of several processes that make the same folder one does, and the others are told.
  /// Errors: kInvalidArgument when it is a run already ("use plimsoll resume"), is not empty, or
  ///         another process makes it; kIo. After an error nothing new is left behind, and nothing
  ///         of another process is removed.
  static Result<RunFolder> create(const std::filesystem::path& root, const std::string& run_toml);

  /// Opens the folder of an existing run to go on with it. Removes .stop, .pause and .limit.
  /// Errors: kNotFound (no run there), kInvalidArgument (another process trains in it).
  static Result<RunFolder> open(const std::filesystem::path& root);

  /// Opens it to read, which others may do at the same time, and changes nothing in it: the folder
  /// may be read-only. Errors: as open().
  static Result<RunFolder> open_to_read(const std::filesystem::path& root);

  /// Opens it while nobody trains, evaluates or does this, and says nothing in it: how the run
  /// ended stays. Errors: as open().
  static Result<RunFolder> open_at_rest(const std::filesystem::path& root);

  RunFolder(RunFolder&&) noexcept = default;
  RunFolder& operator=(RunFolder&&) noexcept;
  ~RunFolder();

  /// Writes identity.json when there is none, or when all that differs may change; otherwise
  /// compares. Errors: kInvalidArgument naming each key that differs, with both values; kCorrupt.
  Result<void> check_identity(const RunIdentity& identity, const IdentityChanges& allowed = {});

  /// Compares the fingerprint of data at `data` with the one that the run was trained on.
  /// Errors: kInvalidArgument naming both; kNotFound before the run knew its data; kCorrupt.
  Result<void> check_data(const std::string& data, const std::string& fingerprint) const;

  /// Replaces run.toml (a resumption that changed a free key).
  Result<void> write_config(const std::string& run_toml);

  /// Appends one line to events.jsonl: {"time":…,"event":NAME,fields…}, in one write.
  Result<void> event(const char* name, std::span<const EventField> fields);
  Result<void> event(const char* name, std::initializer_list<EventField> fields) {
    return event(name, std::span<const EventField>(fields.begin(), fields.size()));
  }

  /// From here on a thread keeps looks at the memory in looks.bin (recorder.h), until the folder is
  /// closed. A run whose looks cannot be kept goes on, with a warning in its events.
  void record(const Governor& governor, std::function<Inside()> inside);

  /// Takes a last look, and ends the thread.
  void end_record() noexcept;

  /// What the loop does from now on, for the looks; "": it trains.
  void phase(std::string_view name);

  /// Replaces status.json, at most every 0.5 s unless `force`. Where the disk is full it is left
  /// out, as are events until there is room: no error.
  Result<void> write_status(const RunStatus& status, bool force = false);

  /// Whether a write of its checkpoints or tables waits, as the disk is full: it goes on by itself
  /// when there is room, or fails when the run is asked to stop.
  [[nodiscard]] bool waits_for_room() const;
  /// Waits while one does. False: it was given up.
  bool wait_for_room() const;

  /// The step every part of the run agrees on; none before the first publish().
  /// Errors: kCorrupt, kIo.
  [[nodiscard]] Result<std::optional<std::int64_t>> published_step() const;

  /// Names `step` in the manifest (synced), then deletes all but the newest `keep` checkpoints,
  /// in numeric order, and never the published one.
  /// Requires: checkpoint_path(step) is complete and every table has committed `step`.
  Result<void> publish(std::int64_t step, std::int64_t keep);

  /// Steps of the checkpoints there are, ascending by number.
  [[nodiscard]] Result<std::vector<std::int64_t>> checkpoint_steps() const;

  /// Deletes checkpoints newer than the published step and half-written ones (after a crash), and
  /// nothing else: backups have other names.
  Result<void> discard_unpublished();

  [[nodiscard]] std::filesystem::path checkpoint_path(std::int64_t step) const;
  [[nodiscard]] const std::filesystem::path& root() const noexcept { return root_; }
  [[nodiscard]] std::filesystem::path embeddings() const { return root_ / "embeddings"; }
  [[nodiscard]] std::filesystem::path metrics() const { return root_ / "metrics"; }
  [[nodiscard]] std::filesystem::path config_file() const { return root_ / "run.toml"; }

  /// True when some process holds this run's lock.
  [[nodiscard]] static bool is_locked(const std::filesystem::path& root);

  /// True when `path` holds a run.
  [[nodiscard]] static bool is_run(const std::filesystem::path& path);

  /// What `plimsoll status` shows. Takes no lock. Errors: kNotFound, kCorrupt.
  static Result<RunView> view(const std::filesystem::path& root);

  /// Removes the rows of a run that ended before its first checkpoint. Errors: kIo.
  Result<void> discard_rows();

  /// Removes a new folder again when training failed before its first step left anything to keep.
  void abandon() noexcept;

 private:
  [[nodiscard]] Result<RunIdentity> saved_identity() const;
  explicit RunFolder(std::filesystem::path root) noexcept : root_(std::move(root)) {}
  Result<void> lock();
  Result<void> lock_to_read();
  Result<void> take_lock(RangeLocks::Kind kind);
  [[nodiscard]] Error held_by_another() const;
  void tell_committed(std::int64_t step) const;  // To whoever starts the program again.
  Result<void> open_events();
  Result<void> furnish(const std::string& run_toml);
  void close() noexcept;

  struct Words;
  Words& words();

  std::filesystem::path root_{};
  RangeLocks lock_;                // Of .lock.
  bool created_{false};            // By this object, which holds the lock: abandon() may empty it.
  bool created_directory_{false};  // And remove it.
  // Shared with nobody: their types are known elsewhere.
  std::shared_ptr<Words> words_{};
  std::shared_ptr<RoomWait> room_{};
  std::shared_ptr<Recorder> recorder_{};
};

/// While it is there, writes of the checkpoints and tables of the run in `root` wait where the disk
/// is full and StopSignals are there, by which the wait can be ended.
[[nodiscard]] std::shared_ptr<RoomWait> room_of_run(const std::filesystem::path& root,
                                                    std::function<void(const std::string&)> tell);

/// What RunStatus::cause says of an error: "refused", "disk" or "error".
[[nodiscard]] const char* cause_of(const Error& error) noexcept;

/// Errors: kNotFound when `root` holds no run, with a hint at what shows what else is there.
Result<void> must_be_run(const std::filesystem::path& root);

/// "step-000000120" for 120.
[[nodiscard]] std::string checkpoint_name(std::int64_t step);

/// The processor's instruction set as far as kernels choose by it: "x86-64 avx2 fma avx512f …".
[[nodiscard]] std::string instruction_set();

}  // namespace plimsoll
