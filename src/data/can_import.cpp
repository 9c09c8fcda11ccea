// SPDX-License-Identifier: Apache-2.0
//
// import_can: one pass over every file, training files first, since they make the vocabulary (with
// normal_ids they have made it in a pass before).
//
// A node's key is its id until the end, when ids become indices: sorted ids and their indices have
// the same order, so the graphs of training files need not wait for the vocabulary.
// Reading order: include/plimsoll/can_import.h, can_files.h, can_csv.h, can_window.h,
// graph_parts.h, this file.
//
// Threads: as many as asked for, each on a file of its own.   Memory: one slab, planned in Import.
#include "plimsoll/can_import.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/mutex.h"
#include "data/can_csv.h"
#include "data/can_files.h"
#include "data/can_ids.h"
#include "data/can_road.h"
#include "data/can_window.h"
#include "data/disk_room.h"
#include "data/graph_import.h"
#include "data/graph_parts.h"
#include "data/graph_set_format.h"
#include "memory/slab.h"
#include "os/blocked_signals.h"
#include "os/directories.h"
#include "os/file.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Progress = std::function<bool(std::int64_t, std::int64_t)>;

constexpr std::int64_t kPackedBytes = 256 << 10;
constexpr std::size_t kFramesAtOnce = 512;
constexpr std::int64_t kReportBytes = 1 << 20;
constexpr std::int64_t kIdsMost = 1 << 22;  // A float holds every index below 2^24.
constexpr int kThreadsMost = 256;
constexpr int kReaderVersion = 2;  // Of what becomes of the same files. 1 kept a byte of eight.
constexpr const char* kSideFolder = "parts.partial";
constexpr const char* kInputsFile = "inputs.json";

Result<void> check_options(const CanImportOptions& options) {
  const auto bad = [](const std::string& what, const char* advice) {
    return fail(ErrorCode::kInvalidArgument, what, advice);
  };
  if (options.inputs.empty() || options.out.empty()) {
    return bad("no CSV to import, or no folder to make", "name files or folders, and --out (out)");
  }
  if (options.window < 1 || options.window > kWindowMost) {
    return bad(fmt::format("a window of {} frames", options.window),
               "--window (window) is from 1 to 65535");
  }
  if (options.stride < 1 || options.stride > INT32_MAX) {
    return bad(fmt::format("a stride of {} frames", options.stride),
               "--stride (stride) is at least 1");
  }
  if (!(options.validation >= 0.0 && options.validation < 1.0)) {
    return bad(fmt::format("{} of the graphs held out", options.validation),
               "--validation (validation) is a share: at least 0 and below 1");
  }
  if (options.ids_max < 1 || options.ids_max > kIdsMost) {
    return bad(fmt::format("at most {} ids", options.ids_max),
               "--ids-max (ids_max) is from 1 to 4194304");
  }
  if (options.threads < 1 || options.threads > kThreadsMost || options.chunk_bytes < 1 ||
      options.chunk_bytes > 1 << 30) {
    return bad(fmt::format("{} threads, {} bytes at a time", options.threads, options.chunk_bytes),
               "threads are 1 to 256, chunk_bytes 1 to 2^30");
  }
  if (options.columns.size() != 4) {
    return bad(fmt::format("{} names of columns", options.columns.size()),
               "--columns (columns) names four: time, id, payload and label");
  }
  if (options.normal_ids && !options.vocabulary.empty()) {
    return bad("both --normal-ids (normal_ids) and --vocabulary (vocabulary)",
               "a vocabulary says all ids; leave one of them out");
  }
  return {};
}

// Whatever decides the graphs beside the files.
std::string options_text(const CanImportOptions& options,
                         const std::optional<std::vector<std::uint32_t>>& vocabulary) {
  const std::uint32_t ids = vocabulary ? crc32c(std::as_bytes(std::span(*vocabulary))) : 0;
  return fmt::format(
      "reader={};window={};stride={};validation={};seed={};columns={};dialect={};skip_bad={};"
      "vocabulary={}",
      kReaderVersion, options.window, options.stride, options.validation, options.seed,
      fmt::join(options.columns, ","), kCanDialects[static_cast<std::size_t>(options.dialect)],
      options.skip_bad,
      vocabulary ? fmt::format("{}:{:08x}", vocabulary->size(), ids)
                 : std::string(options.normal_ids ? "normal" : "own"));
}

