// SPDX-License-Identifier: Apache-2.0
#include "os/fork.h"

#include <atomic>
#include <cerrno>
#include <mutex>
#include <utility>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/check.h"

namespace plimsoll {
namespace {

std::atomic<std::uint64_t> generation{0};  // Written by the only thread of a child.

// Guards the list, and is held over a fork(): no descriptor is opened or closed meanwhile.
constinit std::mutex list_mutex;
constinit OwnDescriptor* list_first = nullptr;

}  // namespace

void close_own_descriptors_in_child() noexcept {
  generation.fetch_add(1, std::memory_order_relaxed);
  while (list_first != nullptr) {
    OwnDescriptor& own = *list_first;
    ::close(std::exchange(own.descriptor_, -1));
    own.delist();
  }
  list_mutex.unlock();
}

namespace {

[[maybe_unused]] const int kHandlers = ::pthread_atfork(
    [] { list_mutex.lock(); }, [] { list_mutex.unlock(); }, close_own_descriptors_in_child);

}  // namespace

std::uint64_t fork_generation() noexcept {
  return generation.load(std::memory_order_relaxed);
}

Result<void> ForkMark::check(const std::filesystem::path& opened, const char* call,
                             const char* advice) const {
  if (!forked()) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}() in a process that was forked after it was opened",
                          opened.string(), call),
              advice);
}

OwnDescriptor OwnDescriptor::open(const std::filesystem::path& path, int flags) noexcept {
  OwnDescriptor own;
  const std::lock_guard lock(list_mutex);
  do {
    own.descriptor_ = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  } while (own.descriptor_ < 0 && errno == EINTR);
  if (own.descriptor_ >= 0) {
    own.enlist();
  }
  return own;
}

OwnDescriptor OwnDescriptor::in_memory(const char* name) noexcept {
  OwnDescriptor own;
  const std::lock_guard lock(list_mutex);
  own.descriptor_ = ::memfd_create(name, MFD_CLOEXEC);
  if (own.descriptor_ >= 0) {
    own.enlist();
  }
  return own;
}

OwnDescriptor::OwnDescriptor(OwnDescriptor&& other) noexcept {
  take(other);
}

OwnDescriptor& OwnDescriptor::operator=(OwnDescriptor&& other) noexcept {
  if (this != &other) {
    close();
    take(other);
  }
  return *this;
}

OwnDescriptor::~OwnDescriptor() {
  close();
}

void OwnDescriptor::take(OwnDescriptor& other) noexcept {
  const std::lock_guard lock(list_mutex);
  if (other.descriptor_ >= 0) {
    other.delist();
    descriptor_ = std::exchange(other.descriptor_, -1);
    enlist();
  }
}

void OwnDescriptor::close() noexcept {
  const std::lock_guard lock(list_mutex);
  if (descriptor_ >= 0) {
    delist();
    ::close(std::exchange(descriptor_, -1));
  }
}

void OwnDescriptor::enlist() noexcept {
  before_ = nullptr;
  after_ = list_first;
  if (after_ != nullptr) {
    after_->before_ = this;
  }
  list_first = this;
}

void OwnDescriptor::delist() noexcept {
  (before_ != nullptr ? before_->after_ : list_first) = after_;
  if (after_ != nullptr) {
    after_->before_ = before_;
  }
  before_ = nullptr;
  after_ = nullptr;
}

}  // namespace plimsoll
