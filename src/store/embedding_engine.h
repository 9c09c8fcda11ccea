// SPDX-License-Identifier: Apache-2.0
//
// EmbeddingStore::Engine: what the two layouts of a table have in common: their requests.
//
// Impl (embedding_store_impl.h) keeps rows in any order, Timeline (timeline.h) in sample order.
//
// Threads: see embedding_store.h.   Memory: see the layouts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <utility>

#include "base/check.h"
#include "os/folder_lock.h"
#include "os/fork.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_format.h"

namespace plimsoll {

class EmbeddingStore::Engine {
 public:
  using Visit = RowVisit;

  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;

  virtual Result<void> gather(std::span<const std::int64_t> ids, std::span<float> out) = 0;
  virtual Result<void> apply(std::span<const std::int64_t> ids, std::span<const float> grads,
                             float rate_scale) = 0;
  virtual Result<void> update(std::span<const std::int64_t> ids, std::span<const float> rows) = 0;
  virtual Result<void> restore(std::span<const std::int64_t> ids,
                               std::span<const std::uint32_t> sequences,
                               std::span<const float> values) = 0;
  virtual void prefetch(std::span<const std::int64_t> ids) noexcept = 0;
  virtual Result<void> begin_epoch(std::int64_t epoch) = 0;
  virtual Result<std::int64_t> insert(std::span<const std::int64_t> ids) = 0;
  virtual Result<void> erase(std::span<const std::int64_t> ids) = 0;
  /// What both layouts ask before they make anything. Errors: as Governor::check_disk_limit().
  static Result<void> check_disk(const Governor& governor, const EmbeddingStoreOptions& options,
                                 const SlabPlan& plan);
  virtual Result<void> commit(std::int64_t step) = 0;
  virtual Result<void> scan(const Visit& visit) = 0;
  virtual Result<void> visit_rows(const Visit& visit) { return scan(visit); }
  /// Keeps the table's lock as long as this lives, files and threads being gone before it.
  void hold(FolderLock lock) noexcept { lock_ = std::move(lock); }
  /// Whether this process was forked after the table was opened. There only the above is to be
  /// asked; what this holds must not be destroyed either: its threads are not there to be joined.
  [[nodiscard]] bool forked() const noexcept { return mark_.forked(); }
  [[nodiscard]] const ForkMark& mark() const noexcept { return mark_; }
  /// Errors: kInvalidArgument in a forked child.
  [[nodiscard]] Result<void> check_process(const char* what) const;
  /// Errors: as check_process(); kInvalidArgument when the table was opened to be read.
  [[nodiscard]] Result<void> check_writable(const char* what) const;
  /// What an error of a read really means, when the table was opened to be read.
  [[nodiscard]] virtual Error explained(Error error) const { return error; }
  /// Here: there is nothing to give.
  virtual std::int64_t shrink(std::int64_t /*wanted_bytes*/) noexcept { return 0; }
  virtual std::int64_t grow_back(std::int64_t /*wanted_bytes*/) noexcept { return 0; }
  [[nodiscard]] virtual std::int64_t given_bytes() const { return 0; }
  virtual Result<void> set_optimizer(const RowOptimizerOptions& options) = 0;
  [[nodiscard]] virtual const std::filesystem::path& directory() const noexcept = 0;
  [[nodiscard]] virtual bool pinned() const noexcept = 0;
  [[nodiscard]] virtual const TableShape& shape() const noexcept = 0;
  [[nodiscard]] virtual std::int64_t rows() const { return shape().rows; }
  [[nodiscard]] virtual std::int64_t last_commit() const noexcept = 0;
  [[nodiscard]] virtual const SlabPlan& plan() const noexcept = 0;
  [[nodiscard]] virtual StoreStats stats() const = 0;

 protected:
  /// Errors: kInvalidArgument when `floats` are not one row for each of `ids`.
  [[nodiscard]] Result<void> check_rows(const char* what, std::size_t ids,
                                        std::size_t floats) const;
  /// Errors: kInvalidArgument when the three do not belong to one number of records.
  [[nodiscard]] Result<void> check_records(std::size_t ids, std::size_t sequences,
                                           std::size_t floats) const;
  /// Resolves a request of more than `most` ids piece by piece, so that every id is known to be
  /// there before any row changes; a shorter one is resolved when it is carried out.
  template <class Resolve>
  static Result<void> resolve_ahead(std::span<const std::int64_t> ids, std::size_t most,
                                    const Resolve& resolve) {
    for (std::size_t at = 0; ids.size() > most && at < ids.size(); at += most) {
      PLIMSOLL_TRY_VOID(resolve(ids.subspan(at, std::min(most, ids.size() - at))));
    }
    return {};
  }
  /// Errors: kInvalidArgument when `step` is not after the last commit.
  [[nodiscard]] Result<void> check_step(const std::filesystem::path& directory,
                                        std::int64_t step) const;

 private:
  const ForkMark mark_;
  FolderLock lock_;  // Of a table that may be changed.
};

}  // namespace plimsoll
