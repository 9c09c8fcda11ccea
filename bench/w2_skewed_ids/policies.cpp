// SPDX-License-Identifier: Apache-2.0
#include "policies.h"

#include <algorithm>
#include <deque>
#include <list>
#include <set>
#include <utility>

namespace w2 {

std::int64_t misses_of_lru(const Stream& stream) {
  std::list<std::uint32_t> order;  // Used last at the front.
  std::vector<std::list<std::uint32_t>::iterator> at(stream.page_count, order.end());
  std::int64_t misses = 0;
  for (std::size_t i = 0; i < stream.pages.size(); ++i) {
    const std::uint32_t page = stream.pages[i];
    if (at[page] != order.end()) {
      order.splice(order.begin(), order, at[page]);
      continue;
    }
    misses += i >= stream.warm ? 1 : 0;
    if (static_cast<std::int64_t>(order.size()) == stream.frames) {
      at[order.back()] = order.end();
      order.pop_back();
    }
    order.push_front(page);
    at[page] = order.begin();
  }
  return misses;
}

namespace {

class S3Fifo {
 public:
  S3Fifo(std::int64_t frames, std::uint32_t pages)
      : small_most_(std::max<std::int64_t>(1, frames / 10)),
        main_most_(std::max<std::int64_t>(1, frames - small_most_)),
        where_(pages, kOut),
        uses_(pages, 0) {}

  bool use(std::uint32_t page) {
    if (where_[page] == kSmall || where_[page] == kMain) {
      uses_[page] = static_cast<std::uint8_t>(std::min(uses_[page] + 1, 3));
      return true;
    }
    const bool known = where_[page] == kGhost;
    while (static_cast<std::int64_t>(small_.size() + main_.size()) >= small_most_ + main_most_) {
      if (static_cast<std::int64_t>(small_.size()) >= small_most_ || main_.empty()) {
        evict_small();
      } else {
        evict_main();
      }
    }
    uses_[page] = 0;
    (known ? main_ : small_).push_back(page);
    where_[page] = known ? kMain : kSmall;
    return false;
  }

 private:
  enum Place : std::uint8_t { kOut, kSmall, kMain, kGhost };

  void evict_small() {
    const std::uint32_t page = small_.front();
    small_.pop_front();
    if (uses_[page] > 1) {
      uses_[page] = 0;
      main_.push_back(page);
      where_[page] = kMain;
      return;
    }
    where_[page] = kGhost;
    ghosts_.push_back(page);
    if (static_cast<std::int64_t>(ghosts_.size()) > main_most_) {
      const std::uint32_t oldest = ghosts_.front();
      ghosts_.pop_front();
      where_[oldest] = where_[oldest] == kGhost ? kOut : where_[oldest];
    }
  }
  void evict_main() {
    for (;;) {
      const std::uint32_t page = main_.front();
      main_.pop_front();
      if (uses_[page] == 0) {
        where_[page] = kOut;
        return;
      }
      --uses_[page];
      main_.push_back(page);
    }
  }

  std::int64_t small_most_;
  std::int64_t main_most_;
  std::deque<std::uint32_t> small_;
  std::deque<std::uint32_t> main_;
  std::deque<std::uint32_t> ghosts_;
  std::vector<Place> where_;
  std::vector<std::uint8_t> uses_;
};

}  // namespace

std::int64_t misses_of_s3_fifo(const Stream& stream) {
  S3Fifo cache(stream.frames, stream.page_count);
  std::int64_t misses = 0;
  for (std::size_t i = 0; i < stream.pages.size(); ++i) {
    misses += !cache.use(stream.pages[i]) && i >= stream.warm ? 1 : 0;
  }
  return misses;
}

std::int64_t misses_at_best(const Stream& stream) {
  const std::size_t uses = stream.pages.size();
  std::vector<std::uint32_t> next(uses);
  std::vector<std::uint32_t> seen(stream.page_count, static_cast<std::uint32_t>(uses));
  for (std::size_t i = uses; i-- > 0;) {
    next[i] = seen[stream.pages[i]];
    seen[stream.pages[i]] = static_cast<std::uint32_t>(i);
  }
  std::set<std::pair<std::uint32_t, std::uint32_t>> resident;  // Next use, page.
  std::vector<std::uint32_t> due(stream.page_count, 0);        // Of a resident page, plus 1.
  std::int64_t misses = 0;
  for (std::size_t i = 0; i < uses; ++i) {
    const std::uint32_t page = stream.pages[i];
    if (due[page] != 0) {
      resident.erase({due[page] - 1, page});
    } else {
      misses += i >= stream.warm ? 1 : 0;
      if (static_cast<std::int64_t>(resident.size()) == stream.frames) {
        const auto last = std::prev(resident.end());
        due[last->second] = 0;
        resident.erase(last);
      }
    }
    resident.emplace(next[i], page);
    due[page] = next[i] + 1;
  }
  return misses;
}

}  // namespace w2
