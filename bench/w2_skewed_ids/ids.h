// SPDX-License-Identifier: Apache-2.0
//
// The id streams of w2_skewed_ids: uniform, Zipf, and real ones read from a file.
//
// Threads: single-owner.   Memory: the ids.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
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

/// The ids of a text file, renumbered in order of first appearance, in batches as above. `column`
/// −1: every number of a line but its first (user item item …); else that column of each line;
/// lines that hold no number there are skipped.
struct RealIds {
  std::vector<std::vector<std::int64_t>> batches;
  std::int64_t rows{0};
};
RealIds read_ids(const std::filesystem::path& path, int column, std::int64_t batch_rows);

}  // namespace w2
