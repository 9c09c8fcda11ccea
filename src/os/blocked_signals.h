// SPDX-License-Identifier: Apache-2.0
//
// BlockedSignals: threads started in its scope receive no signals.
//
// Signals belong to the program's own threads. The mask is put back however the scope ends, also
// when a thread could not be started.
//
// Threads: of the calling thread alone.   Memory: one signal set.
#pragma once

#include <csignal>

#include <pthread.h>

namespace plimsoll {

class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace plimsoll
