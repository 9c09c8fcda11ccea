// SPDX-License-Identifier: Apache-2.0
//
// Two children that take turns, so that both meet the same noise, and the ratio of their times.
//
// Reading order: Child, ratio_of; then trace_off.cpp, which is short.
//
// Threads: single-owner.   Memory: a pipe each way a child.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <string>
#include <vector>

namespace bench {

/// A process that answers every line it reads on its standard input with a line. It ends when its
/// input does.
class Child {
 public:
  /// `command`: the program's path and its arguments; `environment`: "NAME=value" each, beside what
  /// this process has. Throws std::runtime_error when it cannot be started.
  explicit Child(const std::vector<std::string>& command,
                 const std::vector<std::string>& environment = {});
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();

  /// Its answer, of at most 255 characters. Throws std::runtime_error when it has ended.
  std::string ask(const std::string& line);

 private:
  std::string name_;
  pid_t pid_{-1};
  std::FILE* to_{nullptr};
  std::FILE* from_{nullptr};
};

/// One's time / the other's, over pairs.
struct Ratio {
  double mean{0};   ///< Geometric.
  double bound{0};  ///< Upper end of its two-sided 95 % interval.
};

/// From the logarithms of the pairs' ratios, by Student's t (its expansion in 1 / degrees of
/// freedom). Requires: at least one.
Ratio ratio_of(const std::vector<double>& logs);

}  // namespace bench
