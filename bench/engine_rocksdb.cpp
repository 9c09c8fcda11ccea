// SPDX-License-Identifier: Apache-2.0
#include "bench/engines.h"

#ifdef PLIMSOLL_HAVE_ROCKSDB
#include <chrono>
#include <cstring>
#include <stdexcept>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <rocksdb/write_buffer_manager.h>
#endif

namespace bench {

#ifdef PLIMSOLL_HAVE_ROCKSDB
namespace {

void check(const rocksdb::Status& status) {
  if (!status.ok()) {
    throw std::runtime_error("RocksDB: " + status.ToString());
  }
}

// Big-endian, so that neighbours are neighbours.
std::uint64_t key_of(std::int64_t id) {
  return __builtin_bswap64(static_cast<std::uint64_t>(id));
}

rocksdb::Slice slice(const std::uint64_t& key) {
  return {reinterpret_cast<const char*>(&key), sizeof key};
}

// Each option is named, with its source, in bench/README.md.
rocksdb::Options tuned(std::int64_t memory_bytes) {
  const auto memory = static_cast<std::size_t>(memory_bytes);
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(memory, -1, false, 0.5);
  table.cache_index_and_filter_blocks = true;
  table.cache_index_and_filter_blocks_with_high_priority = true;
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  table.pin_top_level_index_and_filter = true;
  table.index_type = rocksdb::BlockBasedTableOptions::kTwoLevelIndexSearch;
  table.partition_filters = true;
  table.metadata_block_size = 4096;
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.optimize_filters_for_memory = true;
  table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  table.format_version = 5;

  rocksdb::Options options;
  options.create_if_missing = true;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  options.compression = rocksdb::kNoCompression;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.compaction_readahead_size = 2 << 20;
  options.level_compaction_dynamic_level_bytes = true;
  options.compaction_pri = rocksdb::kMinOverlappingRatio;
  options.max_background_jobs = 2;
  options.max_open_files = -1;
  // Rows that are not written yet are charged to the cache: a third of it, four buffers.
  options.max_write_buffer_number = 4;
  options.write_buffer_size = std::max<std::size_t>(memory / 12, 1 << 20);
  options.write_buffer_manager =
      std::make_shared<rocksdb::WriteBufferManager>(memory / 3, table.block_cache);
  options.manual_wal_flush = true;
  return options;
}

class RocksEngine final : public Engine {
 public:
  explicit RocksEngine(const EngineOptions& options)
      : dim_(static_cast<std::size_t>(options.dim)),
        readers_(options.readers),
        durable_(options.durable) {
    rocksdb::DB* db = nullptr;
    check(rocksdb::DB::Open(tuned(options.memory_bytes), options.directory.string(), &db));
    db_.reset(db);
    read_.async_io = true;
    read_.optimize_multiget_for_io = true;
    write_.disableWAL = true;
    fill(options.rows);
    write_.disableWAL = !durable_;
  }

  [[nodiscard]] std::string name() const override { return "rocksdb"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    read(ids, now_);
    rocksdb::WriteBatch changes;
    std::vector<float> weights(dim_);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::memcpy(weights.data(), now_.values[i].data(), bytes());
      for (float& weight : weights) {
        weight -= kRate * grad_of(ids[i], batch);
      }
      check(changes.Put(slice(now_.keys[i]), {reinterpret_cast<char*>(weights.data()), bytes()}));
    }
    check(db_->Write(write_, &changes));
  }

  void announce(std::span<const std::int64_t> ids) override { ahead_.announce(ids); }

  void commit() override {
    if (durable_) {
      check(db_->FlushWAL(true));
    }
  }

  void settle() override {
    ahead_.rest();
    check(db_->Flush({}));
    for (std::uint64_t pending = 1, running = 1; pending + running > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      db_->GetIntProperty(rocksdb::DB::Properties::kCompactionPending, &pending);
      db_->GetIntProperty(rocksdb::DB::Properties::kNumRunningCompactions, &running);
    }
  }

  std::vector<float> row(std::int64_t id) override {
    std::string value;
    check(db_->Get({}, slice(key_of(id)), &value));
    std::vector<float> weights(dim_);
    std::memcpy(weights.data(), value.data(), bytes());
    return weights;
  }

 private:
  // A batch as MultiGet wants it.
  struct Batch {
    std::vector<std::uint64_t> keys;
    std::vector<rocksdb::Slice> slices;
    std::vector<rocksdb::Status> statuses;
    std::vector<rocksdb::PinnableSlice> values;
  };

  [[nodiscard]] std::size_t bytes() const { return dim_ * sizeof(float); }

  void fill(std::int64_t rows) {
    for (std::int64_t id = 0; id < rows;) {
      rocksdb::WriteBatch some;
      for (int i = 0; i < 4096 && id < rows; ++i, ++id) {
        const std::vector<float> weights(dim_, start_of(id));
        const std::uint64_t key = key_of(id);
        check(some.Put(slice(key), {reinterpret_cast<const char*>(weights.data()), bytes()}));
      }
      check(db_->Write(write_, &some));
    }
    check(db_->Flush({}));
    check(db_->CompactRange({}, nullptr, nullptr));
  }

  void read(std::span<const std::int64_t> ids, Batch& batch) {
    const std::size_t count = ids.size();
    batch.keys.resize(count);
    batch.slices.resize(count);
    batch.statuses.resize(count);
    batch.values = std::vector<rocksdb::PinnableSlice>(count);
    for (std::size_t i = 0; i < count; ++i) {
      batch.keys[i] = key_of(ids[i]);
      batch.slices[i] = slice(batch.keys[i]);
    }
    in_pieces(count, readers_, [&](std::size_t first, std::size_t some) {
      db_->MultiGet(read_, db_->DefaultColumnFamily(), some, &batch.slices[first],
                    &batch.values[first], &batch.statuses[first]);
    });
    for (const auto& status : batch.statuses) {
      check(status);
    }
  }

  std::size_t dim_;
  int readers_;
  bool durable_;
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ReadOptions read_;
  rocksdb::WriteOptions write_;
  Batch now_;
  Batch later_;  // The look-ahead's: what it reads stays in the cache.
  LookAhead ahead_{[this](const std::vector<std::int64_t>& ids) {
    read(ids, later_);
    later_.values.clear();
  }};
};

}  // namespace

std::unique_ptr<Engine> make_rocksdb(const EngineOptions& options) {
  return std::make_unique<RocksEngine>(options);
}
#else
std::unique_ptr<Engine> make_rocksdb(const EngineOptions&) {
  return nullptr;
}
#endif

}  // namespace bench
