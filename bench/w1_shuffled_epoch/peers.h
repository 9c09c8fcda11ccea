// SPDX-License-Identifier: Apache-2.0
//
// What w1_shuffled_epoch is compared with: the bare disk, RocksDB and LMDB.
//
// Threads: pure functions.   Memory: each states its own.
#pragma once

#include <cstdint>
#include <filesystem>

namespace w1 {

struct Work {
  std::filesystem::path directory{};
  std::int64_t rows{0};
  std::int64_t row_bytes{0};
  std::int64_t memory_bytes{0};
  std::int64_t batch_rows{0};
  std::int64_t commits{0};
};

/// Seconds that reading and writing all rows' bytes once takes: 256 KiB at a time with O_DIRECT,
/// four threads that each read and write in turn, one fdatasync at the end. The files stay for the
/// next call.
double seconds_of_raw_disk(const Work& work);

/// Rows a second of one shuffled epoch (read, change, write back, commits), or 0 where the library
/// is not there. The table is filled first, untimed. Throws when an answer is wrong.
double rows_per_second_of_rocksdb(const Work& work);
double rows_per_second_of_lmdb(const Work& work);

}  // namespace w1
