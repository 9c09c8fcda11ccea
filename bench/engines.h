// SPDX-License-Identifier: Apache-2.0
//
// The peers of w1_shuffled_epoch and w2_skewed_ids: key-value stores that read the rows of a batch,
// change them and write them back. Tuned as their guides say; bench/README.md names each option.
//
// Reading order: Engine, EngineOptions, LookAhead; then engine_rocksdb.cpp or engine_lmdb.cpp.
//
// Threads: single-owner; an engine has threads of its own.
// Memory:  memory_bytes, as far as the peer keeps to it, and four batches.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace bench {

inline constexpr float kRate = 0.5F;
inline constexpr std::size_t kAhead = 3;  // Batches announced beforehand, to everyone.

/// Small binary fractions, so that any order of sums gives the same bits.
inline float start_of(std::int64_t id) {
  return static_cast<float>(id % 8) * 0.25F;
}
inline float grad_of(std::int64_t id, std::int64_t batch) {
  return static_cast<float>((id * 31 + batch) % 7 - 3) * 0.125F;
}

class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  /// Reads the rows, takes one SGD step with grad_of(), writes them. Requires: distinct ids.
  virtual void step(std::span<const std::int64_t> ids, std::int64_t batch) = 0;
  /// Ids of a batch to come; at most kAhead batches are outstanding.
  virtual void announce(std::span<const std::int64_t> /*ids*/) {}
  /// What was stepped survives a loss of power, where EngineOptions::durable asks for it.
  virtual void commit() {}
  /// Does now what it has left for later, in nobody's time.
  virtual void settle() {}
  /// All weights of a row.
  virtual std::vector<float> row(std::int64_t id) = 0;
};

struct EngineOptions {
  std::filesystem::path directory{};
  std::int64_t rows{0};
  std::int64_t dim{124};         ///< 496 bytes of weights; 512 with the store's header.
  std::int64_t memory_bytes{0};  ///< Of blocks and unwritten rows together; LMDB's is the kernel's.
  int readers{16};               ///< Threads that read a batch, so that the disk has enough to do.
  bool durable{false};
};

/// Filled with start_of() for ids 0 … rows − 1; nullptr where the library was not found. Throws.
std::unique_ptr<Engine> make_rocksdb(const EngineOptions& options);
std::unique_ptr<Engine> make_lmdb(const EngineOptions& options);

/// Calls body(first, count) for pieces of [0, count), on `threads` threads at once.
template <class Body>
void in_pieces(std::size_t count, int threads, const Body& body) {
  const auto crew = static_cast<std::size_t>(threads);
  const std::size_t share = (count + crew - 1) / crew;
  std::vector<std::jthread> members;
  for (std::size_t first = 0; first < count; first += share) {
    members.emplace_back(
        [&body, first, some = std::min(share, count - first)] { body(first, some); });
  }
}

/// A thread that has batches read before they are asked for. Announced batches that come while
/// kAhead of them wait are dropped.
class LookAhead {
 public:
  /// `touch` brings the rows of a batch into memory.
  explicit LookAhead(std::function<void(const std::vector<std::int64_t>&)> touch)
      : touch_(std::move(touch)), thread_([this](const std::stop_token& stop) { work(stop); }) {}

  void announce(std::span<const std::int64_t> ids) {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() < kAhead) {
      waiting_.emplace_back(ids.begin(), ids.end());
      changed_.notify_all();
    }
  }
  /// Forgets what has not begun and waits for what has.
  void rest() {
    std::unique_lock lock(mutex_);
    waiting_.clear();
    changed_.wait(lock, [this] { return !busy_; });
  }

 private:
  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [this] { return !waiting_.empty(); })) {
      const auto ids = std::move(waiting_.front());
      waiting_.erase(waiting_.begin());
      busy_ = true;
      lock.unlock();
      touch_(ids);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::function<void(const std::vector<std::int64_t>&)> touch_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::vector<std::int64_t>> waiting_;  // Guarded by the mutex, as is busy_.
  bool busy_{false};
  std::jthread thread_;  // Joined before what is above is destroyed.
};

}  // namespace bench
