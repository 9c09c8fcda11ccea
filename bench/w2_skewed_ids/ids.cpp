// SPDX-License-Identifier: Apache-2.0
#include "ids.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace w2 {
namespace {

std::vector<std::int64_t> distinct(const std::vector<std::int64_t>& ids) {
  std::unordered_set<std::int64_t> seen;
  std::vector<std::int64_t> once;
  for (const std::int64_t id : ids) {
    if (seen.insert(id).second) {
      once.push_back(id);
    }
  }
  return once;
}

}  // namespace

Zipf::Zipf(std::int64_t n, double s)
    : s_(s), n_(n), low_(integral(1.5) - 1.0), high_(integral(static_cast<double>(n) + 0.5)) {}

double Zipf::integral(double x) const {
  return std::pow(x, 1.0 - s_) / (1.0 - s_);
}

double Zipf::inverse(double y) const {
  return std::pow(y * (1.0 - s_), 1.0 / (1.0 - s_));
}

std::int64_t Zipf::draw(std::mt19937_64& random) const {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  for (;;) {
    const double y = high_ + unit(random) * (low_ - high_);
    const auto rank = std::clamp(static_cast<std::int64_t>(inverse(y) + 0.5), std::int64_t{1}, n_);
    const auto at = static_cast<double>(rank);
    if (y >= integral(at + 0.5) - std::pow(at, -s_)) {
      return rank;
    }
  }
}

std::vector<std::vector<std::int64_t>> drawn_batches(std::int64_t rows, double skew,
                                                     std::int64_t batch_rows, int batches,
                                                     std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> scattered(skew > 0 ? static_cast<std::size_t>(rows) : 0);
  for (std::size_t i = 0; i < scattered.size(); ++i) {
    scattered[i] = static_cast<std::int32_t>(i);
  }
  std::shuffle(scattered.begin(), scattered.end(), random);
  const Zipf zipf(rows, skew > 0 ? skew : 2.0);
  std::vector<std::vector<std::int64_t>> all;
  for (int b = 0; b < batches; ++b) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(batch_rows));
    for (auto& id : ids) {
      id = skew > 0 ? scattered[static_cast<std::size_t>(zipf.draw(random) - 1)]
                    : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    }
    all.push_back(distinct(ids));
  }
  return all;
}

RealIds read_ids(const std::filesystem::path& path, int column, std::int64_t batch_rows) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error("cannot read " + path.string());
  }
  RealIds real;
  std::unordered_map<std::int64_t, std::int64_t> number;
  std::vector<std::int64_t> batch;
  const auto flush = [&] {
    real.batches.push_back(distinct(batch));
    batch.clear();
  };
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    int at = 0;
    for (std::string word; words >> word; ++at) {
      std::int64_t id = 0;
      const char* const end = word.data() + word.size();
      const bool is_number = std::from_chars(word.data(), end, id).ptr == end;
      if (!is_number || (column < 0 ? at == 0 : at != column)) {
        continue;
      }
      batch.push_back(
          number.try_emplace(id, static_cast<std::int64_t>(number.size())).first->second);
      if (static_cast<std::int64_t>(batch.size()) == batch_rows) {
        flush();
      }
    }
  }
  if (!batch.empty()) {
    flush();
  }
  real.rows = static_cast<std::int64_t>(number.size());
  if (real.rows < 100) {
    throw std::runtime_error(path.string() + ": hardly any ids; is --column right?");
  }
  return real;
}

}  // namespace w2
