// SPDX-License-Identifier: Apache-2.0
//
// launch(): makes a forked process (forked_ranks.h) what torchrun would have made it.
//
// Threads: single-owner.   Memory: none.
#pragma once

#include <cstdlib>
#include <string>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/forked_ranks.h"

namespace plimsoll {

// One that nobody has now.
inline int free_port() {
  const int file = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(::bind(file, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(file, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(file);
  return ntohs(address.sin_port);
}

inline void set(const char* name, const std::string& value) {
  ::setenv(name, value.c_str(), 1);
}

inline void launch(int rank, int count, int port, const char* restart, bool launchers_store) {
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(count));
  set("LOCAL_WORLD_SIZE", std::to_string(count));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
  set("TORCHELASTIC_RESTART_COUNT", restart);
  set("TORCHELASTIC_USE_AGENT_STORE", launchers_store ? "True" : "False");
}

}  // namespace plimsoll
