// SPDX-License-Identifier: Apache-2.0
#include "bench/engines.h"

#ifdef PLIMSOLL_HAVE_LMDB
#include <cstring>
#include <stdexcept>
#include <utility>

#include <lmdb.h>
#endif

namespace bench {

#ifdef PLIMSOLL_HAVE_LMDB
namespace {

constexpr std::int64_t kFillRows = 65'536;  // A transaction; the pages it changes are in memory.
constexpr int kStepsMost = 8;               // Of one where nothing has to survive.

void check(int status) {
  if (status != 0) {
    throw std::runtime_error(std::string("LMDB: ") + mdb_strerror(status));
  }
}

// Its cache is the kernel's, which nobody bounds here: a limit it does not know is in its favour.
// Each flag is named, with its source, in bench/README.md.
class LmdbEngine final : public Engine {
 public:
  explicit LmdbEngine(const EngineOptions& options)
      : dim_(static_cast<std::size_t>(options.dim)),
        readers_(options.readers),
        durable_(options.durable) {
    std::filesystem::create_directories(options.directory);
    const auto row_bytes = static_cast<std::size_t>(options.dim) * sizeof(float) + 64;
    check(mdb_env_create(&env_));
    check(mdb_env_set_mapsize(
        env_, static_cast<std::size_t>(options.rows) * row_bytes * 4 + (256U << 20)));
    const unsigned lax = durable_ ? 0 : MDB_NOSYNC | MDB_NOMETASYNC;
    check(mdb_env_open(env_, options.directory.c_str(), lax | MDB_NORDAHEAD | MDB_NOTLS, 0600));
    begin();
    check(mdb_dbi_open(txn_, nullptr, MDB_INTEGERKEY, &table_));
    for (std::int64_t id = 0; id < options.rows; ++id) {
      if (id > 0 && id % kFillRows == 0) {
        commit();
        begin();
      }
      std::vector<float> weights(dim_, start_of(id));
      MDB_val key{sizeof id, &id};
      MDB_val value{bytes(), weights.data()};
      check(mdb_put(txn_, table_, &key, &value, MDB_APPEND));
    }
    commit();
    check(mdb_env_sync(env_, 1));
  }
  ~LmdbEngine() override {
    ahead_.rest();
    mdb_env_close(env_);
  }
  LmdbEngine(const LmdbEngine&) = delete;
  LmdbEngine& operator=(const LmdbEngine&) = delete;

  [[nodiscard]] std::string name() const override { return "lmdb"; }

  void step(std::span<const std::int64_t> ids, std::int64_t batch) override {
    std::vector<std::int64_t> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());  // Neighbours share pages.
    touch(sorted);
    if (txn_ == nullptr) {
      begin();
    }
    std::vector<float> weights(dim_);
    for (std::int64_t id : sorted) {
      MDB_val key{sizeof id, &id};
      MDB_val value{};
      check(mdb_get(txn_, table_, &key, &value));
      std::memcpy(weights.data(), value.mv_data, bytes());
      for (float& weight : weights) {
        weight -= kRate * grad_of(id, batch);
      }
      value = {bytes(), weights.data()};
      check(mdb_put(txn_, table_, &key, &value, 0));
    }
    if (!durable_ && ++steps_ % kStepsMost == 0) {
      commit();
    }
  }

  void announce(std::span<const std::int64_t> ids) override { ahead_.announce(ids); }

  void commit() override {
    if (txn_ != nullptr) {
      check(mdb_txn_commit(std::exchange(txn_, nullptr)));
    }
  }

  void settle() override {
    ahead_.rest();
    commit();
    check(mdb_env_sync(env_, 1));
  }

  std::vector<float> row(std::int64_t id) override {
    commit();
    MDB_txn* txn = nullptr;
    check(mdb_txn_begin(env_, nullptr, MDB_RDONLY, &txn));
    MDB_val key{sizeof id, &id};
    MDB_val value{};
    check(mdb_get(txn, table_, &key, &value));
    std::vector<float> weights(dim_);
    std::memcpy(weights.data(), value.mv_data, bytes());
    mdb_txn_abort(txn);
    return weights;
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return dim_ * sizeof(float); }
  void begin() { check(mdb_txn_begin(env_, nullptr, 0, &txn_)); }

  // Has the kernel read the rows' pages, many at once: a transaction alone reads one by one. As of
  // the last commit, so a page that has been written anew since is read for nothing.
  void touch(const std::vector<std::int64_t>& ids) {
    in_pieces(ids.size(), readers_, [&](std::size_t first, std::size_t count) {
      MDB_txn* txn = nullptr;
      check(mdb_txn_begin(env_, nullptr, MDB_RDONLY, &txn));
      for (std::size_t i = first; i < first + count; ++i) {
        std::int64_t id = ids[i];
        MDB_val key{sizeof id, &id};
        MDB_val value{};
        check(mdb_get(txn, table_, &key, &value));
        asm volatile("" : : "r"(*static_cast<const char*>(value.mv_data)));
      }
      mdb_txn_abort(txn);
    });
  }

  std::size_t dim_;
  int readers_;
  bool durable_;
  int steps_{0};
  MDB_env* env_{nullptr};
  MDB_txn* txn_{nullptr};  // Of the steps since the last commit.
  MDB_dbi table_{0};
  LookAhead ahead_{[this](const std::vector<std::int64_t>& ids) { touch(ids); }};
};

}  // namespace

std::unique_ptr<Engine> make_lmdb(const EngineOptions& options) {
  return std::make_unique<LmdbEngine>(options);
}
#else
std::unique_ptr<Engine> make_lmdb(const EngineOptions&) {
  return nullptr;
}
#endif

}  // namespace bench
