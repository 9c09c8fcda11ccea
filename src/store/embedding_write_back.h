// SPDX-License-Identifier: Apache-2.0
//
// WriteBack: the thread that keeps the dirty pages of a cache few.
//
// Reading order: embedding_page_cache.h (write_back), this file.
//
// Threads: one of its own.   Memory: one stack; its buffers are the cache's.
#pragma once

#include <thread>

#include "store/embedding_page_cache.h"

namespace plimsoll {

class WriteBack {
 public:
  /// Requires: cache outlives this.
  explicit WriteBack(PageCache& cache);
  ~WriteBack();
  WriteBack(const WriteBack&) = delete;
  WriteBack& operator=(const WriteBack&) = delete;

 private:
  void work() noexcept;

  PageCache& cache_;
  std::jthread thread_;  // Last: joined before the rest is destroyed.
};

}  // namespace plimsoll
