// SPDX-License-Identifier: Apache-2.0
#include "bench/raw_disk.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace bench {
namespace {

constexpr std::int64_t kUnit = 4096;
constexpr std::int64_t kFillBytes = 1 << 20;
constexpr std::int64_t kLookedAt = 64;  // Blocks written that are read again, at most.
using Memory = std::unique_ptr<std::byte, decltype(&std::free)>;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("the bare disk: " + what);
}

Memory aligned(std::int64_t bytes) {
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<std::size_t>(bytes))),
                &std::free);
  std::mt19937_64 random(1);  // Nothing that a disk could shorten.
  for (std::int64_t at = 0; at < bytes; at += 8) {
    const std::uint64_t some = random();
    std::memcpy(memory.get() + at, &some, sizeof some);
  }
  return memory;
}

// What the first and the last eight bytes of the 4 KiB at `at` of a file are.
std::uint64_t stamp_of(std::int64_t at, std::uint64_t version) {
  return ((static_cast<std::uint64_t>(at / kUnit) * 2 + 1) * 0x9E3779B97F4A7C15ULL) ^
         (version << 32);
}

void put_stamps(std::byte* block, std::int64_t bytes, std::int64_t at, std::uint64_t version) {
  for (std::int64_t in = 0; in < bytes; in += kUnit) {
    const std::uint64_t stamp = stamp_of(at + in, version);
    std::memcpy(block + in, &stamp, sizeof stamp);
    std::memcpy(block + in + kUnit - sizeof stamp, &stamp, sizeof stamp);
  }
}

void check_stamps(const std::byte* block, std::int64_t bytes, std::int64_t at,
                  std::uint64_t version) {
  for (std::int64_t in = 0; in < bytes; in += kUnit) {
    const std::uint64_t stamp = stamp_of(at + in, version);
    if (std::memcmp(block + in, &stamp, sizeof stamp) != 0 ||
        std::memcmp(block + in + kUnit - sizeof stamp, &stamp, sizeof stamp) != 0) {
      fail("byte " + std::to_string(at + in) + " is not what was written");
    }
  }
}

// Direct, where the file system offers it. Made, stamped and synced unless it is there.
int open_made(const std::filesystem::path& path, std::int64_t bytes) {
  int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  file = file < 0 ? ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600) : file;
  if (file < 0) {
    fail("cannot open " + path.string());
  }
  const Memory memory = aligned(kFillBytes);
  for (auto at = static_cast<std::int64_t>(std::filesystem::file_size(path)); at < bytes;
       at += kFillBytes) {
    put_stamps(memory.get(), kFillBytes, at, 0);
    if (::pwrite(file, memory.get(), kFillBytes, at) != kFillBytes) {
      fail("cannot write " + path.string() + ": " + std::strerror(errno));
    }
  }
  ::fdatasync(file);
  return file;
}

}  // namespace

// One pass at one depth: which request is next, and what has become of those under way.
class RawDisk::Pass {
 public:
  Pass(RawDisk& disk, int depth)
      : disk_(disk),
        work_(disk.work_),
        slots_(static_cast<std::size_t>(depth)),
        random_(disk.version_) {
    const std::int64_t size = std::max(work_.read_bytes, work_.write_bytes);
    for (Slot& slot : slots_) {
      slot.memory = aligned(size);
    }
    const std::int64_t least = work_.read_bytes_least;
    const std::int64_t mean = least > 0 ? (least + work_.read_bytes) / 2 : work_.read_bytes;
    left_[0] =
        static_cast<std::int64_t>(static_cast<double>(work_.bytes) * work_.read_share) / mean;
    left_[1] = (work_.bytes - left_[0] * mean) / work_.write_bytes;
    all_ = left_;
    first_written_ = disk_.write_next_;
  }

  // Carries it out; returns the seconds it took, its sync included.
  double run() {
    const auto began = std::chrono::steady_clock::now();
    std::vector<iocb*> waiting;
    for (Slot& slot : slots_) {
      begin(slot, waiting);
    }
    std::vector<io_event> events(slots_.size());
    for (std::size_t under_way = 0; !waiting.empty() || under_way > 0;) {
      const long taken = waiting.empty() ? 0
                                         : ::syscall(SYS_io_submit, disk_.context_, waiting.size(),
                                                     waiting.data());
      if (taken < 0 && (errno != EAGAIN || under_way == 0)) {
        fail(std::string("the kernel takes no request: ") + std::strerror(errno));
      }
      waiting.erase(waiting.begin(), waiting.begin() + std::max(taken, 0L));
      under_way += static_cast<std::size_t>(std::max(taken, 0L));
      const long ended =
          ::syscall(SYS_io_getevents, disk_.context_, 1, events.size(), events.data(), nullptr);
      for (long i = 0; i < ended; ++i) {
        end(events[static_cast<std::size_t>(i)]);
        --under_way;
        begin(slots_[events[static_cast<std::size_t>(i)].data], waiting);
      }
    }
    if (all_[1] > 0 && ::fdatasync(disk_.to_) != 0) {
      fail("a sync failed");
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  // Reads a part of what was written, and compares it.
  void look_again() {
    const std::int64_t step = std::max<std::int64_t>(1, all_[1] / kLookedAt);
    for (std::int64_t i = 0; i < all_[1]; i += step) {
      const std::int64_t at = (first_written_ + i) % blocks(work_.write_bytes) * work_.write_bytes;
      std::byte* const block = slots_.front().memory.get();
      if (::pread(disk_.to_, block, static_cast<std::size_t>(work_.write_bytes), at) !=
          work_.write_bytes) {
        fail("what was written cannot be read");
      }
      check_stamps(block, work_.write_bytes, at, disk_.version_);
    }
  }

  // Moved, once it was run.
  [[nodiscard]] double bytes() const { return static_cast<double>(moved_); }

 private:
  struct Slot {
    Memory memory{nullptr, &std::free};
    iocb block{};
  };

  [[nodiscard]] std::int64_t blocks(std::int64_t bytes) const { return work_.file_bytes / bytes; }

  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(end));
  }

