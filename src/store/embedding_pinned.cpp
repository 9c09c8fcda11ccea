// SPDX-License-Identifier: Apache-2.0
//
// A table opened to be read at one commit, while another process may train in it.
//
// The commit is pinned first, and only then looked for: from then on whoever trains either sees the
// pin, or has replaced the commit already and is seen to have. What it refers to is then neither
// written nor freed, but for want of room on disk; a page that was written all the same fails its
// checksum, which is by page and by block, and never passes for the commit's.
//
// Threads: see embedding_store.h.   Memory: none.
#include <fmt/format.h>

#include "base/check.h"
#include "store/embedding_store_impl.h"

namespace plimsoll {
namespace {

// Each is in vain only if a commit replaced the one that was chosen just then.
constexpr int kTriesMost = 16;

}  // namespace

Result<void> EmbeddingStore::Impl::open_pinned(std::int64_t at_step) {
  for (int left = kTriesMost;; --left) {
    auto done = pin_commit(at_step);
    if (done && *done) {
      return {};
    }
    if (left == 1 || (!done && done.error().code != ErrorCode::kCorrupt)) {
      return done ? fail(ErrorCode::kNotFound,
                         fmt::format("{}: its commits are replaced faster than they can be opened",
                                     directory_.string()),
                         "try again")
                  : Result<void>(tl::unexpected(std::move(done).error()));
    }
    // A superblock or a page table half written is no damage yet: its commit may be under way.
    pins_.await(0);
    pins_.await(1);
  }
}

// False: the commit was replaced meanwhile.
Result<bool> EmbeddingStore::Impl::pin_commit(std::int64_t at_step) {
  const auto path = directory_ / table_files::kSuper;
  PLIMSOLL_TRY(super_, SuperFile::open(path, false));
  PLIMSOLL_TRY(const int slot, choose_commit(shape_.pages, at_step));
  if (slot < 0) {
    return true;  // Every row is as it began.
  }
  const std::int64_t step = superblock(slot).step;
  pins_.pin(step);
  pins_.await(slot);
  PLIMSOLL_TRY(super_, SuperFile::open(path, false));
  if (!holds_commit(slot) || superblock(slot).step != step) {
    return false;
  }
  PLIMSOLL_TRY_VOID(read_map(slot));
  opened(slot);
  return true;
}

}  // namespace plimsoll