// Labels lie beside the files; empty where there are none.
Result<std::string> road_text(const CanFiles& found) {
  std::uint32_t crc = 0;
  fs::path folder;
  for (const CanFile& file : found.files) {
    std::error_code status;
    const fs::path path = file.path.parent_path() / kRoadMetadata;
    if (std::exchange(folder, file.path.parent_path()) == file.path.parent_path() ||
        !fs::exists(path, status)) {
      continue;
    }
    PLIMSOLL_TRY(const std::string text, read_small_file(path, kRoadMetadataMost));
    crc = crc32c(std::as_bytes(std::span(text)), crc);
  }
  return crc == 0 ? std::string() : fmt::format(";road={:08x}", crc);
}

Result<std::optional<std::vector<std::uint32_t>>> given_vocabulary(
    Governor governor, const CanImportOptions& options) {
  std::optional<std::vector<std::uint32_t>> ids;
  if (!options.vocabulary.empty()) {
    PLIMSOLL_TRY(const GraphSet set,
                 GraphSet::open(governor, {.directory = options.vocabulary, .cache_bytes = 0}));
    ids.emplace();
    for (const std::int64_t id : set.vocabulary()) {
      ids->push_back(static_cast<std::uint32_t>(id));
    }
  }
  return ids;
}

// ---- Has anything changed? ----

Result<std::uint32_t> content_crc(const fs::path& path, std::span<std::byte> buffer) {
  PLIMSOLL_TRY(CanBytes bytes, CanBytes::open(path, buffer));
  PLIMSOLL_TRY_VOID(bytes.skip_rest());
  return bytes.crc32c();
}

Json inputs_json(const std::string& fingerprint, const std::vector<CanFile>& files) {
  Json list = Json::array();
  for (const CanFile& file : files) {
    list.push_back({{"name", file.name}, {"modified_ns", file.modified_ns}});
  }
  return {{"fingerprint", fingerprint}, {"files", list}};
}

// True when `info` is what these files and options would give. Files whose time of change is not
// the one noted are read and compared by content.
Result<bool> unchanged(const CanImportOptions& options, const CanFiles& found,
                       const std::string& text, const GraphSetInfo& info) {
  bool same = info.options == text && info.files.size() == found.files.size() &&
              info.excluded_files == found.excluded;
  for (std::size_t i = 0; same && i < found.files.size(); ++i) {
    same = info.files[i].name == found.files[i].name && info.files[i].bytes == found.files[i].bytes;
  }
  if (!same) {
    return false;
  }
  const auto noted = read_small_file(options.out / kInputsFile, 1 << 26);
  if (noted && Json::parse(*noted, nullptr, false) == inputs_json(info.fingerprint, found.files)) {
    return true;
  }
  std::vector<std::byte> buffer(kPackedBytes);
  for (std::size_t i = 0; i < found.files.size(); ++i) {
    PLIMSOLL_TRY(const std::uint32_t crc, content_crc(found.files[i].path, buffer));
    if (crc != info.files[i].crc32c) {
      return false;
    }
  }
  return true;
}

// ---- The folder ----

