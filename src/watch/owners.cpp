// SPDX-License-Identifier: Apache-2.0
#include "watch/owners.h"

#include <algorithm>

namespace plimsoll {

const char* owner_name(Owner owner) noexcept {
  constexpr std::array<const char*, kOwnerCount> kNames{
      "tensors",     "leased", "python",   "native", "heap",        "retained",
      "unexplained", "shared", "children", "files",  "page tables", "before the run"};
  return kNames[static_cast<std::size_t>(owner)];
}

Holdings::Holdings(const TreeLook& look, const Inside& inside) : Holdings() {
  const auto set = [&](Owner owner, std::int64_t bytes) {
    bytes_[static_cast<std::size_t>(owner)] = std::max<std::int64_t>(bytes, 0);
  };
  std::int64_t said = 0;
  bool parted = false;
  const auto part = [&](Owner owner, std::int64_t bytes) {
    if (bytes >= 0) {
      set(owner, bytes);
      said += bytes;
      parted = true;
    }
  };
  part(Owner::kTensors, inside.tensors);
  part(Owner::kLeased, inside.leased);
  part(Owner::kPython, inside.python);
  part(Owner::kNative, inside.native);
  part(Owner::kRetained, inside.retained);
  // A forked child shares what it has not written to: of the root it is all there, and counts
  // there.
  const std::int64_t own = look.root.anonymous;
  const std::int64_t rest = std::max<std::int64_t>(own - said, 0);
  const std::int64_t before = parted ? std::clamp<std::int64_t>(inside.before, 0, rest) : 0;
  set(parted ? Owner::kUnexplained : Owner::kHeap, rest - before);
  if (parted && inside.before >= 0) {
    set(Owner::kBefore, before);
  }
  set(Owner::kChildren, look.tree.anonymous - own);
  set(Owner::kShared, look.tree.shared);
  set(Owner::kFiles, look.tree.file);
  set(Owner::kPageTables, look.tree.page_tables);
}

}  // namespace plimsoll
