// SPDX-License-Identifier: Apache-2.0
//
// The peers of w2_skewed_ids: key-value stores that read the rows of a batch, change them and write
// them back.
//
// Threads: single-owner.   Memory: cache_bytes, as far as the peer keeps to it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace w2 {

inline constexpr std::int64_t kDim = 124;  // 496 bytes of weights; 512 with the store's header.
inline constexpr float kRate = 0.5F;

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
  /// Ids of a batch to come; at most three batches are outstanding.
  virtual void announce(std::span<const std::int64_t> /*ids*/) {}
  /// Does now what it has left for later, in nobody's time.
  virtual void settle() {}
  /// All weights of a row.
  virtual std::vector<float> row(std::int64_t id) = 0;
};

/// Filled with start_of() for ids 0 … rows − 1; nullptr where the library was not found. Throws.
std::unique_ptr<Engine> make_rocksdb(const std::filesystem::path& directory, std::int64_t rows,
                                     std::int64_t cache_bytes, int readers);
std::unique_ptr<Engine> make_lmdb(const std::filesystem::path& directory, std::int64_t rows);

}  // namespace w2