  // The next request, so that reads and writes keep their shares; none when all have begun.
  void begin(Slot& slot, std::vector<iocb*>& waiting) {
    if (left_[0] + left_[1] == 0) {
      return;
    }
    const bool writes = left_[1] * std::max<std::int64_t>(all_[0], 1) >
                        left_[0] * std::max<std::int64_t>(all_[1], 1);
    const std::size_t kind = left_[0] == 0 || (writes && left_[1] > 0) ? 1 : 0;
    --left_[kind];
    std::int64_t size = kind == 1 ? work_.write_bytes : work_.read_bytes;
    std::int64_t at = 0;
    if (kind == 0 && work_.read_bytes_least > 0) {
      size = work_.read_bytes_least + below((size - work_.read_bytes_least) / kUnit + 1) * kUnit;
      at = below((work_.file_bytes - size) / kUnit + 1) * kUnit;
    } else if (kind == 0 && work_.random) {
      at = below(blocks(size)) * size;
    } else {
      at = (kind == 1 ? disk_.write_next_ : disk_.read_next_)++ % blocks(size) * size;
    }
    moved_ += size;
    slot.block = {};
    slot.block.aio_data = static_cast<std::uint64_t>(&slot - slots_.data());
    slot.block.aio_lio_opcode = kind == 1 ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    slot.block.aio_fildes = static_cast<std::uint32_t>(kind == 1 ? disk_.to_ : disk_.from_);
    slot.block.aio_buf = reinterpret_cast<std::uint64_t>(slot.memory.get());
    slot.block.aio_nbytes = static_cast<std::uint64_t>(size);
    slot.block.aio_offset = at;
    if (kind == 1) {
      put_stamps(slot.memory.get(), size, slot.block.aio_offset, disk_.version_);
    }
    waiting.push_back(&slot.block);
  }

  void end(const io_event& event) {
    const iocb& block = slots_[event.data].block;
    if (event.res != static_cast<std::int64_t>(block.aio_nbytes)) {
      fail("a transfer ended with " + std::to_string(event.res));
    }
    if (block.aio_lio_opcode == IOCB_CMD_PREAD) {
      check_stamps(slots_[event.data].memory.get(), static_cast<std::int64_t>(block.aio_nbytes),
                   block.aio_offset, 0);
    }
  }

  RawDisk& disk_;
  const RawDiskWork& work_;
  std::vector<Slot> slots_;
  std::array<std::int64_t, 2> left_{};  // Reads and writes that have not begun.
  std::array<std::int64_t, 2> all_{};
  std::int64_t first_written_{0};
  std::int64_t moved_{0};
  std::mt19937_64 random_;  // Other places in each pass.
};

RawDisk::RawDisk(const RawDiskWork& work) : work_(work) {
  std::filesystem::create_directories(work_.directory);
  const std::int64_t least = std::max({work_.read_bytes, work_.write_bytes, work_.file_bytes});
  work_.file_bytes = (least + kFillBytes - 1) / kFillBytes * kFillBytes;
  if (::syscall(SYS_io_setup, kDepths.back(), &context_) != 0) {
    fail(std::string("the kernel offers no AIO: ") + std::strerror(errno));
  }
  from_ = open_made(work_.directory / "raw.from", work_.file_bytes);
  if (work_.read_share < 1) {
    to_ = open_made(work_.directory / "raw.to", work_.file_bytes);
  }
}

RawDisk::~RawDisk() {
  ::syscall(SYS_io_destroy, context_);
  ::close(from_);
  if (to_ >= 0) {
    ::close(to_);
  }
}

RawDiskSpeed RawDisk::measure() {
  RawDiskSpeed best;
  for (const int depth : kDepths) {
    ++version_;
    Pass pass(*this, depth);
    const double seconds = pass.run();
    const double speed = pass.bytes() / seconds;
    pass.look_again();
    best.by_depth[depth] = speed;
    if (speed > best.bytes_per_second) {
      best.bytes_per_second = speed;
      best.depth = depth;
    }
  }
  return best;
}

}  // namespace bench
