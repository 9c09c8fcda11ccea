// SPDX-License-Identifier: Apache-2.0
#include "memory/admission.h"

#include <fmt/format.h>

#include "base/check.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

Admission::~Admission() {
  if (governor_.valid()) {
    governor_.release_admission(spec_);
  }
}

Result<void> Admission::take(const Governor& governor, Tag tag, std::int64_t bytes,
                             const char* option) {
  // Sets of graphs and images lease beside loaders, and promise nothing: promises are no bound
  // there.
  const std::int64_t cap = tag == Tag::kLoader ? kUncapped : bytes;
  const PoolSpec spec{.tag = tag, .floor_bytes = bytes, .cap_bytes = cap, .option = option};
  Governor asked = governor;
  PLIMSOLL_TRY_VOID(asked.admit(spec));
  governor_ = asked;
  spec_ = spec;
  return {};
}

void Admission::make_elastic(std::int64_t fixed_bytes) noexcept {
  const std::int64_t elastic = spec_.floor_bytes - fixed_bytes;
  governor_.make_elastic(spec_.tag, elastic - spec_.elastic_bytes);
  spec_.elastic_bytes = elastic;
}

Error below_floor(Tag tag, const std::filesystem::path& place, std::string_view name,
                  const char* advice, std::int64_t bytes, std::int64_t floor) {
  Error error =
      make_error(ErrorCode::kOverBudget,
                 fmt::format("{}: {} is {}, but at least {} ({} bytes) is needed", place.string(),
                             name, format_bytes(bytes), format_bytes(floor), floor),
                 advice);
  error.tag = tag;
  error.requested_bytes = floor;
  error.available_bytes = bytes;
  error.limit_bytes = bytes;
  return error;
}

}  // namespace plimsoll
