// SPDX-License-Identifier: Apache-2.0
//
// StateDigest: SHA-256 over named byte strings, in the order they are added.
//
// Each entry is hashed as its name's length, its name, its size and its bytes, so that two
// different sequences of entries never hash alike by running into each other.
//
// Threads: single-owner.   Memory: OpenSSL's context, a few hundred bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace plimsoll {

class StateDigest {
 public:
  StateDigest();
  ~StateDigest();
  StateDigest(StateDigest&&) noexcept;
  StateDigest& operator=(StateDigest&&) noexcept;

  void add(std::string_view name, std::span<const std::byte> bytes);
  /// The digest of everything added, in lower-case hexadecimal. Call once.
  [[nodiscard]] std::string hex();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
