// SPDX-License-Identifier: Apache-2.0
#include "os/power_loss.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
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
PowerLossOptions current;
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
  void resize(std::int64_t bytes) const { static_cast<void>(::ftruncate(descriptor_, bytes)); }

 private:
  int descriptor_;
};

std::string parent_of(const std::string& path) {
  const auto parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.lexically_normal().string();
}

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
    switch (change.kind) {
      case Kind::kWrite:
        return write(index, change);
      case Kind::kResize:
        return resize(index, change);
      case Kind::kCreate:
        if (settled_names_.count(change.path) == 0 && !survives_(index, 0)) {
          ::unlink(place(change.path).c_str());
        }
        return;
      case Kind::kRename:
        return rename(index, change);
    }
  }

 private:
  [[nodiscard]] std::string place(const std::string& path) const {
    return !old_root_.empty() && path.starts_with(old_root_)
               ? new_root_ + path.substr(old_root_.size())
               : path;
  }

  void write(std::size_t index, const UnsyncedChange& change) {
    const RawFile file(place(change.path), O_RDWR | O_CLOEXEC);
    if (!file.exists()) {
      return;
    }
    auto& settled = settled_sectors_[change.path];
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

  void resize(std::size_t index, const UnsyncedChange& change) {
    if (survives_(index, 0)) {
      return;
    }
    const RawFile file(place(change.path), O_RDWR | O_CLOEXEC);
    if (file.exists()) {
      const auto cut = static_cast<std::int64_t>(change.before.size());
      file.resize(std::max(change.file_bytes, file.size()));
      file.write(change.file_bytes - cut, change.before.data(), cut);
    }
  }

  void rename(std::size_t index, const UnsyncedChange& change) {
    if (settled_names_.count(change.path) != 0 || survives_(index, 0)) {
      settled_names_.insert(change.path);
      settled_names_.insert(change.from);
      return;
    }
    const std::string to = place(change.path);
    static_cast<void>(::rename(to.c_str(), place(change.from).c_str()));
    if (change.replaced) {
      const RawFile old(to, O_RDWR | O_CREAT | O_CLOEXEC);
      old.write(0, change.before.data(), static_cast<std::int64_t>(change.before.size()));
    }
  }

  const SurvivesFn& survives_;
  const std::int64_t sector_;
  const std::string old_root_;
  const std::string new_root_;
  std::map<std::string, std::set<std::int64_t>> settled_sectors_;
  std::set<std::string> settled_names_;  // A later change needs them.
};

void go_back(const std::vector<UnsyncedChange>& changes, Strike& strike) {
  for (std::size_t i = changes.size(); i-- > 0;) {
    strike.go_back_over(i, changes[i]);
  }
}

}  // namespace

void record_unsynced(const PowerLossOptions& options, std::vector<UnsyncedChange> unsynced) {
  const std::scoped_lock lock(ledger_mutex);
  delete ledger;
  ledger = new std::vector<UnsyncedChange>(std::move(unsynced));
  current = options;
  recording.store(true, std::memory_order_relaxed);
}

void stop_recording_unsynced() noexcept {
  const std::scoped_lock lock(ledger_mutex);
  recording.store(false, std::memory_order_relaxed);
  delete std::exchange(ledger, nullptr);
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
    Strike strike(survives, current.sector_bytes, {});
    go_back(*ledger, strike);
  }
}

// ---- Recording --------------------------------------------------------------------------------

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
                       .path = path.string(),
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
                       .path = path.string(),
                       .file_bytes = file.size(),
                       .before = file.read(bytes, std::max<std::int64_t>(file.size() - bytes, 0))});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_create(const fs::path& path) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  const RawFile file(path.string(), O_RDONLY | O_CLOEXEC);
  if (!file.exists()) {
    ledger->push_back({.kind = Kind::kCreate, .path = path.string()});
  } else if (file.size() > 0) {
    ledger->push_back({.kind = Kind::kResize,
                       .path = path.string(),
                       .file_bytes = file.size(),
                       .before = file.read(0, file.size())});
  }
  return guard;
}

UnsyncedGuard UnsyncedGuard::of_rename(const fs::path& from, const fs::path& to) {
  UnsyncedGuard guard;
  if (!guard.lock_ || ledger == nullptr) [[likely]] {
    return guard;
  }
  UnsyncedChange change{.kind = Kind::kRename, .path = to.string(), .from = from.string()};
  const RawFile old(to.string(), O_RDONLY | O_CLOEXEC);
  if (old.exists()) {
    change.replaced = true;
    change.before = old.read(0, old.size());
  }
  ledger->push_back(std::move(change));
  return guard;
}

void note_sync(const fs::path& path, bool failed) noexcept {
  const std::scoped_lock lock(ledger_mutex);
  if (ledger == nullptr) {
    return;
  }
  const std::string name = path.string();
  const auto data_of_it = [&](const UnsyncedChange& change) {
    return change.path == name && (change.kind == Kind::kWrite || change.kind == Kind::kResize);
  };
  if (failed) {
    for (UnsyncedChange& change : *ledger) {
      change.lost = change.lost || data_of_it(change);
    }
    return;
  }
  std::erase_if(*ledger,
                [&](const UnsyncedChange& change) { return !change.lost && data_of_it(change); });
}

void note_directory_sync(const fs::path& directory) noexcept {
  const std::scoped_lock lock(ledger_mutex);
  if (ledger == nullptr) {
    return;
  }
  const std::string name = directory.lexically_normal().string();
  std::erase_if(*ledger, [&](const UnsyncedChange& change) {
    return (change.kind == Kind::kCreate || change.kind == Kind::kRename) &&
           parent_of(change.path) == name;
  });
}

}  // namespace plimsoll