// Made, locked and, unless the import was kept, cleared again.
class OutFolder {
 public:
  /// Errors: kInvalidArgument (something else is in it, or another import is at work), kIo.
  static Result<OutFolder> open(const fs::path& path) {
    OutFolder folder;
    std::error_code status;
    folder.path_ = path;
    PLIMSOLL_TRY(folder.made_, make_directories(path));
    folder.descriptor_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder.descriptor_ < 0) {
      return fail_io(errno, path.string());
    }
    if (::flock(folder.descriptor_, LOCK_EX | LOCK_NB) != 0) {
      ::close(std::exchange(folder.descriptor_, -1));  // What is in it belongs to who has the lock.
      return fail(ErrorCode::kInvalidArgument, path.string() + ": another import is writing to it",
                  "wait for it, or choose another folder");
    }
    if (!fs::exists(path / kGraphSetFile, status)) {
      PLIMSOLL_TRY(const auto names, names_in(path));
      for (const std::string& name : names) {
        if (name != kInputsFile && !name.ends_with(".partial")) {
          return fail(ErrorCode::kInvalidArgument,
                      fmt::format("{}: holds \"{}\", which is no graph set", path.string(), name),
                      "choose an empty folder");
        }
      }
    }
    folder.clear_side_files();  // Of an import that was killed: nobody else has the lock.
    return folder;
  }
  OutFolder() noexcept = default;
  OutFolder(OutFolder&& other) noexcept
      : path_(std::move(other.path_)),
        descriptor_(std::exchange(other.descriptor_, -1)),
        made_(std::exchange(other.made_, false)) {}
  OutFolder& operator=(OutFolder&&) = delete;
  ~OutFolder() {
    if (descriptor_ < 0) {
      return;
    }
    clear_side_files();
    if (made_) {
      static_cast<void>(remove_file(path_));  // Only when it is empty.
    }
    ::close(descriptor_);
  }

  [[nodiscard]] fs::path side() const { return path_ / kSideFolder; }
  void keep() noexcept { made_ = false; }

 private:
  void clear_side_files() const noexcept {
    static_cast<void>(remove_tree(path_ / kSideFolder));
    static_cast<void>(remove_file(path_ / (std::string(kGraphSetFile) + ".partial")));
  }

  fs::path path_;
  int descriptor_{-1};
  bool made_{false};
};

// ---- Files to side files ----

// What one thread has, all of it from the slab.
struct Desk {
  Desk(Slab& slab, const CanImportOptions& options)
      : packed(slab.take<std::byte>(kPackedBytes)),
        text(slab.take<std::byte>(options.chunk_bytes + kCanLineMax)),
        batch(slab.take<CanFrame>(kFramesAtOnce)),
        frames(slab.take<CanFrame>(options.window + 1)),
        keys(slab.take<std::uint32_t>(options.window + 1)),
        window(slab, options.window),
        ids(slab, options.ids_max),
        parts(GraphPart::take_buffers(slab, options.window)) {}
  static std::int64_t slab_bytes(const CanImportOptions& options) {
    return kPackedBytes + options.chunk_bytes + kCanLineMax +
           static_cast<std::int64_t>(
               (kFramesAtOnce + static_cast<std::size_t>(options.window) + 1) * sizeof(CanFrame)) +
           (options.window + 1) * 4 + CanWindow::slab_bytes(options.window) +
           CanIds::slab_bytes(options.ids_max) + GraphPart::slab_bytes(options.window) + 64 * 6;
  }

  std::span<std::byte> packed;
  std::span<std::byte> text;
  std::span<CanFrame> batch;
  std::span<CanFrame> frames;  // Of the window being filled, and the one after it.
  std::span<std::uint32_t> keys;
  CanWindow window;
  CanIds ids;
  GraphPart::Buffers parts;
};

// The windows of one file, as its frames come by.
class Windows {
 public:
  Windows(Desk& desk, GraphPart& part, const CanImportOptions& options)
      : desk_(desk), part_(part), window_(options.window), stride_(options.stride) {}

  Result<void> add(const CanFrame& frame, std::uint32_t key) {
    ++frames_;
    if (skip_ > 0) {
      --skip_;
      return {};
    }
    desk_.frames[held_] = frame;
    desk_.keys[held_] = key;
    if (++held_ <= static_cast<std::size_t>(window_)) {
      return {};
    }
    PLIMSOLL_TRY_VOID(build());
    const auto gone = static_cast<std::size_t>(std::min(stride_, window_ + 1));
    skip_ = stride_ - static_cast<std::int64_t>(gone);
    held_ -= gone;
    std::copy_n(desk_.frames.begin() + static_cast<std::ptrdiff_t>(gone), held_,
                desk_.frames.begin());
    std::copy_n(desk_.keys.begin() + static_cast<std::ptrdiff_t>(gone), held_, desk_.keys.begin());
    return {};
  }

