// SPDX-License-Identifier: Apache-2.0
//
// StateDigest: SHA-256 over named byte strings, in the order they are added, and over sets of them.
//
// Each entry is hashed as its name's length, its name, its size and its bytes, so that two
// different sequences of entries never hash alike by running into each other.
//
// Threads: single-owner.   Memory: OpenSSL's context, a few hundred bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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
  /// Adds a set of byte strings, in any order: the sum of the SHA-256 of each, as four 64-bit
  /// numbers, and how many there were. Source: Clarke et al., "Incremental Multiset Hash Functions"
  /// (ASIACRYPT 2003), section 4, MSet-Add-Hash.
  class Set {
   public:
    void add(std::span<const std::byte> bytes);

   private:
    friend class StateDigest;
    std::array<std::uint64_t, 4> sums_{};
    std::uint64_t count_{0};
  };
  void add(std::string_view name, const Set& set);

  /// The digest of everything added, in lower-case hexadecimal. Call once.
  [[nodiscard]] std::string hex();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plimsoll
