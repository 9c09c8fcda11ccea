// SPDX-License-Identifier: Apache-2.0
//
// Goal: the page cache evicts what its policy says: never a page whose use was announced and has
// not come, else by how often pages were used, ageing; and writes last what is used most. Method: a
// plain model of the policy, page by page, beside the cache, both given the same requests and
// announcements by seed; after each the two must have read, written and evicted as many pages. The
// cache is driven without its threads, and with so few frames that it frees one at a time: nothing
// is left to chance.
#include "store/embedding_page_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "store/id_index.h"

namespace plimsoll {
namespace {

using Hint = PageCache::Hint;

// ---- The policy, plainly ----------------------------------------------------------------------

class Model {
 public:
  struct Counts {
    std::int64_t read{0};
    std::int64_t written{0};
    std::int64_t evicted_clean{0};
    std::int64_t evicted_dirty{0};
    friend bool operator==(const Counts&, const Counts&) = default;
  };

  Model(std::size_t pages, std::size_t frames) : pages_(pages), frames_(frames, kNobody) {}

  // One request: `wanted` are different pages.
  void request(const std::vector<std::uint32_t>& wanted, bool writes) {
    ++now_;
    std::vector<std::uint32_t> loaded;
    for (const std::uint32_t p : wanted) {
      const bool here = pages_[p].frame >= 0;
      if (!here) {
        EXPECT_TRUE(load(p)) << "an announced page would have to go";
        loaded.push_back(p);
      } else {
        use(pages_[p], writes);
      }
      pinned_.insert(p);
    }
    for (const std::uint32_t p : loaded) {
      use(pages_[p], writes);
    }
    pinned_.clear();
  }

  // Uses that are coming, as far as half of the frames; returns how many it has dealt with.
  std::size_t announce(const std::vector<Hint>& hints) {
    std::size_t done = 0;
    for (; done < hints.size(); ++done) {
      if (hints[done].tick <= reached_) {
        continue;  // Late.
      }
      Page& page = pages_[hints[done].page];
      const bool full = announced_pages() >= static_cast<std::int64_t>(frames_.size() / 2);
      if (page.frame >= 0) {
        if (!full || !page.coming.empty()) {
          add(page, hints[done].tick);
        }
      } else if (full) {
        break;
      } else if (load(hints[done].page)) {
        add(page, hints[done].tick);
      }
    }
    return done;
  }

  void reached(std::uint32_t tick) { reached_ = tick; }

  void write_all() {
    for (Page& page : pages_) {
      counts_.written += page.dirty ? 1 : 0;
      page.on_disk = page.on_disk || page.dirty;
      page.dirty = false;
    }
  }
  [[nodiscard]] const Counts& counts() const { return counts_; }

 private:
  static constexpr std::int64_t kNobody = -1;
  static constexpr std::uint32_t kReach = 32;
  struct Page {
    std::int64_t frame{-1};
    std::int64_t used_at{0};
    std::int64_t round{0};
    int heat{0};  // How often used, halved now and then; it outlives the page's stay.
    bool dirty{false};
    bool on_disk{false};
    std::set<std::uint32_t> coming{};  // Announced uses that have not come yet.
  };

  static void add(Page& page, std::uint32_t tick) {
    if (page.coming.empty() || tick - *page.coming.begin() <= kReach) {
      page.coming.insert(tick);
    }
  }
  [[nodiscard]] std::int64_t announced_pages() const {
    return std::count_if(pages_.begin(), pages_.end(),
                         [](const Page& page) { return page.frame >= 0 && !page.coming.empty(); });
  }
  void use(Page& page, bool writes) {
    const std::int64_t since = now_ - page.used_at;
    page.used_at = now_;
    page.dirty = page.dirty || writes;
    if (writes && since == 1) {
      return;  // A step reads its rows and then changes them: that is one use.
    }
    page.heat = std::min(page.heat + 1, 255);
    page.round = round_;
    if (!page.coming.empty()) {
      page.coming.erase(page.coming.begin());
    }
    if (++uses_ == static_cast<std::int64_t>(frames_.size())) {
      uses_ = 0;
      ++round_;
      for (Page& each : pages_) {
        each.heat /= round_ % 32 == 0 ? 2 : 1;
      }
    }
  }
  // What keeping a page is worth, where nobody has announced a use of it.
  [[nodiscard]] auto worth(const Page& page) const {
    const bool in_step = now_ - page.used_at <= 1;
    // Worth half after eight rounds of disuse, a quarter after sixteen, linearly in between.
    const std::int64_t unused = round_ - page.round;
    const auto worth = page.heat * (16 - unused % 8) / (std::int64_t{1} << unused / 8);
    return std::tuple(in_step, worth, page.dirty, page.used_at, page.frame);
  }
  bool load(std::uint32_t page) {
    auto frame = std::find(frames_.begin(), frames_.end(), kNobody);
    if (frame == frames_.end()) {
      const std::int64_t victim = choose();
      if (victim < 0) {
        return false;
      }
      Page& gone = pages_[static_cast<std::size_t>(victim)];
      (gone.dirty ? counts_.evicted_dirty : counts_.evicted_clean) += 1;
      counts_.written += gone.dirty ? 1 : 0;
      gone.on_disk = gone.on_disk || gone.dirty;
      gone.dirty = false;
      gone.coming.clear();
      frame = frames_.begin() + gone.frame;
      gone.frame = -1;
    }
    *frame = page;
    Page& come = pages_[page];
    come.frame = frame - frames_.begin();
    come.used_at = now_ - 2;
    come.round = round_;
    counts_.read += come.on_disk ? 1 : 0;
    return true;
  }
  // The page worth least of those that are neither pinned nor announced. There always is one for a
  // request: at most half of the frames are announced, and at most half are pinned.
  [[nodiscard]] std::int64_t choose() const {
    std::int64_t least = -1;
    for (const std::int64_t p : frames_) {
      const Page& page = pages_[static_cast<std::size_t>(p)];
      if (pinned_.count(static_cast<std::uint32_t>(p)) == 0 && page.coming.empty() &&
          (least < 0 || worth(page) < worth(pages_[static_cast<std::size_t>(least)]))) {
        least = p;
      }
    }
    return least;
  }

