// SPDX-License-Identifier: Apache-2.0
//
// The id streams of w2_skewed_ids: uniform, Zipf, and real ones read from a file.
//
// Threads: single-owner.   Memory: the ids.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <span>
#include <vector>

namespace w2 {

/// Draws rank 1 … n with weight rank^−s, s ≠ 1, by rejection from the integral of x^−s.
/// Source: Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone discrete
///         distributions" (ACM TOMACS 6, 1996).
class Zipf {
 public:
  Zipf(std::int64_t n, double s);
  std::int64_t draw(std::mt19937_64& random) const;

 private:
  [[nodiscard]] double integral(double x) const;
  [[nodiscard]] double inverse(double y) const;
  double s_;
  std::int64_t n_;
  double low_;
  double high_;
};

/// Batches of `batch_rows` draws from ids 0 … rows − 1, each without its repetitions. `skew` 0:
/// uniform; else Zipf, the ranks scattered over the ids.
std::vector<std::vector<std::int64_t>> drawn_batches(std::int64_t rows, double skew,
                                                     std::int64_t batch_rows, int batches,
                                                     std::uint64_t seed);

/// The ids of a file, or of standard input where its path is "-", renumbered in order of first
/// appearance. Read as what its contents look like:
/// - text: numbers, or hexadecimal ones that begin with 0x. `column` −1: every number of a line but
///   its first (user item item …); else that column of each line. Other words are skipped.
/// - lines of JSON: the array "hash_ids" of each.
/// - anything else: 32-bit words.
/// Throws where it cannot be read or holds fewer than 100 ids.
struct RealIds {
  std::vector<std::int64_t> ids;
  std::int64_t rows{0};
};
RealIds read_ids(const std::filesystem::path& path, int column);

/// Batches of `batch_rows` ids each, less their repetitions; the last may be shorter.
std::vector<std::vector<std::int64_t>> batches_of(std::span<const std::int64_t> ids,
                                                  std::int64_t batch_rows);

}  // namespace w2
