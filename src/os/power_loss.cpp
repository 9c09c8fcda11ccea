// SPDX-License-Identifier: Apache-2.0
#include "os/power_loss.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
using Kind = UnsyncedChange::Kind;

std::atomic<bool> recording{false};  // Written under ledger_mutex; read by every file call.
std::mutex
    ledger_mutex;  // Not Mutex: a guard that may be empty has no annotation. Guards the rest.
PowerLossOptions current_options;
std::vector<UnsyncedChange>* ledger = nullptr;  // Null unless recording.

// A descriptor of the kernel's own view of a file: buffered, whatever the writer uses.
class RawFile {
 public:
  RawFile(const std::string& path, int flags) : descriptor_(::open(path.c_str(), flags, 0644)) {}
  ~RawFile() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;
  [[nodiscard]] bool exists() const { return descriptor_ >= 0; }
  [[nodiscard]] std::int64_t size() const {
    struct stat facts {};
    return ::fstat(descriptor_, &facts) == 0 ? facts.st_size : 0;
  }
  [[nodiscard]] std::vector<std::byte> read(std::int64_t offset, std::int64_t bytes) const {
    std::vector<std::byte> out(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
    std::size_t done = 0;
    while (done < out.size()) {
      const ssize_t got = ::pread(descriptor_, out.data() + done, out.size() - done,
                                  offset + static_cast<std::int64_t>(done));
      if (got <= 0) {
        break;
      }
      done += static_cast<std::size_t>(got);
    }
    out.resize(done);
    return out;
  }
  void write(std::int64_t offset, const std::byte* from, std::int64_t bytes) const {
    for (std::int64_t done = 0; done < bytes;) {
      const ssize_t put =
          ::pwrite(descriptor_, from + done, static_cast<std::size_t>(bytes - done), offset + done);
      if (put <= 0) {
        break;
      }
      done += put;
    }
  }
  void resize(std::int64_t bytes) const { std::ignore = ::ftruncate(descriptor_, bytes); }

 private:
  int descriptor_;
};

std::string name_of(const fs::path& path) {
  auto name = fs::absolute(path).lexically_normal();
  return name.has_filename() ? name.string() : name.parent_path().string();
}

std::string parent_of(const std::string& path) {
  return fs::path(path).parent_path().string();
}

bool is_within(const std::string& path, const std::string& root) {
  return path.starts_with(root) && (path.size() == root.size() || path[root.size()] == '/');
}

bool changes_names(const UnsyncedChange& change) {
  return change.kind != Kind::kWrite && change.kind != Kind::kResize;
}

// What is called `path` before the change is called this after it; "" when it is there no more.
std::string after(const std::string& path, const UnsyncedChange& change) {
  const auto moved = [&](const std::string& from, const std::string& to) {
    return to + path.substr(from.size());
  };
  switch (change.kind) {
    case Kind::kRemove:
      return is_within(path, change.path) ? "" : path;
    case Kind::kRename:
      return is_within(path, change.from)   ? moved(change.from, change.path)
             : is_within(path, change.path) ? ""
                                            : path;
    case Kind::kExchange:
      return is_within(path, change.from)   ? moved(change.from, change.path)
             : is_within(path, change.path) ? moved(change.path, change.from)
                                            : path;
    case Kind::kWrite:
    case Kind::kResize:
    case Kind::kCreate:
    case Kind::kMakeDirectory:
      break;
  }
  return path;
}

// The names that a change decides: when it has come to stay, so have those before it.
class SettledNames {
 public:
  [[nodiscard]] bool has(const UnsyncedChange& change) const {
    return names_.count(change.path) != 0 ||
           (!change.from.empty() && names_.count(change.from) != 0);
  }
  void add(const UnsyncedChange& change) {
    names_.insert(change.path);
    if (!change.from.empty()) {
      names_.insert(change.from);
    }
  }

