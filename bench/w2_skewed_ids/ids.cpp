// SPDX-License-Identifier: Apache-2.0
#include "ids.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include <nlohmann/json.hpp>

namespace w2 {
namespace {

std::vector<std::int64_t> distinct(std::span<const std::int64_t> ids) {
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

namespace {

// Appends the ids of a line of text; those of a line of JSON are its "hash_ids".
void ids_of_line(const std::string& line, int column, std::vector<std::int64_t>& ids) {
  if (line.starts_with('{')) {
    const auto named = nlohmann::json::parse(line).at("hash_ids").get<std::vector<std::int64_t>>();
    ids.insert(ids.end(), named.begin(), named.end());
    return;
  }
  std::istringstream words(line);
  int at = 0;
  for (std::string word; words >> word; ++at) {
    if (column < 0 ? at == 0 : at != column) {
      continue;
    }
    const int skipped = word.starts_with("0x") ? 2 : 0;
    const char* const end = word.data() + word.size();
    std::int64_t id = 0;
    if (std::from_chars(word.data() + skipped, end, id, skipped != 0 ? 16 : 10).ptr == end) {
      ids.push_back(id);
    }
  }
}

std::vector<std::int64_t> all_ids(std::istream& file, int column) {
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::int64_t> ids;
  const auto binary = [](char c) { return c == '\0' || static_cast<unsigned char>(c) >= 0x80; };
  if (std::any_of(all.begin(), all.begin() + std::min<std::ptrdiff_t>(std::ssize(all), 64),
                  binary)) {
    for (std::size_t at = 0; at + sizeof(std::uint32_t) <= all.size();
         at += sizeof(std::uint32_t)) {
      std::uint32_t id = 0;
      std::memcpy(&id, all.data() + at, sizeof id);
      ids.push_back(id);
    }
    return ids;
  }
  std::istringstream lines(all);
  for (std::string line; std::getline(lines, line);) {
    ids_of_line(line, column, ids);
  }
  return ids;
}

}  // namespace

RealIds read_ids(const std::filesystem::path& path, int column) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) {
      throw std::runtime_error("cannot read " + path.string());
    }
  }
  RealIds real;
  real.ids = all_ids(path == "-" ? std::cin : file, column);
  std::unordered_map<std::int64_t, std::int64_t> number;
  for (std::int64_t& id : real.ids) {
    id = number.try_emplace(id, static_cast<std::int64_t>(number.size())).first->second;
  }
  real.rows = static_cast<std::int64_t>(number.size());
  if (real.rows < 100) {
    throw std::runtime_error(path.string() + ": hardly any ids; is --column right?");
  }
  return real;
}

std::vector<std::vector<std::int64_t>> batches_of(std::span<const std::int64_t> ids,
                                                  std::int64_t batch_rows) {
  std::vector<std::vector<std::int64_t>> batches;
  while (!ids.empty()) {
    const auto some = ids.first(std::min(ids.size(), static_cast<std::size_t>(batch_rows)));
    batches.push_back(distinct(some));
    ids = ids.subspan(some.size());
  }
  return batches;
}

}  // namespace w2