  /// A file shorter than a window is one window. Returns the frames that are a row of none.
  Result<std::int64_t> finish() {
    if (graphs_ > 0) {
      const std::int64_t rows = (graphs_ - 1) * std::min(stride_, window_) + window_;
      return frames_ - rows;
    }
    if (held_ < 2) {
      return frames_;
    }
    PLIMSOLL_TRY_VOID(build());
    return 1;
  }

 private:
  Result<void> build() {
    desk_.window.build(desk_.frames.first(held_), desk_.keys.first(held_));
    ++graphs_;
    const CanWindow& graph = desk_.window;
    return part_.append({.x = graph.x(),
                         .edge_attr = graph.edge_attr(),
                         .ends = graph.ends(),
                         .attack = graph.attack()});
  }

  Desk& desk_;
  GraphPart& part_;
  const std::int64_t window_;
  const std::int64_t stride_;
  std::size_t held_{0};
  std::int64_t skip_{0};  // Frames until the next window begins.
  std::int64_t frames_{0};
  std::int64_t graphs_{0};
};

class Import {
 public:
  Import(Governor governor, const CanImportOptions& options, const CanFiles& found,
         const Progress& progress)
      : governor_(governor), options_(options), found_(found), progress_(progress) {}

  Result<void> run(const fs::path& folder, GraphSetInfo& info,
                   std::optional<std::vector<std::uint32_t>> vocabulary);

 private:
  using Reader = Result<GraphFileInfo> (Import::*)(std::size_t, Desk&);
  Result<GraphFileInfo> read_file(std::size_t number, Desk& desk);
  Result<GraphFileInfo> read_normal_ids(std::size_t number, Desk& desk);
  Result<void> read_frames(CanCsv& csv, Windows& windows, std::int64_t& unknown, Desk& desk);
  Result<void> read_files(const std::vector<std::size_t>& numbers, Reader reader);
  void work(Desk& desk, const std::vector<std::size_t>& numbers, Reader reader);
  CanCsv::Look counting();
  Result<CanCsv> open_csv(const CanFile& file, Desk& desk);
  [[nodiscard]] tl::unexpected<Error> nothing_left(const GraphSetInfo& info) const;
  [[nodiscard]] tl::unexpected<Error> too_many_ids() const;
  Result<std::vector<std::uint32_t>> merged_ids(Slab& slab);
  [[nodiscard]] bool report();

  Governor governor_;
  const CanImportOptions& options_;
  const CanFiles& found_;
  const Progress& progress_;
  fs::path folder_;
  std::int64_t total_bytes_{0};
  std::vector<std::unique_ptr<Desk>> desks_;
  std::optional<std::vector<std::uint32_t>> vocabulary_;       // Once it is known; sorted.
  std::vector<std::optional<Result<GraphFileInfo>>> results_;  // Each written by its thread.
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes_;   // Nodes and edges, by file.
  std::atomic<std::size_t> next_{0};         // Of the files being read, which to take next.
  std::atomic<std::int64_t> done_bytes_{0};  // Added to by every thread, shown by the caller's.
  std::atomic<bool> stop_{false};            // Take no more files: one failed, or cancelled.
  std::atomic<bool> cancelled_{false};
  Mutex mutex_;
  CondVar changed_;  // A thread has ended, or some more has been read.
  std::size_t working_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Threads that have not ended.
};

bool Import::report() {
  return !progress_ || progress_(std::min(done_bytes_.load(), total_bytes_), total_bytes_);
}

tl::unexpected<Error> Import::too_many_ids() const {
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("more than {} different ids", options_.ids_max),
              "raise --ids-max (ids_max), if these are CAN frames at all");
}