 private:
  std::set<std::string> names_;
};

// ---- Undoing ----------------------------------------------------------------------------------

// One strike: which sectors, sizes and names are settled, going back from the newest change.
class Strike {
 public:
  Strike(const SurvivesFn& survives, std::int64_t sector_bytes,
         const std::pair<fs::path, fs::path>& moved)
      : survives_(survives),
        sector_(sector_bytes),
        old_root_(moved.first.string()),
        new_root_(moved.second.string()) {}

  void go_back_over(std::size_t index, const UnsyncedChange& change) {
    if (changes_names(change)) {
      if (settled_names_.has(change) || survives_(index, 0)) {
        settled_names_.add(change);
        kept_.push_back(&change);
      } else if (!place(change.path).empty()) {
        undo_name(change);
      }
      return;
    }
    if (const std::string path = place(change.path); path.empty()) {
      return;  // Of a file that is there no more.
    } else if (change.kind == Kind::kWrite) {
      write(index, change, path);
    } else {
      resize(index, change, path);
    }
  }

 private:
  // Where what was called `path` is now, after the changes that are kept; "" when nowhere.
  [[nodiscard]] std::string place(std::string path) const {
    for (auto later = kept_.rbegin(); later != kept_.rend() && !path.empty(); ++later) {
      path = after(path, **later);
    }
    return !path.empty() && !old_root_.empty() && is_within(path, old_root_)
               ? new_root_ + path.substr(old_root_.size())
               : path;
  }

  void undo_name(const UnsyncedChange& change) const {
    const std::string path = place(change.path);
    std::error_code ignored;
    switch (change.kind) {
      case Kind::kCreate:
        ::unlink(path.c_str());
        return;
      case Kind::kMakeDirectory:
        fs::remove_all(path, ignored);
        return;
      case Kind::kRemove:
        return restore(path, change);
      case Kind::kRename:
        static_cast<void>(::rename(path.c_str(), place(change.from).c_str()));
        if (change.replaced) {
          restore(path, change);
        }
        return;
      case Kind::kExchange:
        static_cast<void>(::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, place(change.from).c_str(),
                                      RENAME_EXCHANGE));
        return;
      case Kind::kWrite:
      case Kind::kResize:
        return;
    }
  }
  static void restore(const std::string& path, const UnsyncedChange& change) {
    if (change.directory) {
      static_cast<void>(::mkdir(path.c_str(), 0755));
      return;
    }
    const RawFile old(path, O_RDWR | O_CREAT | O_CLOEXEC);
    old.write(0, change.before.data(), static_cast<std::int64_t>(change.before.size()));
  }

  void write(std::size_t index, const UnsyncedChange& change, const std::string& path) {
    const RawFile file(path, O_RDWR | O_CLOEXEC);
    if (!file.exists()) {
      return;
    }
    auto& settled = settled_sectors_[path];
    std::int64_t kept_end = change.file_bytes;
    const std::int64_t first = change.offset / sector_;
    const std::int64_t end = change.offset + change.size;
    const auto had = static_cast<std::int64_t>(change.before.size());
    for (std::int64_t sector = 0; sector < sectors_of(change, sector_); ++sector) {
      const std::int64_t from = std::max(change.offset, (first + sector) * sector_);
      const std::int64_t to = std::min(end, (first + sector + 1) * sector_);
      if (settled.count(first + sector) != 0 || survives_(index, sector)) {
        settled.insert(first + sector);
        kept_end = std::max(kept_end, to);
        continue;
      }
      const std::int64_t known =
          std::clamp<std::int64_t>(had - (from - change.offset), 0, to - from);
      if (known > 0) {
        file.write(from, change.before.data() + (from - change.offset), known);
      }
      const std::vector<std::byte> zeros(static_cast<std::size_t>(to - from - known));
      file.write(from + known, zeros.data(), static_cast<std::int64_t>(zeros.size()));
    }
    if (end == file.size() && kept_end < end) {
      file.resize(kept_end);  // Nothing survives behind here, so the file may not be so long yet.
    }
  }

