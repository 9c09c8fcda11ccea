// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/tree_memory.h"

#include <algorithm>

#include <fmt/core.h>

#include "memory/ledger.h"
#include "memory/look.h"
#include "plimsoll/bytes.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kSaidFrom = 1 << 20;  // Smaller parts are not worth a word.

std::int64_t foreign_bytes(const LedgerState& ledger) noexcept {
  return ledger.pools[static_cast<std::size_t>(Tag::kForeign)].floor_bytes;
}

}  // namespace

Resident Measured::of_tree() const noexcept {
  Resident all = resident;
  all.anonymous += tree.children_bytes;
  all.shared += tree.in_flight_bytes;
  all.peak = std::max(all.peak, all.total());
  return all;
}

Measured last_look() {
  const auto ledger = current_ledger();
  return ledger == nullptr ? Measured{} : ledger->measured();
}

std::int64_t crowded_bytes(const LedgerState& ledger, const Measured& seen) noexcept {
  return std::max<std::int64_t>(0, seen.unexplained_bytes - foreign_bytes(ledger));
}

std::string explain_held(const LedgerState& ledger, const Measured& seen) {
  const std::int64_t beside = seen.tree.children_bytes + seen.tree.in_flight_bytes;
  std::string parts;
  const auto part = [&](const std::string& where, std::int64_t bytes) {
    if (bytes >= kSaidFrom) {
      parts += fmt::format("{}{} in {}", parts.empty() ? ": " : ", ", format_bytes(bytes), where);
    }
  };
  part(seen.tree.children == 0   ? std::string("shared memory of no process")
       : seen.tree.children == 1 ? std::string("a child process")
                                 : fmt::format("{} child processes", seen.tree.children),
       beside);
  part("shared memory", seen.resident.shared);
  part("mapped weights", seen.tree.mapped_bytes);
  part("arrays and objects of this process",
       seen.unexplained_bytes - beside - seen.resident.shared - seen.tree.mapped_bytes);
  std::string text = fmt::format(
      "{} of the {} limit are held, {} of it without a lease, for which {} were set aside "
      "(foreign_bytes){}",
      format_bytes(seen.held_bytes()), format_bytes(ledger.limit_bytes),
      format_bytes(seen.unexplained_bytes), format_bytes(foreign_bytes(ledger)), parts);
  if (ledger.asked_bytes < ledger.limit_bytes) {
    text += fmt::format("; a limit of {} is asked for", format_bytes(ledger.asked_bytes));
  }
  return text;
}

std::string measured_lines(const Measured& seen) {
  std::string text;
  const auto line = [&](const char* name, std::int64_t bytes) {
    if (bytes >= kSaidFrom) {
      text += fmt::format("{:<10}{:>24}\n", name, format_bytes(bytes));
    }
  };
  line("children", seen.tree.children_bytes);
  line("shared", seen.resident.shared + seen.tree.in_flight_bytes);
  line("mapped", seen.tree.mapped_bytes);
  line("unleased", seen.unexplained_bytes);
  return text;
}

}  // namespace plimsoll
