// SPDX-License-Identifier: Apache-2.0
#include "run/digest.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "base/check.h"

namespace plimsoll {

class StateDigest::Impl {
 public:
  Impl() : context_(EVP_MD_CTX_new()) {
    PLIMSOLL_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1,
                   "SHA-256 could not be started");
  }
  ~Impl() { EVP_MD_CTX_free(context_); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void add(const void* data, std::size_t size) {
    PLIMSOLL_CHECK(EVP_DigestUpdate(context_, data, size) == 1, "SHA-256 refused bytes");
  }
  void add_size(std::uint64_t size) {
    static_assert(std::endian::native == std::endian::little);
    add(&size, sizeof size);
  }
  std::string finish() {
    std::array<unsigned char, 32> hash{};
    unsigned int size = 0;
    PLIMSOLL_CHECK(EVP_DigestFinal_ex(context_, hash.data(), &size) == 1 && size == hash.size(),
                   "SHA-256 could not be ended");
    std::string text;
    for (const unsigned char byte : hash) {
      text += fmt::format("{:02x}", byte);
    }
    return text;
  }

 private:
  EVP_MD_CTX* context_;
};

StateDigest::StateDigest() : impl_(std::make_unique<Impl>()) {}
StateDigest::~StateDigest() = default;
StateDigest::StateDigest(StateDigest&&) noexcept = default;
StateDigest& StateDigest::operator=(StateDigest&&) noexcept = default;

void StateDigest::add(std::string_view name, std::span<const std::byte> bytes) {
  impl_->add_size(name.size());
  impl_->add(name.data(), name.size());
  impl_->add_size(bytes.size());
  impl_->add(bytes.data(), bytes.size());
}

void StateDigest::Set::add(std::span<const std::byte> bytes) {
  std::array<std::uint64_t, 4> hash{};
  unsigned int size = 0;
  PLIMSOLL_CHECK(
      EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(hash.data()), &size,
                 EVP_sha256(), nullptr) == 1 &&
          size == sizeof hash,
      "SHA-256 refused bytes");
  for (std::size_t i = 0; i < hash.size(); ++i) {
    sums_[i] += hash[i];
  }
  ++count_;
}

void StateDigest::add(std::string_view name, const Set& set) {
  std::array<std::uint64_t, 5> all{};
  std::copy(set.sums_.begin(), set.sums_.end(), all.begin());
  all[4] = set.count_;
  add(name, std::as_bytes(std::span{all}));
}

std::string StateDigest::hex() {
  return impl_->finish();
}

}  // namespace plimsoll