  void resize(std::size_t index, const UnsyncedChange& change, const std::string& path) const {
    if (survives_(index, 0)) {
      return;
    }
    const RawFile file(path, O_RDWR | O_CLOEXEC);
    if (file.exists()) {
      const auto cut = static_cast<std::int64_t>(change.before.size());
      file.resize(std::max(change.file_bytes, file.size()));
      file.write(change.file_bytes - cut, change.before.data(), cut);
    }
  }

  const SurvivesFn& survives_;
  const std::int64_t sector_;
  const std::string old_root_;
  const std::string new_root_;
  std::map<std::string, std::set<std::int64_t>> settled_sectors_;
  SettledNames settled_names_;               // A later change needs them.
  std::vector<const UnsyncedChange*> kept_;  // Changes of names, the newest first.
};

void go_back(const std::vector<UnsyncedChange>& changes, Strike& strike) {
  for (std::size_t i = changes.size(); i-- > 0;) {
    strike.go_back_over(i, changes[i]);
  }
}

}  // namespace

void record_unsynced(const PowerLossOptions& options, std::vector<UnsyncedChange> unsynced) {
  const std::scoped_lock lock(ledger_mutex);
  delete ledger;  // NOLINT(cppcoreguidelines-owning-memory): no destructor runs at the end.
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory)
  ledger = new std::vector<UnsyncedChange>(std::move(unsynced));
  current_options = options;
  recording.store(true, std::memory_order_relaxed);
}

void stop_recording_unsynced() noexcept {
  const std::scoped_lock lock(ledger_mutex);
  recording.store(false, std::memory_order_relaxed);
  delete std::exchange(ledger, nullptr);  // NOLINT(cppcoreguidelines-owning-memory)
}

bool recording_unsynced() noexcept {
  return recording.load(std::memory_order_relaxed);
}

std::vector<UnsyncedChange> unsynced_changes() {
  const std::scoped_lock lock(ledger_mutex);
  return ledger == nullptr ? std::vector<UnsyncedChange>{} : *ledger;
}

std::int64_t sectors_of(const UnsyncedChange& write, std::int64_t sector_bytes) {
  if (write.kind != Kind::kWrite || write.size == 0) {
    return 1;
  }
  return (write.offset + write.size - 1) / sector_bytes - write.offset / sector_bytes + 1;
}

void strike(const std::vector<UnsyncedChange>& changes, const SurvivesFn& survives,
            std::int64_t sector_bytes, const std::pair<fs::path, fs::path>& moved) {
  Strike strike(survives, sector_bytes, moved);
  go_back(changes, strike);
}

void strike_and_freeze(const SurvivesFn& survives) noexcept {
  ledger_mutex.lock();  // Never unlocked: no other thread of the dying process changes a file now.
  if (ledger != nullptr) {
    Strike strike(survives, current_options.sector_bytes, {});
    go_back(*ledger, strike);
  }
}

// ---- Recording --------------------------------------------------------------------------------

namespace {

// Notes what a removal or a rename does away with; false when there is nothing.
bool note_what_goes(const fs::path& path, UnsyncedChange& change) {
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0) {
    return false;
  }
  change.directory = S_ISDIR(facts.st_mode);
  if (S_ISREG(facts.st_mode)) {
    const RawFile old(path.string(), O_RDONLY | O_CLOEXEC);
    change.before = old.read(0, old.size());
  }
  return true;
}

// What the ledger's change at `index` called `path` is called by now.
std::string name_now(std::string path, std::size_t index) {
  for (std::size_t later = index + 1; later < ledger->size() && !path.empty(); ++later) {
    if (changes_names((*ledger)[later])) {
      path = after(path, (*ledger)[later]);
    }
  }
  return path;
}

}  // namespace

UnsyncedGuard::UnsyncedGuard()
    : lock_(recording_unsynced() ? std::unique_lock(ledger_mutex)
                                 : std::unique_lock<std::mutex>()) {}

