// SPDX-License-Identifier: Apache-2.0
#include "bench/w1_shuffled_epoch/peers.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plimsoll/sample_order.h"

#ifdef PLIMSOLL_HAVE_LMDB
#include <lmdb.h>
#endif
#ifdef PLIMSOLL_HAVE_ROCKSDB
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#endif

namespace w1 {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kBlock = 256 << 10;
constexpr int kThreads = 4;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(bool right, const char* what) {
  if (!right) {
    throw std::runtime_error(std::string("w1_shuffled_epoch: ") + what);
  }
}

int open_direct(const std::filesystem::path& path) {
  int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0644);
  if (file < 0) {
    file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  }
  check(file >= 0, "cannot open the raw file");
  return file;
}

}  // namespace

double seconds_of_raw_disk(const Work& work) {
  std::filesystem::create_directories(work.directory);
  const auto from_path = work.directory / "raw.from";
  const std::int64_t blocks = (work.rows * work.row_bytes + kBlock - 1) / kBlock;
  const int from = open_direct(from_path);
  const int to = open_direct(work.directory / "raw.to");
  const auto free_block = [](std::byte* at) { std::free(at); };
  const auto pass = [&](int thread, bool reads) {
    std::unique_ptr<std::byte, decltype(free_block)> block(
        static_cast<std::byte*>(std::aligned_alloc(4096, kBlock)), free_block);
    std::memset(block.get(), thread + 1, kBlock);
    for (std::int64_t i = thread; i < blocks; i += kThreads) {
      if (reads) {
        check(::pread(from, block.get(), kBlock, i * kBlock) == kBlock, "a raw read failed");
      }
      check(::pwrite(reads ? to : from, block.get(), kBlock, i * kBlock) == kBlock,
            "a raw write failed");
    }
  };
  const auto all = [&](bool reads) {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&pass, t, reads] { pass(t, reads); });
    }
  };
  if (std::filesystem::file_size(from_path) <
      static_cast<std::uintmax_t>(blocks * kBlock)) {  // Once: files that are allocated.
    all(false);
    all(true);
  }
  const auto start = Clock::now();
  all(true);
  check(::fdatasync(to) == 0, "a raw sync failed");
  const double seconds = since(start);
  ::close(from);
  ::close(to);
  return seconds;
}

#ifdef PLIMSOLL_HAVE_ROCKSDB
double rows_per_second_of_rocksdb(const Work& work) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = 16 << 20;
  options.max_write_buffer_number = 4;
  options.IncreaseParallelism(2);
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(
      static_cast<std::size_t>(std::max<std::int64_t>(work.memory_bytes - (96 << 20), 16 << 20)));
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* opened = nullptr;
  const auto path = (work.directory / "rocksdb").string();
  check(rocksdb::DB::Open(options, path, &opened).ok(), "RocksDB does not open");
  std::unique_ptr<rocksdb::DB> db(opened);
  const auto key_of = [](std::int64_t id) {
    const auto big = __builtin_bswap64(static_cast<std::uint64_t>(id));
    return std::string(reinterpret_cast<const char*>(&big), sizeof big);
  };
  rocksdb::WriteOptions quick;
  quick.disableWAL = true;
  std::string row(static_cast<std::size_t>(work.row_bytes), '\1');
  for (std::int64_t id = 0; id < work.rows; ++id) {
    check(db->Put(quick, key_of(id), row).ok(), "RocksDB does not put");
  }
  check(db->Flush({}).ok(), "RocksDB does not flush");
  const plimsoll::SampleOrder order(work.rows, 7, 0);
  const std::int64_t between = std::max<std::int64_t>(1, work.rows / work.commits);
  constexpr std::int64_t kReaders = 16;
  const auto start = Clock::now();
  std::int64_t committed = 0;
  std::vector<std::string> keys(static_cast<std::size_t>(work.batch_rows));
  std::vector<std::string> values(static_cast<std::size_t>(work.batch_rows));
  for (std::int64_t at = 0; at < work.rows; at += work.batch_rows) {
    const std::int64_t count = std::min(work.batch_rows, work.rows - at);
    {
      std::vector<std::jthread> readers;
      for (std::int64_t t = 0; t < kReaders; ++t) {
        readers.emplace_back([&, t] {
          for (std::int64_t i = t; i < count; i += kReaders) {
            const auto place = static_cast<std::size_t>(i);
            keys[place] = key_of(order.at(at + i));
            check(db->Get({}, keys[place], &values[place]).ok() && values[place][0] == '\1',
                  "RocksDB gave a wrong row");
            values[place][0] = '\2';
          }
        });
      }
    }
    rocksdb::WriteBatch batch;
    for (std::int64_t i = 0; i < count; ++i) {
      batch.Put(keys[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(i)]);
    }
    rocksdb::WriteOptions write;
    write.sync = at + count - committed >= between;
    committed = write.sync ? at + count : committed;
    check(db->Write(write, &batch).ok(), "RocksDB does not write");
  }
  const double seconds = since(start);
  db.reset();
  std::filesystem::remove_all(path);
  return static_cast<double>(work.rows) / seconds;
}
#else
double rows_per_second_of_rocksdb(const Work&) {
  return 0;
}
#endif