// Counts what is read of a file. The caller's thread looks at it by the unpacked bytes, of which
// there may be a thousand in one of the file's.
CanCsv::Look Import::counting() {
  return [this, seen = std::int64_t{0}, unpacked = std::int64_t{0}](std::int64_t position,
                                                                    std::int64_t bytes) mutable {
    done_bytes_ += position - std::exchange(seen, position);
    const std::int64_t before = std::exchange(unpacked, unpacked + bytes);
    if (before / kReportBytes != unpacked / kReportBytes) {
      changed_.notify_all();
    }
    return !cancelled_;
  };
}

Result<CanCsv> Import::open_csv(const CanFile& file, Desk& desk) {
  PLIMSOLL_TRY(CanBytes bytes, CanBytes::open(file.path, desk.packed));
  CanCsvOptions options{.columns = options_.columns,
                        .name = file.path.string(),
                        .skip_bad = options_.skip_bad,
                        .dialect = options_.dialect};
  if (options_.dialect == CanDialect::kAuto || options_.dialect == CanDialect::kRoad) {
    PLIMSOLL_TRY(options.road, road_labels(file.path));
  }
  if (options_.dialect == CanDialect::kRoad && !options.road) {
    return fail(ErrorCode::kNotFound,
                fmt::format("{}: no {} beside it that knows it", options.name, kRoadMetadata),
                "put it there, or pass --dialect candump (dialect) to take all frames as normal");
  }
  return CanCsv(std::move(bytes), desk.text, std::move(options), counting());
}

// What is skipped is counted when the file is read for its graphs.
Result<GraphFileInfo> Import::read_normal_ids(std::size_t number, Desk& desk) {
  const CanFile& file = found_.files[number];
  PLIMSOLL_TRY(CanCsv csv, open_csv(file, desk));
  for (;;) {
    PLIMSOLL_TRY(const std::int64_t count, csv.read(desk.batch));
    if (count == 0) {
      return GraphFileInfo{};
    }
    for (const CanFrame& frame : desk.batch.first(static_cast<std::size_t>(count))) {
      if (frame.attack == 0 && !desk.ids.insert(frame.id)) {
        return too_many_ids();
      }
    }
  }
}

Result<void> Import::read_frames(CanCsv& csv, Windows& windows, std::int64_t& unknown, Desk& desk) {
  for (;;) {
    PLIMSOLL_TRY(const std::int64_t count, csv.read(desk.batch));
    if (count == 0) {
      return {};
    }
    for (const CanFrame& frame : desk.batch.first(static_cast<std::size_t>(count))) {
      std::uint32_t key = frame.id;
      if (vocabulary_) {
        if (!std::binary_search(vocabulary_->begin(), vocabulary_->end(), key)) {
          key = kUnknownId;
          ++unknown;
        }
      } else if (!desk.ids.insert(key)) {
        return too_many_ids();
      }
      PLIMSOLL_TRY_VOID(windows.add(frame, key));
    }
  }
}

Result<GraphFileInfo> Import::read_file(std::size_t number, Desk& desk) {
  const CanFile& file = found_.files[number];
  PLIMSOLL_TRY(CanCsv csv, open_csv(file, desk));
  PLIMSOLL_TRY(GraphPart part, GraphPart::create(folder_, number, desk.parts, options_.window));
  Windows windows(desk, part, options_);
  std::int64_t unknown = 0;
  PLIMSOLL_TRY_VOID(read_frames(csv, windows, unknown, desk));
  PLIMSOLL_TRY(const std::int64_t left_over, windows.finish());
  PLIMSOLL_TRY_VOID(part.finish());
  PLIMSOLL_TRY_VOID(csv.bytes().skip_rest());
  GraphFileInfo info = csv.counts();
  info.name = file.name;
  info.test = file.test;
  info.bytes = csv.bytes().file_bytes();
  info.crc32c = csv.bytes().crc32c();
  info.graphs = part.graphs();
  info.attack_graphs = part.attack_graphs();
  info.left_over_frames = left_over;
  info.unknown_id_frames = unknown;
  sizes_[number] = {part.nodes(), part.edges()};
  return info;
}

