// SPDX-License-Identifier: Apache-2.0
#include "engines.h"

#ifdef PLIMSOLL_HAVE_ROCKSDB
#include <bit>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#endif

namespace w2 {

#ifdef PLIMSOLL_HAVE_ROCKSDB
namespace {

constexpr std::size_t kValueBytes = kDim * sizeof(float);

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

class RocksEngine final : public Engine {
 public:
  RocksEngine(const std::filesystem::path& directory, std::int64_t rows, std::int64_t cache_bytes,
              int readers)
      : readers_(readers) {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.compression = rocksdb::kNoCompression;
    options.use_direct_reads = true;
    options.use_direct_io_for_flush_and_compaction = true;
    options.max_background_jobs = 2;
    // A third of the bytes for write buffers, the rest for blocks.
    options.max_write_buffer_number = 4;
    options.write_buffer_size =
        std::max<std::size_t>(static_cast<std::size_t>(cache_bytes) / 12, 1 << 20);
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(static_cast<std::size_t>(cache_bytes) * 2 / 3);
    table.cache_index_and_filter_blocks = true;
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    table.format_version = 5;
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    rocksdb::DB* db = nullptr;
    check(rocksdb::DB::Open(options, directory.string(), &db));
    db_.reset(db);
    write_.disableWAL = true;  // Nothing here has to survive.
    fill(rows);
  }

  [[nodiscard]] std::string name() const override { return "rocksdb"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    read(ids);
    rocksdb::WriteBatch changes;
    std::vector<float> weights(kDim);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::memcpy(weights.data(), values_[i].data(), kValueBytes);
      for (float& weight : weights) {
        weight -= kRate * grad_of(ids[i], batch);
      }
      check(changes.Put(slice(keys_[i]), {reinterpret_cast<char*>(weights.data()), kValueBytes}));
    }
    check(db_->Write(write_, &changes));
  }

  void settle() override {
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
    std::vector<float> weights(kDim);
    std::memcpy(weights.data(), value.data(), kValueBytes);
    return weights;
  }

 private:
  void fill(std::int64_t rows) {
    for (std::int64_t id = 0; id < rows;) {
      rocksdb::WriteBatch some;
      for (int i = 0; i < 4096 && id < rows; ++i, ++id) {
        const std::vector<float> weights(kDim, start_of(id));
        const std::uint64_t key = key_of(id);
        check(some.Put(slice(key), {reinterpret_cast<const char*>(weights.data()), kValueBytes}));
      }
      check(db_->Write(write_, &some));
    }
    check(db_->Flush({}));
    check(db_->CompactRange({}, nullptr, nullptr));
  }

  void read(std::span<const std::int64_t> ids) {
    const std::size_t count = ids.size();
    keys_.resize(count);
    slices_.resize(count);
    statuses_.resize(count);
    values_ = std::vector<rocksdb::PinnableSlice>(count);
    for (std::size_t i = 0; i < count; ++i) {
      keys_[i] = key_of(ids[i]);
      slices_[i] = slice(keys_[i]);
    }
    std::vector<std::jthread> threads;
    const auto share =
        (count + static_cast<std::size_t>(readers_) - 1) / static_cast<std::size_t>(readers_);
    for (std::size_t first = 0; first < count; first += share) {
      const std::size_t some = std::min(share, count - first);
      threads.emplace_back([this, first, some] {
        db_->MultiGet({}, db_->DefaultColumnFamily(), some, &slices_[first], &values_[first],
                      &statuses_[first]);
      });
    }
    threads.clear();
    for (const auto& status : statuses_) {
      check(status);
    }
  }

  int readers_;
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::WriteOptions write_;
  std::vector<std::uint64_t> keys_;
  std::vector<rocksdb::Slice> slices_;
  std::vector<rocksdb::Status> statuses_;
  std::vector<rocksdb::PinnableSlice> values_;
};

}  // namespace

std::unique_ptr<Engine> make_rocksdb(const std::filesystem::path& directory, std::int64_t rows,
                                     std::int64_t cache_bytes, int readers) {
  return std::make_unique<RocksEngine>(directory, rows, cache_bytes, readers);
}
#else
std::unique_ptr<Engine> make_rocksdb(const std::filesystem::path&, std::int64_t, std::int64_t,
                                     int) {
  return nullptr;
}
#endif

}  // namespace w2
