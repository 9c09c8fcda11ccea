// SPDX-License-Identifier: Apache-2.0
//
// What both layouts refuse, in the same words.
//
// Threads: see embedding_store.h.   Memory: none.
#include "store/embedding_engine.h"

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {

Result<void> EmbeddingStore::Engine::check_disk(const Governor& governor,
                                                const EmbeddingStoreOptions& options,
                                                const SlabPlan& plan) {
  if (options.pinned) {
    return {};  // It makes nothing.
  }
  return governor.check_disk_limit("the table " + options.directory.string(), plan.disk_cap_bytes);
}

Result<void> EmbeddingStore::Engine::check_process(const char* what) const {
  return mark_.check(directory(), what, "open it in this process, to be read (pinned)");
}

Result<void> EmbeddingStore::Engine::check_writable(const char* what) const {
  PLIMSOLL_TRY_VOID(check_process(what));
  if (!pinned()) {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: {}() in a table that was opened to be read", directory().string(), what),
      "open it without `pinned`");
}

Result<void> EmbeddingStore::Engine::check_rows(const char* what, std::size_t ids,
                                                std::size_t floats) const {
  const auto dim = static_cast<std::size_t>(shape().dim);
  if (floats == ids * dim) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{} has {} floats, expected {} ids × dim {} = {}", what, floats, ids, dim,
                          ids * dim));
}

Result<void> EmbeddingStore::Engine::check_records(std::size_t ids, std::size_t sequences,
                                                   std::size_t floats) const {
  const auto each = static_cast<std::size_t>(shape().floats());
  if (sequences == ids && floats == ids * each) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("restore() of {} ids with {} sequences and {} floats; a record has {}",
                          ids, sequences, floats, each));
}

Result<void> EmbeddingStore::Engine::check_step(const std::filesystem::path& directory,
                                                std::int64_t step) const {
  if (step > last_commit()) {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: commit({}) after commit({})", directory.string(), step, last_commit()),
      "steps must grow");
}

}  // namespace plimsoll
