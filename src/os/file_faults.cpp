// SPDX-License-Identifier: Apache-2.0
#include "os/file_faults.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "base/mutex.h"

namespace plimsoll {

namespace {

std::atomic<bool> armed{false};  // Written under faults_mutex; read by every file call.
Mutex faults_mutex;
FileFault current PLIMSOLL_GUARDED_BY(faults_mutex);
std::int64_t calls PLIMSOLL_GUARDED_BY(faults_mutex) = 0;

bool matches(FileCall call, FileCall armed_call) noexcept {
  return call == armed_call || (armed_call == FileCall::kAny && call < FileCall::kAny);
}

FaultVerdict count_and_judge(FileCall call, std::int64_t& delay_us) noexcept {
  MutexLock lock(faults_mutex);
  if (!armed.load(std::memory_order_relaxed) || !matches(call, current.call)) {
    return {};
  }
  ++calls;
  if (calls != current.nth && !(current.keeps_failing && calls > current.nth)) {
    return {};
  }
  if (current.delay_us > 0) {
    delay_us = current.delay_us;
    return {};
  }
  if (current.lost) {
    return {.lost = true};
  }
  if (current.os_errno != 0) {
    return {.fails = true, .os_errno = current.os_errno};
  }
  return {.bytes_max = current.short_bytes};
}

}  // namespace

void set_file_fault(const FileFault& fault) noexcept {
  MutexLock lock(faults_mutex);
  current = fault;
  calls = 0;
  armed.store(true, std::memory_order_relaxed);
}

bool file_fault_armed() noexcept {
  if (!armed.load(std::memory_order_relaxed)) {
    return false;
  }
  MutexLock lock(faults_mutex);
  return current.call != FileCall::kAioRead && current.call != FileCall::kAioWrite;
}

void clear_file_fault() noexcept {
  MutexLock lock(faults_mutex);
  armed.store(false, std::memory_order_relaxed);
}

std::int64_t file_fault_calls() noexcept {
  MutexLock lock(faults_mutex);
  return calls;
}

FaultVerdict ask_file_fault(FileCall call) noexcept {
  if (!armed.load(std::memory_order_relaxed)) [[likely]] {
    return {};
  }
  std::int64_t delay_us = 0;
  const FaultVerdict verdict = count_and_judge(call, delay_us);
  if (delay_us > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));  // With no lock held.
  }
  return verdict;
}

}  // namespace plimsoll