UnsyncedGuard UnsyncedGuard::of_write(const fs::path& path, std::int64_t offset,
                                      std::size_t bytes) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  const auto size = static_cast<std::int64_t>(bytes);
  const RawFile file(path.string(), O_RDONLY | O_CLOEXEC);
  if (file.exists()) {
    ledger->push_back({.kind = Kind::kWrite,
                       .path = name_of(path),
                       .offset = offset,
                       .size = size,
                       .file_bytes = file.size(),
                       .before = file.read(offset, size)});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_resize(const fs::path& path, std::int64_t bytes) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  const RawFile file(path.string(), O_RDONLY | O_CLOEXEC);
  if (file.exists()) {
    ledger->push_back({.kind = Kind::kResize,
                       .path = name_of(path),
                       .file_bytes = file.size(),
                       .before = file.read(bytes, std::max<std::int64_t>(file.size() - bytes, 0))});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_create(const fs::path& path) {
  UnsyncedGuard guard = of_remove(path);  // What is there goes first.
  if (guard.lock_ && ledger != nullptr) [[unlikely]] {
    ledger->push_back({.kind = Kind::kCreate, .path = name_of(path)});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_make_directory(const fs::path& path) {
  UnsyncedGuard guard;
  if (guard.lock_ && ledger != nullptr && !fs::exists(path)) [[unlikely]] {
    ledger->push_back({.kind = Kind::kMakeDirectory, .path = name_of(path)});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_remove(const fs::path& path) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  UnsyncedChange change{.kind = Kind::kRemove, .path = name_of(path)};
  if (note_what_goes(path, change)) {
    ledger->push_back(std::move(change));
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_rename(const fs::path& from, const fs::path& to) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  UnsyncedChange change{.kind = Kind::kRename, .path = name_of(to), .from = name_of(from)};
  change.replaced = note_what_goes(to, change);
  ledger->push_back(std::move(change));
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_exchange(const fs::path& one, const fs::path& other) {
  UnsyncedGuard guard;
  if (guard.lock_ && ledger != nullptr) [[unlikely]] {
    ledger->push_back({.kind = Kind::kExchange, .path = name_of(one), .from = name_of(other)});
  }
  return guard;
}

void note_sync(const fs::path& path, bool failed) noexcept {
  const std::scoped_lock lock(ledger_mutex);
  if (ledger == nullptr) {
    return;
  }
  const std::string name = name_of(path);
  std::vector<UnsyncedChange> rest;
  for (std::size_t i = 0; i < ledger->size(); ++i) {
    UnsyncedChange& change = (*ledger)[i];
    const bool data_of_it = !changes_names(change) && name_now(change.path, i) == name;
    change.lost = change.lost || (failed && data_of_it);
    if (change.lost || !data_of_it) {
      rest.push_back(std::move(change));
    }
  }
  ledger->swap(rest);
}

void note_directory_sync(const fs::path& directory) noexcept {
  const std::scoped_lock lock(ledger_mutex);
  if (ledger == nullptr) {
    return;
  }
  const std::string name = name_of(directory);
  std::vector<UnsyncedChange> rest;            // The newest first,
  std::vector<const UnsyncedChange*> durable;  // too. After these, older changes have other names.
  SettledNames settled;
  for (std::size_t i = ledger->size(); i-- > 0;) {
    const UnsyncedChange& change = (*ledger)[i];
    if (changes_names(change) &&
        (settled.has(change) || name_now(parent_of(change.path), i) == name)) {
      settled.add(change);
      durable.push_back(&change);
      continue;
    }
    UnsyncedChange moved = change;
    for (auto later = durable.rbegin(); later != durable.rend(); ++later) {
      moved.path = after(moved.path, **later);
      moved.from = moved.from.empty() ? "" : after(moved.from, **later);
    }
    if (!moved.path.empty()) {
      rest.push_back(std::move(moved));
    }
  }
  ledger->assign(std::make_move_iterator(rest.rbegin()), std::make_move_iterator(rest.rend()));
}

}  // namespace plimsoll