  std::vector<Page> pages_;
  std::vector<std::int64_t> frames_;  // The page in each.
  std::set<std::uint32_t> pinned_{};
  std::int64_t now_{0};
  std::int64_t uses_{0};
  std::int64_t round_{0};  // Each lasts for as many uses as there are frames.
  std::uint32_t reached_{0};
  Counts counts_{};
};

// ---- The cache, without its threads -----------------------------------------------------------

constexpr std::int64_t kPages = 240;
constexpr std::int64_t kDim = 900;  // One row a page.

class CacheAlone {
 public:
  explicit CacheAlone(std::int64_t frames, std::int64_t dirty_most = kPages * 2)
      : path_(std::filesystem::temp_directory_path() /
              ("plimsoll-page-cache-" + std::to_string(::getpid()))),
        file_(File::open(path_, FileMode::kCreate).or_throw()),
        sizes_{.frames = frames, .write_batch = 2, .read_batch = frames, .dirty_most = dirty_most} {
    const std::int64_t spare = 3 * sizes_.write_batch;
    slab_ = Slab::create(governor_, Tag::kEmbedding,
                         PageCache::buffer_bytes(shape_, sizes_) + PageCache::index_bytes(shape_) +
                             frames * PageCache::frame_bytes(shape_) +
                             BlockMap::memory_bytes(kPages, spare) + (64 << 10))
                .or_throw();
    ids_ = IdIndex::open("", "", {.rows = kPages, .dense = true}, slab_, 2, pool_).or_throw();
    map_ = BlockMap(kPages, spare, slab_);
    cache_ = std::make_unique<PageCache>(PageCache::Table{.shape = shape_,
                                                          .fingerprint = 7,
                                                          .init = {},
                                                          .ids = &ids_,
                                                          .file = &file_,
                                                          .pool = &pool_},
                                         sizes_, map_, slab_);
  }
  ~CacheAlone() {
    cache_.reset();
    std::filesystem::remove(path_);
  }
  CacheAlone(const CacheAlone&) = delete;
  CacheAlone& operator=(const CacheAlone&) = delete;

  void request(const std::vector<std::uint32_t>& wanted, bool writes) {
    cache_->begin_request().or_throw();
    std::vector<std::uint64_t> keys;
    keys.reserve(wanted.size());
    for (const std::uint32_t page : wanted) {
      keys.push_back(std::uint64_t{page} << 32);
    }
    std::vector<std::byte*> records(keys.size());
    const auto pinned = cache_->pin(keys, writes, records).or_throw();
    ASSERT_EQ(pinned, static_cast<std::int64_t>(keys.size()));
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      RowHeader header;
      std::memcpy(&header, records[i], sizeof header);
      ASSERT_EQ(header.id, wanted[i]);
    }
    cache_->unpin();
  }
  void write_all() {
    const auto last = cache_->begin_commit().or_throw();
    cache_->end_commit(pool_.run(last.first(last.size() - 1)), 0);
  }
  [[nodiscard]] PageCache& cache() { return *cache_; }
  [[nodiscard]] std::int64_t dirty_pages() const {
    return cache_->stats().dirty_bytes / shape_.page_bytes;
  }
  [[nodiscard]] Model::Counts counts() const {
    const StoreStats stats = cache_->stats();
    return {stats.pages_read, stats.pages_written, stats.evictions_clean, stats.evictions_dirty};
  }