#ifdef PLIMSOLL_HAVE_LMDB
double rows_per_second_of_lmdb(const Work& work) {
  MDB_env* environment = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
  const auto path = work.directory / "lmdb";
  std::filesystem::create_directories(path);
  check(mdb_env_create(&environment) == 0, "LMDB does not open");
  const std::int64_t most = work.rows * (work.row_bytes + 64) * 4 + (256 << 20);
  check(mdb_env_set_mapsize(environment, static_cast<std::size_t>(most)) == 0 &&
            mdb_env_open(environment, path.c_str(), MDB_NORDAHEAD, 0644) == 0,
        "LMDB does not open");
  std::vector<char> row(static_cast<std::size_t>(work.row_bytes), '\1');
  const auto begin = [&] {
    check(mdb_txn_begin(environment, nullptr, 0, &transaction) == 0, "LMDB does not begin");
  };
  begin();
  check(mdb_dbi_open(transaction, nullptr, MDB_INTEGERKEY | MDB_CREATE, &table) == 0,
        "LMDB has no table");
  const auto put = [&](std::size_t id, unsigned flags) {
    MDB_val key{sizeof id, &id};
    MDB_val value{row.size(), row.data()};
    check(mdb_put(transaction, table, &key, &value, flags) == 0, "LMDB does not put");
  };
  for (std::int64_t id = 0; id < work.rows; ++id) {
    put(static_cast<std::size_t>(id), MDB_APPEND);
  }
  check(mdb_txn_commit(transaction) == 0, "LMDB does not commit");
  const plimsoll::SampleOrder order(work.rows, 7, 0);
  const std::int64_t between = std::max<std::int64_t>(1, work.rows / work.commits);
  const auto start = Clock::now();
  begin();
  for (std::int64_t at = 0; at < work.rows; ++at) {
    auto id = static_cast<std::size_t>(order.at(at));
    MDB_val key{sizeof id, &id};
    MDB_val value{};
    check(mdb_get(transaction, table, &key, &value) == 0 && value.mv_size == row.size() &&
              *static_cast<const char*>(value.mv_data) == '\1',
          "LMDB gave a wrong row");
    std::memcpy(row.data(), value.mv_data, row.size());
    row[0] = '\2';
    put(id, 0);
    row[0] = '\1';
    if ((at + 1) % between == 0 || at + 1 == work.rows) {
      check(mdb_txn_commit(transaction) == 0, "LMDB does not commit");
      if (at + 1 < work.rows) {
        begin();
      }
    }
  }
  const double seconds = since(start);
  mdb_env_close(environment);
  std::filesystem::remove_all(path);
  return static_cast<double>(work.rows) / seconds;
}
#else
double rows_per_second_of_lmdb(const Work&) {
  return 0;
}
#endif

}  // namespace w1
