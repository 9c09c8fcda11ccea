// SPDX-License-Identifier: Apache-2.0
//
// Child: a forked process that does as it is told, one order at a time, until the test ends.
//
// Nothing waits for a time: the constructor and tell() return when the order has been carried out.
//
// Threads: single-owner.   Memory: what the orders take, in the child.
#pragma once

#include <array>
#include <csignal>
#include <cstdint>
#include <functional>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace plimsoll {

/// Maps `bytes` with these flags and touches every page.
inline void* map_touched(std::int64_t bytes, int flags = MAP_PRIVATE) {
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                              flags | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return memory;
}

class Child {
 public:
  /// Forks, and carries out order 0. `orders` gets the number of the order.
  explicit Child(const std::function<void(int)>& orders) {
    std::array<int, 2> down{};
    std::array<int, 2> up{};
    EXPECT_EQ(::pipe(down.data()), 0);
    EXPECT_EQ(::pipe(up.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(down[1]);
      ::close(up[0]);
      char one = 0;
      int order = 0;
      do {
        orders(order++);
      } while (::write(up[1], "x", 1) == 1 && ::read(down[0], &one, 1) == 1);
      ::_exit(0);  // The test is gone.
    }
    ::close(down[0]);
    ::close(up[1]);
    down_ = down[1];
    up_ = up[0];
    wait();
  }
  ~Child() {
    end();
    ::close(down_);
    ::close(up_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Has the next order carried out.
  void tell() const {
    EXPECT_EQ(::write(down_, "x", 1), 1);
    wait();
  }

  /// Kills it, and takes it in.
  void end() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      pid_ = 0;
    }
  }

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  void wait() const {
    char one = 0;
    EXPECT_EQ(::read(up_, &one, 1), 1);
  }
  pid_t pid_{0};
  int down_{-1};
  int up_{-1};
};

}  // namespace plimsoll