void Import::work(Desk& desk, const std::vector<std::size_t>& numbers, Reader reader) {
  pthread_setname_np(pthread_self(), "pl-can");
  for (;;) {
    const std::size_t at = next_++;
    if (at >= numbers.size() || stop_) {
      break;
    }
    auto& result = results_[numbers[at]];
    try {
      result = (this->*reader)(numbers[at], desk);
    } catch (const std::exception& error) {
      result =
          fail(ErrorCode::kInternal, found_.files[numbers[at]].path.string() + ": " + error.what());
    }
    if (!*result) {
      stop_ = true;
    }
  }
  const MutexLock lock(mutex_);
  --working_;
  changed_.notify_all();
}

// Files are begun in their order, and what was begun is ended: the first error is always the same.
Result<void> Import::read_files(const std::vector<std::size_t>& numbers, Reader reader) {
  next_ = 0;
  {
    std::vector<std::jthread> threads;  // Joined before the results are looked at.
    MutexLock lock(mutex_);
    working_ = desks_.size();
    {
      const BlockedSignals blocked;
      for (const auto& desk : desks_) {
        threads.emplace_back([&, own = desk.get()] { work(*own, numbers, reader); });
      }
    }
    while (working_ > 0) {
      changed_.wait(mutex_);
      lock.unlock();
      if (!report()) {
        cancelled_ = stop_ = true;
      }
      lock.lock();
    }
  }
  for (const std::size_t number : numbers) {
    if (results_[number] && !*results_[number]) {
      return tl::unexpected(results_[number]->error());
    }
  }
  if (!report() || cancelled_) {
    return fail(ErrorCode::kInvalidArgument, options_.out.string() + ": import cancelled");
  }
  return {};
}

tl::unexpected<Error> Import::nothing_left(const GraphSetInfo& info) const {
  std::int64_t skipped = 0;
  std::string first;
  for (const GraphFileInfo& file : info.files) {
    skipped += file.skipped_rows() + file.damaged_ends;
    first = first.empty() ? file.first_skipped : first;
  }
  if (skipped == 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: no file has two frames to make a graph of", options_.out.string()),
                "name files with frames in them");
  }
  std::string reasons;
  for (const GraphSkipped& reason : kGraphSkipped) {
    std::int64_t count = 0;
    for (const GraphFileInfo& file : info.files) {
      count += file.*reason.count;
    }
    reasons +=
        count == 0 ? "" : fmt::format("{}{} {}", reasons.empty() ? "" : ", ", count, reason.text);
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: no file has two frames to make a graph of: {}; the first: {}",
                          options_.out.string(), reasons, first),
              "leave out --skip-bad (skip_bad) to see a row, or pass --dialect (dialect)");
}

Result<std::vector<std::uint32_t>> Import::merged_ids(Slab& slab) {
  CanIds all(slab, options_.ids_max);
  for (const auto& desk : desks_) {
    for (const std::uint32_t id : desk->ids.sorted()) {
      if (!all.insert(id)) {
        return too_many_ids();
      }
    }
  }
  return all.sorted();
}

