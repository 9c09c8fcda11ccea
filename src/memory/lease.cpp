// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/lease.h"

#include <utility>

#include "base/check.h"
#include "memory/ledger.h"

namespace plimsoll {

Lease::Lease(std::shared_ptr<Ledger> ledger, Tag tag, std::int64_t bytes) noexcept
    : ledger_(std::move(ledger)), bytes_(bytes), tag_(tag) {}

Lease::Lease(Lease&& other) noexcept
    : ledger_(std::move(other.ledger_)), bytes_(std::exchange(other.bytes_, 0)), tag_(other.tag_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    shrink(0);
    ledger_ = std::move(other.ledger_);
    bytes_ = std::exchange(other.bytes_, 0);
    tag_ = other.tag_;
  }
  return *this;
}

Lease::~Lease() {
  shrink(0);
}

Result<void> Lease::grow(std::int64_t bytes) {
  if (bytes <= bytes_) {
    return {};
  }
  if (ledger_ == nullptr) {
    return tl::unexpected(closed_error());
  }
  PLIMSOLL_TRY_VOID(ledger_->check_own("Lease.grow"));
  auto taken = ledger_->take(tag_, bytes - bytes_);
  if (taken) {
    bytes_ = bytes;
  }
  return taken;
}

void Lease::shrink(std::int64_t bytes) noexcept {
  if (bytes < bytes_ && bytes >= 0) {
    if (!ledger_->forked()) {
      ledger_->give_back(tag_, bytes_ - bytes);
    }
    bytes_ = bytes;
  }
}

std::int64_t Lease::room() const noexcept {
  return ledger_ == nullptr ? 0 : ledger_->room(tag_);
}

}  // namespace plimsoll
