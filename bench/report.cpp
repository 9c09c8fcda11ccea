// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <utility>

namespace bench {

double median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<std::size_t>(q * static_cast<double>(values.size())))];
}

std::string from_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

Arguments::Arguments(int argc, char** argv, std::string name, std::string usage)
    : words_(argv, argv + argc), usage_(std::move(usage)) {
  words_.front() = std::move(name);
}

bool Arguments::next() {
  return ++at_ < words_.size();
}

std::string Arguments::word() {
  if (at_ + 1 >= words_.size()) {
    throw std::invalid_argument(words_[at_] + " wants a value");
  }
  return words_[++at_];
}

std::int64_t Arguments::number(std::int64_t least, std::int64_t most) {
  const std::string& option = words_[at_];
  const std::string text = word();
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end || value < least || value > most) {
    throw std::invalid_argument(option + " wants a whole number from " + std::to_string(least) +
                                " to " + std::to_string(most) + ", not " + text);
  }
  return value;
}

void Arguments::refuse() const {
  throw std::invalid_argument("unknown option " + words_[at_] + "\nusage: bench_" + name() + " " +
                              usage_);
}

std::string Arguments::command() const {
  std::string all = name();
  for (std::size_t i = 1; i < words_.size(); ++i) {
    all += " " + words_[i];
  }
  return all;
}

Scratch::Scratch(const std::string& name, const std::filesystem::path& below)
    : path_((below.empty() ? std::filesystem::path(from_environment("TMPDIR", "/tmp")) : below) /
            ("plimsoll-" + name + "-" + std::to_string(::getpid()))) {
  std::filesystem::create_directories(path_);
}

Scratch::~Scratch() {
  std::error_code unheard;
  std::filesystem::remove_all(path_, unheard);
}

int Report::print() const {
  const nlohmann::json line{{"name", name},
                            {"value", value},
                            {"unit", unit},
                            {"bar", bar},
                            {"pass", pass},
                            {"peers", peers},
                            {"seed", seed},
                            {"command", command},
                            {"commit", from_environment("PLIMSOLL_COMMIT", "unknown")}};
  std::cout << line.dump() << std::endl;
  return pass ? 0 : 1;
}

int run_benchmark(int argc, char** argv, const std::string& name, const std::string& usage,
                  const std::function<int(Arguments&)>& body) {
  try {
    Arguments arguments(argc, argv, name, usage);
    return body(arguments);
  } catch (const std::exception& problem) {
    std::cerr << name << ": " << problem.what() << '\n';
    return 2;
  }
}

}  // namespace bench
