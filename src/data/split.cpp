// SPDX-License-Identifier: Apache-2.0
//
// Split: whole groups held out, chosen by a keyed permutation of the groups.
//
// Training records keep the order of the store: a training rank is its ordinal less the held-out
// records before it, found by bisection among the held-out groups. So the ids of training records
// are spans of the store's ids, and a table of their rows needs no index to speak of.
//
// Reading order: include/plimsoll/sample_order.h, include/plimsoll/loader.h, this file.
//
// Threads: immutable once created.   Memory: as SplitOptions says, leased (Tag::kOther).
#include <algorithm>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "plimsoll/loader.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {

class Split::Impl {
 public:
  Impl(std::int64_t rows, std::int64_t groups, std::int64_t group_size, const SplitOptions& options)
      : rows_(rows),
        groups_(groups),
        group_size_(group_size),
        held_(options.held_out_groups),
        order_(groups, options.seed, 0),
        held_rows_(held_ * group_size) {}

  // Chooses the held-out groups; loads the offsets of groups of different sizes.
  Result<void> load(Governor& governor, FeatureStore& store) {
    const bool uniform = group_size_ > 0;
    PLIMSOLL_TRY(lease_, governor.reserve(Tag::kOther,
                                          uniform ? 8 * held_ : 16 * held_ + 8 * (groups_ + 1)));
    held_groups_.reserve(static_cast<std::size_t>(held_));
    for (std::int64_t q = 0; q < held_; ++q) {
      held_groups_.push_back(order_.at(q));
    }
    std::sort(held_groups_.begin(), held_groups_.end());
    if (uniform) {
      return {};
    }
    offsets_.reserve(static_cast<std::size_t>(groups_ + 1));
    for (std::int64_t g = 0; g < groups_; ++g) {
      PLIMSOLL_TRY(const auto bounds, store.group(g));
      offsets_.push_back(bounds.first);
    }
    offsets_.push_back(rows_);
    held_before_.reserve(held_groups_.size());
    held_rows_ = 0;
    for (const std::int64_t g : held_groups_) {
      held_before_.push_back(held_rows_);
      held_rows_ += offset(g + 1) - offset(g);
    }
    return {};
  }

  [[nodiscard]] std::int64_t train_rows() const noexcept { return rows_ - held_rows_; }
  [[nodiscard]] std::int64_t held_rows() const noexcept { return held_rows_; }
  [[nodiscard]] std::int64_t held_groups() const noexcept { return held_; }

  [[nodiscard]] std::int64_t train_ordinal(std::int64_t rank) const noexcept {
    // Held-out groups with at most `rank` training records before them lie before this record.
    std::int64_t before = 0;
    for (std::int64_t end = held_; before < end;) {
      const std::int64_t middle = before + (end - before) / 2;
      const std::int64_t first = offset(held_groups_[static_cast<std::size_t>(middle)]);
      if (first - held_before(middle) <= rank) {
        before = middle + 1;
      } else {
        end = middle;
      }
    }
    if (before == 0) {
      return rank;
    }
    const std::int64_t group = held_groups_[static_cast<std::size_t>(before - 1)];
    return rank + held_before(before - 1) + offset(group + 1) - offset(group);
  }

  [[nodiscard]] std::int64_t held_ordinal(std::int64_t rank) const noexcept {
    if (group_size_ > 0) {
      return order_.at(rank / group_size_) * group_size_ + rank % group_size_;
    }
    const auto at = std::upper_bound(held_before_.begin(), held_before_.end(), rank);
    const auto last = static_cast<std::size_t>(at - held_before_.begin()) - 1;
    return offset(held_groups_[last]) + rank - held_before_[last];
  }

  [[nodiscard]] std::int64_t group_of(std::int64_t ordinal) const noexcept {
    if (group_size_ > 0) {
      return ordinal / group_size_;
    }
    return std::upper_bound(offsets_.begin(), offsets_.end(), ordinal) - offsets_.begin() - 1;
  }

 private:
  [[nodiscard]] std::int64_t offset(std::int64_t group) const noexcept {
    return group_size_ > 0 ? group * group_size_ : offsets_[static_cast<std::size_t>(group)];
  }
  // Held-out records before the i-th held-out group.
  [[nodiscard]] std::int64_t held_before(std::int64_t i) const noexcept {
    return group_size_ > 0 ? i * group_size_ : held_before_[static_cast<std::size_t>(i)];
  }

  std::int64_t rows_;
  std::int64_t groups_;
  std::int64_t group_size_;  // 0: sizes differ.
  std::int64_t held_;
  SampleOrder order_;
  std::int64_t held_rows_;
  Lease lease_;
  std::vector<std::int64_t> held_groups_{};  // Ascending.
  // Of groups of different sizes:
  std::vector<std::int64_t> offsets_{};      // First record of each group, and the end.
  std::vector<std::int64_t> held_before_{};  // Held-out records before each held-out group.
};

Split::Split(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Split::Split(Split&&) noexcept = default;
Split& Split::operator=(Split&&) noexcept = default;
Split::~Split() = default;

Result<Split> Split::create(Governor governor, FeatureStore* store, const SplitOptions& options) {
  const FeatureInfo& info = store->info();
  const bool grouped = info.groups > 0;
  const std::int64_t groups = grouped ? info.groups : info.rows;
  if (options.held_out_groups < 0 || options.held_out_groups > groups) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("held_out_groups = {}: the store has {} groups of records",
                            options.held_out_groups, groups));
  }
  auto impl = std::make_unique<Impl>(info.rows, groups, grouped ? info.uniform_group : 1, options);
  PLIMSOLL_TRY_VOID(impl->load(governor, *store));
  return Split(std::move(impl));
}

std::int64_t Split::train_rows() const noexcept {
  return impl_->train_rows();
}
std::int64_t Split::held_out_rows() const noexcept {
  return impl_->held_rows();
}
std::int64_t Split::held_out_groups() const noexcept {
  return impl_->held_groups();
}
std::int64_t Split::train_ordinal(std::int64_t rank) const noexcept {
  return impl_->train_ordinal(rank);
}
std::int64_t Split::held_out_ordinal(std::int64_t rank) const noexcept {
  return impl_->held_ordinal(rank);
}
std::int64_t Split::group_of(std::int64_t ordinal) const noexcept {
  return impl_->group_of(ordinal);
}

}  // namespace plimsoll