Result<void> Import::run(const fs::path& folder, GraphSetInfo& info,
                         std::optional<std::vector<std::uint32_t>> vocabulary) {
  folder_ = folder;
  vocabulary_ = std::move(vocabulary);
  std::vector<std::size_t> first;
  std::vector<std::size_t> second;
  const bool training = std::any_of(found_.files.begin(), found_.files.end(),
                                    [](const CanFile& file) { return !file.test; });
  for (std::size_t i = 0; i < found_.files.size(); ++i) {
    const bool later = training && found_.files[i].test;
    total_bytes_ += found_.files[i].bytes * (options_.normal_ids && !later ? 2 : 1);
    (later ? second : first).push_back(i);
  }
  results_.resize(found_.files.size());
  sizes_.resize(found_.files.size());
  const auto threads =
      std::min<std::int64_t>(options_.threads, static_cast<std::int64_t>(found_.files.size()));
  PLIMSOLL_TRY(const Lease unpacking, governor_.reserve(Tag::kOther, threads * kUnpackBytes));
  PLIMSOLL_TRY(Slab slab, Slab::create(governor_, Tag::kOther,
                                       threads * Desk::slab_bytes(options_) +
                                           CanIds::slab_bytes(options_.ids_max) +
                                           join_buffer_bytes(options_.window) + 64));
  for (std::int64_t i = 0; i < threads; ++i) {
    desks_.push_back(std::make_unique<Desk>(slab, options_));
  }
  if (options_.normal_ids) {
    PLIMSOLL_TRY_VOID(read_files(first, &Import::read_normal_ids));
    PLIMSOLL_TRY(vocabulary_, merged_ids(slab));
  }
  PLIMSOLL_TRY_VOID(read_files(first, &Import::read_file));
  if (!vocabulary_) {
    PLIMSOLL_TRY(vocabulary_, merged_ids(slab));
  }
  PLIMSOLL_TRY_VOID(read_files(second, &Import::read_file));

  for (std::size_t i = 0; i < results_.size(); ++i) {
    info.files.push_back(**results_[i]);
    info.graphs += info.files.back().graphs;
    info.nodes += sizes_[i].first;
    info.edges += sizes_[i].second;
  }
  if (info.graphs == 0) {
    return nothing_left(info);
  }
  return join_graphs(governor_, options_, folder_, *vocabulary_,
                     slab.take<std::byte>(join_buffer_bytes(options_.window)), info,
                     [this] { return report(); });
}

}  // namespace

Result<CanImport> import_can(Governor governor, const CanImportOptions& options,
                             const Progress& progress) {
  PLIMSOLL_TRY_VOID(check_options(options));
  PLIMSOLL_TRY(const CanFiles found, find_can_files(options));
  PLIMSOLL_TRY(auto vocabulary, given_vocabulary(governor, options));
  const bool saved = is_saved_graphs(found);
  if (saved && options.normal_ids) {
    return fail(ErrorCode::kInvalidArgument,
                options.out.string() + ": --normal-ids (normal_ids) of saved graphs without frames",
                "leave it out, or import the CSV files they were made of");
  }
  std::string text = options_text(options, vocabulary);
  if (saved) {
    PLIMSOLL_TRY(const std::string mappings, saved_graphs_text(found));
    text += mappings;
  }
  if (options.dialect == CanDialect::kAuto || options.dialect == CanDialect::kRoad) {
    PLIMSOLL_TRY(const std::string road, road_text(found));
    text += road;
  }
  PLIMSOLL_TRY(OutFolder folder, OutFolder::open(options.out));
  std::error_code status;
  if (!options.rebuild && fs::exists(options.out / kGraphSetFile, status)) {
    if (const auto old = GraphSet::inspect(options.out)) {
      PLIMSOLL_TRY(const bool same, unchanged(options, found, text, *old));
      if (same) {
        folder.keep();
        return CanImport{.info = *old, .reused = true};
      }
    }
  }
  PLIMSOLL_TRY_VOID(make_directories(folder.side()));
  GraphSetInfo info;
  info.window = options.window;
  info.stride = options.stride;
  info.seed = options.seed;
  info.validation = options.validation;
  info.excluded_files = found.excluded;
  info.options = text;
  if (saved) {
    PLIMSOLL_TRY_VOID(import_saved_graphs(governor, options, found, folder.side(), info,
                                          std::move(vocabulary), progress));
  } else {
    PLIMSOLL_TRY_VOID(
        Import(governor, options, found, progress).run(folder.side(), info, std::move(vocabulary)));
  }
  folder.keep();
  // Only saves reading the inputs the next time; the set itself is already in place.
  PLIMSOLL_TRY_VOID(
      replace_file(options.out / kInputsFile, inputs_json(info.fingerprint, found.files).dump()));
  PLIMSOLL_TRY(info, GraphSet::inspect(options.out));
  return CanImport{.info = std::move(info), .reused = false};
}

}  // namespace plimsoll