 private:
  const std::filesystem::path path_;
  const TableShape shape_ = table_shape(kPages, kDim, 0);
  Governor governor_ = Governor::create({.memory_limit = "1GiB"}).or_throw();
  File file_;
  IoPool pool_{0};
  const PageCache::Sizes sizes_;
  Slab slab_;
  BlockMap map_;
  IdIndex ids_;
  std::unique_ptr<PageCache> cache_;
};

// ---- Both ---------------------------------------------------------------------------------------

// Different pages, of which low numbers are the frequent ones; they drift.
std::vector<std::uint32_t> draw_pages(std::size_t most, std::int64_t drift,
                                      std::mt19937_64& random) {
  std::vector<std::uint32_t> pages;
  const std::size_t count = random() % 4 == 0 ? most : 1 + random() % most;
  while (pages.size() < count) {
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    const auto rank = static_cast<std::int64_t>(static_cast<double>(kPages) * std::pow(u, 3.0));
    const auto page = static_cast<std::uint32_t>((rank + drift) % kPages);
    if (std::find(pages.begin(), pages.end(), page) == pages.end()) {
      pages.push_back(page);
    }
  }
  return pages;
}

struct Case {
  std::int64_t frames;
  std::size_t ahead;  // Requests announced beforehand.
  std::size_t most;   // Pages of a request.
};

class PageCachePolicyTest : public ::testing::TestWithParam<Case> {};

TEST_P(PageCachePolicyTest, EvictsAsAPlainModelOfItDoes) {
  const auto [frames, ahead, most] = GetParam();
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    CacheAlone real(frames);
    Model model(kPages, static_cast<std::size_t>(frames));
    std::deque<std::vector<std::uint32_t>> coming;
    std::deque<Hint> queue;  // Announced, and not dealt with yet.
    std::uint32_t tick = 0;
    for (std::int64_t at = 0; at < 2000; ++at) {
      while (coming.size() <= ahead) {
        coming.push_back(draw_pages(most, at / 50, random));
        ++tick;
        const bool told = random() % 10 != 0;  // Some requests come as a surprise,
        for (const std::uint32_t page : coming.back()) {
          if (ahead > 0 && told) {
            queue.push_back({page, tick});
          }
        }
        if (ahead > 0 && random() % 20 == 0) {  // and some that were announced never come.
          queue.push_back({static_cast<std::uint32_t>(random() % kPages), tick});
        }
      }
      if (random() % 8 != 0) {  // Else the look-ahead falls behind, maybe beyond the requests.
        const std::vector<Hint> hints(queue.begin(), queue.end());
        const std::size_t done = real.cache().load_hinted(hints);
        ASSERT_EQ(done, model.announce(hints)) << "request " << at;
        ASSERT_EQ(real.counts(), model.counts()) << "before request " << at;
        queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(done));
      }
      if (random() % 10 != 0) {
        const auto current = static_cast<std::uint32_t>(at + 1);
        real.cache().reached(current);
        model.reached(current);
      }
      const auto wanted = coming.front();
      coming.pop_front();
      const bool step = random() % 3 != 0;  // Reads rows, and mostly changes them.
      for (const bool writes : {false, true}) {
        if (writes && !step) {
          break;
        }
        real.request(wanted, writes);
        model.request(wanted, writes);
        ASSERT_EQ(real.counts(), model.counts()) << "request " << at << " writes " << writes;
      }
      if (random() % 200 == 0) {
        real.write_all();
        model.write_all();
      }
    }
    EXPECT_GT(real.counts().read, 2000);
    EXPECT_GT(real.counts().evicted_dirty, 500);
  }
}

// Ten pages are changed by every request and five by one in 46: only those five are worth writing.
TEST(PageCacheTest, WhatIsChangedAllTheTimeIsWrittenLast) {
  constexpr std::int64_t kSteps = 300;
  constexpr std::int64_t kOften = 10;
  constexpr std::int64_t kSeldom = 5;
  constexpr std::int64_t kDirtyMost = 40;
  CacheAlone real(kPages - 1, kDirtyMost);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    std::vector<std::uint32_t> wanted(kOften);
    std::iota(wanted.begin(), wanted.end(), 0U);
    for (std::int64_t i = 0; i < kSeldom; ++i) {
      wanted.push_back(
          static_cast<std::uint32_t>(kOften + (step * kSeldom + i) % (kPages - kOften)));
    }
    real.request(wanted, false);
    real.request(wanted, true);
    while (real.dirty_pages() > kDirtyMost / 2) {
      ASSERT_TRUE(real.cache().write_back());
    }
    ASSERT_EQ(real.counts().written + real.dirty_pages(), kOften + (step + 1) * kSeldom);
  }
  real.write_all();
  EXPECT_EQ(real.counts().written, kOften + kSteps * kSeldom);
}

TEST(PageCacheTest, ACommitMayWriteForAHundredthOfTheTimeSinceTheLast) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  EXPECT_DOUBLE_EQ(commit_seconds(0), 0.05);
  EXPECT_DOUBLE_EQ(commit_seconds(4 * kSecond), 0.05);
  EXPECT_DOUBLE_EQ(commit_seconds(20 * kSecond), 0.2);
  EXPECT_DOUBLE_EQ(commit_seconds(86'400 * kSecond), 1);
}

INSTANTIATE_TEST_SUITE_P(Sizes, PageCachePolicyTest,
                         ::testing::Values(Case{8, 0, 4}, Case{33, 0, 16}, Case{63, 0, 5},
                                           Case{8, 3, 4}, Case{9, 2, 4}, Case{33, 2, 16},
                                           Case{33, 8, 16}, Case{63, 4, 31}, Case{63, 20, 5},
                                           Case{63, 5, 5}));

}  // namespace
}  // namespace plimsoll
