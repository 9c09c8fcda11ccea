// SPDX-License-Identifier: Apache-2.0
//
// What every benchmark program does alike: reads its options, finds a scratch folder, ends with one
// line of JSON for bench/run.
//
// Reading order: Arguments, Scratch, Report, run_benchmark, run_in_scratch; then any program's
// main().
//
// Threads: single-owner.   Memory: none to speak of.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace bench {

/// Of an even count, the mean of the middle two; of nothing, 0.
double median(std::vector<double> values);

/// The value below which the share `q` of the values lie. Requires: values is not empty.
double quantile(std::vector<double> values, double q);

/// An environment variable, or `otherwise` where it is empty or not set.
std::string from_environment(const char* name, const char* otherwise);

/// The words of a command line, one after another:
///
///     while (words.next()) {
///       if (words.is("--rows")) {
///         settings.rows = words.number(1);
///       } else {
///         words.refuse();
///       }
///     }
///
/// Each member that finds something wrong throws std::invalid_argument saying which option it is.
class Arguments {
 public:
  /// `usage`: the options, as they are shown when a word is refused.
  Arguments(int argc, char** argv, std::string name, std::string usage);

  /// Goes on to the next word; false when there is none left.
  bool next();
  [[nodiscard]] bool is(const char* option) const { return words_[at_] == option; }
  /// The whole number, or the word, that follows the option.
  std::int64_t number(std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                      std::int64_t most = std::numeric_limits<std::int64_t>::max());
  std::string word();
  [[noreturn]] void refuse() const;

  /// The name and every word: what `command` of the report says.
  [[nodiscard]] std::string command() const;
  [[nodiscard]] const std::string& name() const { return words_.front(); }

 private:
  std::vector<std::string> words_;  // The program's name first.
  std::string usage_;
  std::size_t at_{0};
};

/// A folder of this process's own below `below`, or where that is empty below TMPDIR, else /tmp.
/// Removed with everything in it.
class Scratch {
 public:
  explicit Scratch(const std::string& name, const std::filesystem::path& below = {});
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// A benchmark's last line.
struct Report {
  std::string name{};
  double value{0};
  std::string unit{};
  double bar{0};
  bool pass{false};
  nlohmann::json peers = nlohmann::json::object();
  std::uint64_t seed{0};
  std::string command{};

  /// Prints it. Returns the exit status: 0 when the bar is met, else 1.
  [[nodiscard]] int print() const;
};

/// Calls `body` with the command line. What it throws is printed and ends the program with 2.
int run_benchmark(int argc, char** argv, const std::string& name, const std::string& usage,
                  const std::function<int(Arguments&)>& body);

/// The same for a program that reads its settings from the command line and then works in a folder
/// of its own, removed at the end: run_in_scratch<Settings>(argc, argv, name, usage, settings_of,
/// run).
template <class Settings>
int run_in_scratch(int argc, char** argv, const std::string& name, const std::string& usage,
                   Settings (*settings_of)(Arguments&),
                   int (*run)(const Settings&, const std::filesystem::path&, const std::string&)) {
  return run_benchmark(argc, argv, name, usage, [&](Arguments& words) {
    const Settings settings = settings_of(words);
    const Scratch scratch(name);
    return run(settings, scratch.path(), words.command());
  });
}

}  // namespace bench
