// SPDX-License-Identifier: Apache-2.0
#include "watch/loopback.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/check.h"

namespace plimsoll {
namespace {

using Steady = std::chrono::steady_clock;

constexpr std::size_t kRequestBytes = 4096;
constexpr suseconds_t kRequestMicroseconds = 250'000;

std::string answer_to(std::string_view request, const std::string& text) {
  const auto with = [](const char* status, std::string_view body) {
    return fmt::format(
        "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: "
        "{}\r\nConnection: close\r\n\r\n{}",
        status, body.size(), body);
  };
  if (!request.starts_with("GET ")) {
    return with("405 Method Not Allowed", "GET /metrics\n");
  }
  request.remove_prefix(4);
  const std::string_view path = request.substr(0, request.find_first_of(" ?\r\n"));
  return path == "/metrics" ? with("200 OK", text) : with("404 Not Found", "GET /metrics\n");
}

// A request whose head has not come within the time is answered by what has.
void serve_one(int client, const std::string& text) {
  const timeval most{.tv_sec = 0, .tv_usec = kRequestMicroseconds};
  ::setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
  ::setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
  std::array<char, kRequestBytes> request{};
  const ssize_t got = ::recv(client, request.data(), request.size(), 0);
  if (got > 0) {
    const std::string answer = answer_to({request.data(), static_cast<std::size_t>(got)}, text);
    for (std::size_t sent = 0; sent < answer.size();) {
      const ssize_t more = ::send(client, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) {
        break;
      }
      sent += static_cast<std::size_t>(more);
    }
  }
}

}  // namespace

Result<Loopback> Loopback::listen(int port) {
  const int made = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Loopback loopback(made, port);
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  constexpr int kWaiting = 8;
  if (made < 0 || ::setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(made, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(made, kWaiting) != 0 ||
      ::getsockname(made, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return fail_io(errno, fmt::format("--listen {}", port), "name a port that is free, or 0");
  }
  loopback.port_ = ntohs(address.sin_port);
  return loopback;
}

Loopback::~Loopback() {
  if (socket_ >= 0) {
    ::close(socket_);
  }
}

void Loopback::serve(const std::string& text, Steady::time_point until) const {
  for (auto now = Steady::now(); now < until; now = Steady::now()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
    pollfd wait{.fd = socket_, .events = POLLIN, .revents = 0};
    if (::poll(&wait, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000))) < 0 &&
        errno != EINTR) {
      return;
    }
    if ((wait.revents & POLLIN) == 0) {
      continue;
    }
    const int client = ::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client >= 0) {
      serve_one(client, text);
      ::close(client);
    }
  }
}

}  // namespace plimsoll
