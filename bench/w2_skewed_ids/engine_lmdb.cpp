// SPDX-License-Identifier: Apache-2.0
#include "engines.h"

#ifdef PLIMSOLL_HAVE_LMDB
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include <lmdb.h>
#endif

namespace w2 {

#ifdef PLIMSOLL_HAVE_LMDB
namespace {

constexpr std::size_t kValueBytes = kDim * sizeof(float);
constexpr std::int64_t kFillRows = 65'536;  // A transaction; the pages it changes are in memory.

void check(int status) {
  if (status != 0) {
    throw std::runtime_error(std::string("LMDB: ") + mdb_strerror(status));
  }
}

// Its cache is the kernel's, which nobody bounds here: a limit it does not know is in its favour.
class LmdbEngine final : public Engine {
 public:
  LmdbEngine(const std::filesystem::path& directory, std::int64_t rows) {
    std::filesystem::create_directories(directory);
    check(mdb_env_create(&env_));
    check(mdb_env_set_mapsize(env_, static_cast<std::size_t>(rows) * 2048 + (64U << 20)));
    check(mdb_env_open(env_, directory.c_str(), MDB_NOSYNC | MDB_NORDAHEAD, 0600));
    MDB_txn* txn = nullptr;
    check(mdb_txn_begin(env_, nullptr, 0, &txn));
    check(mdb_dbi_open(txn, nullptr, MDB_INTEGERKEY, &table_));
    for (std::int64_t id = 0; id < rows; ++id) {
      if (id > 0 && id % kFillRows == 0) {
        check(mdb_txn_commit(txn));
        check(mdb_txn_begin(env_, nullptr, 0, &txn));
      }
      std::vector<float> weights(kDim, start_of(id));
      MDB_val key{sizeof id, &id};
      MDB_val value{kValueBytes, weights.data()};
      check(mdb_put(txn, table_, &key, &value, MDB_APPEND));
    }
    check(mdb_txn_commit(txn));
  }
  ~LmdbEngine() override { mdb_env_close(env_); }
  LmdbEngine(const LmdbEngine&) = delete;
  LmdbEngine& operator=(const LmdbEngine&) = delete;

  [[nodiscard]] std::string name() const override { return "lmdb"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    std::vector<std::int64_t> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());  // Neighbours share pages.
    MDB_txn* txn = nullptr;
    check(mdb_txn_begin(env_, nullptr, 0, &txn));
    std::vector<float> weights(kDim);
    for (std::int64_t id : sorted) {
      MDB_val key{sizeof id, &id};
      MDB_val value{};
      check(mdb_get(txn, table_, &key, &value));
      std::memcpy(weights.data(), value.mv_data, kValueBytes);
      for (float& weight : weights) {
        weight -= kRate * grad_of(id, batch);
      }
      value = {kValueBytes, weights.data()};
      check(mdb_put(txn, table_, &key, &value, 0));
    }
    check(mdb_txn_commit(txn));
  }

  void settle() override { check(mdb_env_sync(env_, 1)); }

  std::vector<float> row(std::int64_t id) override {
    MDB_txn* txn = nullptr;
    check(mdb_txn_begin(env_, nullptr, MDB_RDONLY, &txn));
    MDB_val key{sizeof id, &id};
    MDB_val value{};
    check(mdb_get(txn, table_, &key, &value));
    std::vector<float> weights(kDim);
    std::memcpy(weights.data(), value.mv_data, kValueBytes);
    mdb_txn_abort(txn);
    return weights;
  }

 private:
  MDB_env* env_{nullptr};
  MDB_dbi table_{0};
};

}  // namespace

std::unique_ptr<Engine> make_lmdb(const std::filesystem::path& directory, std::int64_t rows) {
  return std::make_unique<LmdbEngine>(directory, rows);
}
#else
std::unique_ptr<Engine> make_lmdb(const std::filesystem::path&, std::int64_t) {
  return nullptr;
}
#endif

}  // namespace w2
