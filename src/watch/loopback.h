// SPDX-License-Identifier: Apache-2.0
//
// Loopback: answers HTTP requests of this machine with one text. Nobody else can reach it.
//
// It is bound to 127.0.0.1, serves one request at a time, reads 4 KiB of it at most and waits for
// it for a quarter of a second at most: whoever connects and says nothing holds up no more than
// that.
//
// Threads: single-owner.   Memory: a descriptor, and 4 KiB on the stack.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "plimsoll/result.h"

namespace plimsoll {

class Loopback {
 public:
  /// `port` 0: one that is free. Errors: kIo, naming the port.
  static Result<Loopback> listen(int port);
  Loopback(Loopback&& other) noexcept
      : socket_(std::exchange(other.socket_, -1)), port_(other.port_) {}
  Loopback& operator=(Loopback&&) = delete;
  ~Loopback();

  [[nodiscard]] int port() const noexcept { return port_; }

  /// Until `until`, answers GET /metrics with `text`, in the format of Prometheus; anything else
  /// with 404 or 405.
  void serve(const std::string& text, std::chrono::steady_clock::time_point until) const;

 private:
  Loopback(int socket, int port) noexcept : socket_(socket), port_(port) {}
  int socket_;
  int port_;
};

}  // namespace plimsoll
