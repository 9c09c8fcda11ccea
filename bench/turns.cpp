// SPDX-License-Identifier: Apache-2.0
#include "bench/turns.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>

namespace bench {

Child::Child(const std::vector<std::string>& command, const std::vector<std::string>& environment)
    : name_(command.front()) {
  int to[2];
  int from[2];
  if (::pipe(to) != 0 || ::pipe(from) != 0 || (pid_ = ::fork()) < 0) {
    throw std::runtime_error(name_ + ": cannot start a child");
  }
  if (pid_ == 0) {
    ::dup2(to[0], 0);
    ::dup2(from[1], 1);
    for (const int end : {to[0], to[1], from[0], from[1]}) {
      ::close(end);
    }
    std::vector<std::string> words = command;
    std::vector<std::string> sets = environment;
    for (std::string& set : sets) {
      ::putenv(set.data());
    }
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    argv.push_back(nullptr);
    ::execv(argv.front(), argv.data());
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  to_ = ::fdopen(to[1], "w");
  from_ = ::fdopen(from[0], "r");
}

Child::~Child() {
  std::fclose(to_);
  std::fclose(from_);
  ::waitpid(pid_, nullptr, 0);
}

std::string Child::ask(const std::string& line) {
  std::fputs((line + "\n").c_str(), to_);
  std::fflush(to_);
  char answer[256];
  if (std::fgets(answer, sizeof answer, from_) == nullptr) {
    throw std::runtime_error(name_ + ": a child ended early");
  }
  return answer;
}

Ratio ratio_of(const std::vector<double>& logs) {
  const auto count = static_cast<double>(logs.size());
  double mean = 0;
  for (const double value : logs) {
    mean += value / count;
  }
  double squares = 0;
  for (const double value : logs) {
    squares += (value - mean) * (value - mean);
  }
  const double freedom = count - 1;
  if (freedom < 1) {
    return {std::exp(mean), std::numeric_limits<double>::infinity()};
  }
  const double z = 1.959964;
  const double t = z + (z * z * z + z) / (4 * freedom) +
                   (5 * std::pow(z, 5) + 16 * std::pow(z, 3) + 3 * z) / (96 * freedom * freedom);
  return {std::exp(mean), std::exp(mean + t * std::sqrt(squares / freedom / count))};
}

}  // namespace bench
