// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_write_back.h"

#include <exception>

#include <pthread.h>

#include "os/background_thread.h"
#include "os/blocked_signals.h"

namespace plimsoll {

WriteBack::WriteBack(PageCache& cache) : cache_(cache) {
  const BlockedSignals blocked;
  thread_ = std::jthread([this] { work(); });
}

WriteBack::~WriteBack() {
  cache_.stop();
}

void WriteBack::work() noexcept {
  enter_background("pl-back");
  try {
    while (cache_.write_back()) {
    }
  } catch (const std::exception& problem) {
    // A broken invariant, or no memory for an error's text: the owner is told at its next call.
    cache_.poison(make_error(ErrorCode::kInternal, problem.what()));
  }
}

}  // namespace plimsoll
