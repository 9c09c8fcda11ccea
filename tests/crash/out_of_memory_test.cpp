// SPDX-License-Identifier: Apache-2.0
//
// Goal: whichever allocation fails while a table is opened, created, grown, compacted or exported,
// the caller gets a clean error, nothing is leaked (memory, descriptors, threads, leases), and the
// next try succeeds; while it is trained in there is none that could fail.
// Method: this program's operator new fails at the n-th allocation, for n = 1, 2, … until the work
// is done without meeting it.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>

#include "base/check.h"
#include "tables/store_export.h"
#include "tests/support/embedding_table_fixture.h"

namespace {

std::atomic<long> live{0};        // Blocks from operator new that were not deleted.
std::atomic<long> countdown{-1};  // Allocations until one fails; negative: none does.
std::atomic<long> asked{0};       // Allocations, failed ones included.

bool refused() noexcept {
  ++asked;
  long left = countdown.load();
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

// NOLINTBEGIN(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory): `new` calls these.
void* take(std::size_t bytes, std::size_t alignment) noexcept {
  if (refused()) {
    return nullptr;
  }
  void* const block =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes == 0 ? 1 : bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  live += block != nullptr ? 1 : 0;
  return block;
}

void* take_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const block = take(bytes, alignment);
  if (block == nullptr) {
    throw std::bad_alloc();
  }
  return block;
}

void give_back(void* block) noexcept {
  live -= block != nullptr ? 1 : 0;
  std::free(block);
}
// NOLINTEND(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory)

constexpr std::size_t kPlain = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t bytes) {
  return take_or_throw(bytes, kPlain);
}
void* operator new[](std::size_t bytes) {
  return take_or_throw(bytes, kPlain);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return take(bytes, kPlain);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return take(bytes, kPlain);
}
void operator delete(void* block) noexcept {
  give_back(block);
}
void operator delete[](void* block) noexcept {
  give_back(block);
}
void operator delete(void* block, std::size_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::size_t) noexcept {
  give_back(block);
}
void operator delete(void* block, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete(void* block, std::size_t, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::size_t, std::align_val_t) noexcept {
  give_back(block);
}

namespace plimsoll {
namespace {

using namespace test;
namespace fs = std::filesystem;

long entries_in(const char* directory) {
  return std::distance(fs::directory_iterator(directory), fs::directory_iterator());
}

struct Holdings {
  long blocks{live.load()};
  long descriptors{entries_in("/proc/self/fd")};
  long threads{entries_in("/proc/self/task")};
};

class OutOfMemoryTest : public EmbeddingTableTest, public ::testing::WithParamInterface<RowLayout> {
 protected:
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return with_floor({.directory = directory(),
                       .dim = 24,
                       .init = {.kind = RowInitKind::kZeros},
                       .layout = GetParam(),
                       .ids = ids_,
                       .batch_rows = 64,
                       .io_threads = 2,
                       .compute_threads = 3});
  }
  // Opens with the n-th allocation failing. Says whether it was met; checks what came of it.
  bool met(long nth) {
    const EmbeddingStoreOptions how = options();
    bool opened = false;
    bool failed_cleanly = false;
    const Holdings before = holdings();
    countdown = nth;
    try {
      const auto store = EmbeddingStore::open(governor_, how);
      opened = store.has_value();
      failed_cleanly = !opened && store.error().code != ErrorCode::kCorrupt;
    } catch (const std::bad_alloc&) {
      failed_cleanly = true;
    }
    const bool was_met = countdown.exchange(-1) <= 0;
    EXPECT_TRUE(opened || failed_cleanly) << "a table called corrupt for want of memory";
    EXPECT_TRUE(was_met || opened);
    expect_same(before);
    return was_met;
  }
  // A thread that ended stays listed for a moment, so that the fewest seen are those that run on.
  [[nodiscard]] Holdings holdings() {
    Holdings now;
    threads_ = now.threads = std::min(threads_, now.threads);
    return now;
  }
  static void expect_same(const Holdings& before) {
    Holdings after;
    for (int i = 0; i < 10'000 && after.threads > before.threads; ++i) {
      ::usleep(1000);
      after = Holdings();
    }
    EXPECT_LE(after.threads, before.threads) << "a thread was left behind";
    EXPECT_EQ(after.descriptors, before.descriptors) << "a descriptor was left open";
    EXPECT_EQ(after.blocks, before.blocks) << "memory was left behind";
  }
  std::vector<std::int64_t> ids_ = sparse_ids(700, 8);
  long threads_{Holdings().threads};
};

TEST_P(OutOfMemoryTest, OpeningATableFailsCleanlyAtEveryAllocation) {
  {
    auto store = open(options());
    const std::vector<float> rows(ids_.size() * 24, 3.0F);
    store.update(ids_, rows).or_throw();  // All rows, or in sample order a whole epoch,
    store.begin_epoch(1).or_throw();
    store.update(std::span(ids_).first(200), std::span(rows).first(std::size_t{200} * 24))
        .or_throw();  // and some of the next.
    store.commit(1).or_throw();
  }
  static_cast<void>(met(1'000'000));  // What is allocated once and kept is there now.
  long nth = 1;
  for (bool again = true; again && !HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    again = met(nth);
  }
  EXPECT_GT(nth, 30) << "too few allocations to mean anything";
  auto store = open(options());
  EXPECT_EQ(store.last_commit(), 1);
  EXPECT_EQ(gather(store, ids_), std::vector<float>(ids_.size() * 24, 3.0F));
}

TEST_P(OutOfMemoryTest, CreatingATableFailsCleanlyAtEveryAllocation) {
  static_cast<void>(met(1'000'000));
  long nth = 1;
  for (bool again = true; again && !HasFailure(); ++nth) {
    SCOPED_TRACE("allocation " + std::to_string(nth));
    fs::remove_all(directory());
    again = met(nth);
    auto store = open(options());  // Whatever was left behind, a table can be made there.
    EXPECT_EQ(all_rows(store).size(), ids_.size());
  }
  EXPECT_GT(nth, 60);
}

// What a contract says in one line: nothing is allocated after open().
TEST_P(OutOfMemoryTest, TrainingAllocatesNothing) {
  EmbeddingStoreOptions how = options();
  how.ids = std::span(ids_).first(600);
  how.rows_max = 700;
  auto store = open(with_floor(how));
  std::vector<float> rows(std::size_t{64} * 24, 1.0F);
  const auto train = [&](std::int64_t epoch) {
    store.begin_epoch(epoch).or_throw();
    for (std::size_t at = 0; at + 64 <= 600; at += 64) {
      const auto batch = std::span(ids_).subspan(at, 64);
      store.prefetch(batch);
      store.gather(batch, rows).or_throw();
      store.apply(batch, rows).or_throw();
      store.update(batch.first(9), std::span(rows).first(std::size_t{9} * 24)).or_throw();
    }
    store.insert(std::span(ids_).first(static_cast<std::size_t>(600 + 10 * epoch))).or_throw();
    store.commit(epoch + 1).or_throw();
  };
  train(0);
  train(1);
  const long before = asked.load();
  for (std::int64_t epoch = 2; epoch < 8; ++epoch) {
    train(epoch);
  }
  EXPECT_EQ(asked.load(), before);
}

// Of each the copy is made, or the table is as it was, and the next try succeeds.
TEST_P(OutOfMemoryTest, CompactionAndExportFailCleanlyAtEveryAllocation) {
  {
    auto store = open(options());
    store.update(ids_, std::vector<float>(ids_.size() * 24, 3.0F)).or_throw();
    store.commit(1).or_throw();
  }
  const fs::path out = root_ / "rows.npy";
  const auto clear = [&] {
    fs::remove(out);
    fs::remove(root_ / "rows.ids.npy");
  };
  const std::function<Result<void>()> works[] = {
      [&]() -> Result<void> { return EmbeddingStore::compact(governor_, directory(), -1, {}); },
      [&]() -> Result<void> {
        PLIMSOLL_TRY(const std::int64_t rows,
                     export_store(governor_, {.directory = directory(), .out = out}, {}));
        EXPECT_EQ(rows, static_cast<std::int64_t>(ids_.size()));
        return {};
      }};
  for (const auto& work : works) {
    if (&work == &works[0] && GetParam() == RowLayout::kSampleOrder) {
      continue;  // Refused: there is nothing to compact.
    }
    work().or_throw();  // What is allocated once and kept is there now.
    long nth = 1;
    for (bool met = true; met && !HasFailure(); ++nth) {
      SCOPED_TRACE((&work == &works[0] ? "compact, " : "export, ") + std::to_string(nth));
      clear();
      const Holdings before = holdings();
      bool done = false;
      countdown = nth;
      try {
        const auto result = work();
        done = result.has_value();
        EXPECT_TRUE(done || result.error().code != ErrorCode::kCorrupt);
      } catch (const std::bad_alloc&) {
      }
      met = countdown.exchange(-1) <= 0;
      EXPECT_TRUE(met || done);
      expect_same(before);
      EXPECT_TRUE(EmbeddingStore::verify(directory(), {}));
    }
    EXPECT_GT(nth, 60);
    clear();
    work().or_throw();
  }
  auto store = open(options());
  EXPECT_EQ(store.last_commit(), 1);
  EXPECT_EQ(gather(store, ids_), std::vector<float>(ids_.size() * 24, 3.0F));
}

INSTANTIATE_TEST_SUITE_P(Layouts, OutOfMemoryTest, both_layouts(), layout_case);

}  // namespace
}  // namespace plimsoll
