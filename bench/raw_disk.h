// SPDX-License-Identifier: Apache-2.0
//
// What the bare disk does: direct reads and writes mixed, many under way at once, without the
// store. A benchmark that speaks of the disk's speed is judged by this.
//
// Two files are made once, every 4 KiB of them stamped with what they are. A measurement reads the
// one and writes the other by Linux AIO, as fio does with ioengine=libaio, direct=1, and looks at
// the stamps of all that it reads and of a part of what it wrote; it does so at each of kDepths and
// keeps the best. Blocks follow one another in both files, unless `random` scatters the reads.
// Source: io_submit(2); fio(1), options rw, rwmixread, iodepth.
//
// Reading order: RawDiskWork, RawDisk.
//
// Threads: single-owner.   Memory: 64 blocks, the larger of a read and a write.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>

namespace bench {

struct RawDiskWork {
  std::filesystem::path directory{};
  std::int64_t file_bytes{1LL << 30};    ///< Of each of the two files.
  std::int64_t bytes{1LL << 30};         ///< Moved at each depth, read and written together.
  std::int64_t read_bytes{256LL << 10};  ///< Of one read; a multiple of 4 KiB.
  std::int64_t read_bytes_least{0};  ///< Unless 0, reads have every multiple of 4 KiB from this to
                                     ///< read_bytes, each as often. Requires: random.
  std::int64_t write_bytes{256LL << 10};  ///< Of one write; a multiple of 4 KiB.
  double read_share{0.5};                 ///< Of the bytes moved; 1: there is only one file.
  bool random{false};                     ///< Whether reads are anywhere; writes run on.
};

/// The best depth's bytes a second, and those of all of them.
struct RawDiskSpeed {
  double bytes_per_second{0};
  int depth{0};
  std::map<int, double> by_depth{};
};

class RawDisk {
 public:
  static constexpr std::array kDepths{1, 2, 4, 8, 16, 32, 64};  ///< Requests under way at once.

  /// Makes the files, untimed. Throws std::runtime_error where the kernel offers no AIO, or the
  /// disk is full.
  explicit RawDisk(const RawDiskWork& work);
  ~RawDisk();
  RawDisk(const RawDisk&) = delete;
  RawDisk& operator=(const RawDisk&) = delete;

  /// Goes on where the last one ended. Throws std::runtime_error when a byte is not what was
  /// written.
  RawDiskSpeed measure();

 private:
  class Pass;

  RawDiskWork work_;
  int from_{-1};
  int to_{-1};
  std::uint64_t context_{0};   // The kernel's.
  std::uint64_t version_{0};   // Of what is written; each pass has its own.
  std::int64_t read_next_{0};  // Blocks, by their number in the file.
  std::int64_t write_next_{0};
};

}  // namespace bench
