// SPDX-License-Identifier: Apache-2.0
#include "store/embedding_growing_ids.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "base/check.h"
#include "base/philox.h"
#include "base/round.h"

namespace plimsoll {
namespace {

constexpr std::size_t kIdsAtOnce = 256;  // Looked at without letting go of the lock.

// Two thirds full at most, and never full: a search ends at an empty one.
std::int64_t table_places(const GrowthShape& shape) {
  const std::int64_t inserted = shape.places - shape.made;
  return inserted + inserted / 2 + 1;
}

std::int64_t bit_words(const GrowthShape& shape) {
  return (shape.places + 63) / 64;
}

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

std::int64_t GrowingIds::memory_bytes(const GrowthShape& shape) noexcept {
  if (shape.places == 0) {
    return 0;
  }
  return round_up(table_places(shape) * 4, 64) +
         round_up(BitSet::words(shape.places - shape.made) * 8, 64) +
         round_up(BitSet::words(shape.bytes() / kBlockUnit) * 8, 64) + 3 * 64;
}

GrowingIds::GrowingIds(const GrowthShape& shape, const IdIndex& made, std::span<std::byte> file,
                       Slab& slab)
    : shape_(shape), made_(made), rows_(shape.made), free_from_(shape.made) {
  const auto ids = file.subspan(index(shape.bit_bytes()));
  bits_ = {reinterpret_cast<std::uint64_t*>(file.data()), index(bit_words(shape))};
  ids_ = {reinterpret_cast<std::int64_t*>(ids.data()), index(shape.places - shape.made)};
  table_ = slab.take<std::uint32_t>(table_places(shape));
  std::fill(table_.begin(), table_.end(), kEmpty);
  new_ = BitSet(slab.take<std::uint64_t>(BitSet::words(shape.places - shape.made)));
  changed_ = BitSet(slab.take<std::uint64_t>(BitSet::words(shape.bytes() / kBlockUnit)));
}

Result<void> GrowingIds::adopt() {
  const MutexLock lock(mutex_);
  std::fill(table_.begin(), table_.end(), kEmpty);
  changed_.remove_all();
  new_.remove_all();
  free_from_ = shape_.made;
  erased_ = 0;
  rows_ = shape_.made;
  for (std::int64_t word = 0; word < bit_words(shape_); ++word) {
    const std::uint64_t bits = bits_[index(word)];
    const std::uint64_t made = shape_.made_mask(word * 64);
    erased_ += std::popcount(bits & made);
    rows_ += std::popcount(bits & ~made) - std::popcount(bits & made);
    for (std::uint64_t rest = bits & ~made; rest != 0; rest &= rest - 1) {
      const std::int64_t place = word * 64 + std::countr_zero(rest);
      if (place >= shape_.places) {
        return fail(ErrorCode::kCorrupt, "has rows behind the last place");
      }
      const std::int64_t id = ids_[index(place - shape_.made)];
      const bool first = made_.dense() && id >= 0 && id < shape_.made && !bit(id);
      if (first || !hash(place - shape_.made)) {
        return fail(ErrorCode::kCorrupt, fmt::format("holds id {} twice", id));
      }
    }
  }
  return {};
}

std::span<std::int64_t> GrowingIds::inserted() noexcept {
  const MutexLock lock(mutex_);
  return ids_;
}

Result<void> GrowingIds::adopt_first(std::int64_t count) {
  {
    const MutexLock lock(mutex_);
    for (std::int64_t place = shape_.made; place < shape_.made + count; ++place) {
      bits_[index(place / 64)] |= std::uint64_t{1} << (place % 64);
    }
  }
  return adopt();
}

// ---- Looking up -------------------------------------------------------------------------------

std::size_t GrowingIds::home_of(std::int64_t id) const noexcept {
  // 31 bits of the hash times fewer than 2^33 places.
  return (mix64(static_cast<std::uint64_t>(id)) >> 33) * table_.size() >> 31;
}

// The index of an inserted id in ids_, or −1.
std::int64_t GrowingIds::look_up(std::int64_t id) const {
  for (std::size_t at = home_of(id); table_[at] != kEmpty;) {
    if (ids_[table_[at]] == id) {
      return table_[at];
    }
    at = at + 1 == table_.size() ? 0 : at + 1;
  }
  return -1;
}

bool GrowingIds::bit(std::int64_t place) const {
  return (bits_[index(place / 64)] >> (place % 64) & 1) != 0;
}

Result<void> GrowingIds::find(std::span<const std::int64_t> ids,
                              std::span<std::int64_t> places) const {
  for (std::size_t at = 0; at < ids.size(); at += kIdsAtOnce) {
    const std::size_t end = std::min(at + kIdsAtOnce, ids.size());
    const MutexLock lock(mutex_);
    for (std::size_t i = at; i < end; ++i) {
      const std::int64_t inserted = look_up(ids[i]);
      places[i] = inserted < 0 ? -1 : shape_.made + inserted;
    }
  }
  PLIMSOLL_TRY_VOID(made_.find_rest(ids, places.first(ids.size())));  // Those not inserted.
  for (std::size_t at = 0; at < ids.size(); at += kIdsAtOnce) {
    const std::size_t end = std::min(at + kIdsAtOnce, ids.size());
    const MutexLock lock(mutex_);
    for (std::size_t i = at; i < end; ++i) {
      const bool first = places[i] >= 0 && places[i] < shape_.made;
      places[i] = first && bit(places[i]) ? -1 : places[i];
    }
  }
  return {};
}

std::int64_t GrowingIds::next_held(std::int64_t from) const {
  const MutexLock lock(mutex_);
  for (std::int64_t word = from / 64; word < bit_words(shape_); ++word) {
    std::uint64_t held = bits_[index(word)] ^ shape_.made_mask(word * 64);
    held &= word == from / 64 ? ~std::uint64_t{0} << (from % 64) : ~std::uint64_t{0};
    if (held != 0) {
      return word * 64 + std::countr_zero(held);
    }
  }
  return -1;
}

std::int64_t GrowingIds::id_at(std::int64_t place) const {
  const MutexLock lock(mutex_);
  return ids_[index(place - shape_.made)];
}

std::int64_t GrowingIds::rows() const {
  const MutexLock lock(mutex_);
  return rows_;
}

std::int64_t GrowingIds::erased() const {
  const MutexLock lock(mutex_);
  return erased_;
}

// ---- Changing ---------------------------------------------------------------------------------

void GrowingIds::flip(std::int64_t place) {
  bits_[index(place / 64)] ^= std::uint64_t{1} << (place % 64);
  changed_.add(place / 8 / kBlockUnit);
}

// The lowest free place, or −1.
std::int64_t GrowingIds::next_free() {
  for (std::int64_t word = free_from_ / 64; word < bit_words(shape_); ++word) {
    const std::uint64_t free = ~bits_[index(word)] & ~shape_.made_mask(word * 64);
    if (free != 0) {
      free_from_ = word * 64 + std::countr_zero(free);
      return free_from_ < shape_.places ? free_from_ : -1;
    }
  }
  free_from_ = shape_.places;
  return -1;
}

// Enters ids_[at] into the hash table; false: the id is there already.
bool GrowingIds::hash(std::int64_t at) {
  std::size_t place = home_of(ids_[index(at)]);
  while (table_[place] != kEmpty) {
    if (ids_[table_[place]] == ids_[index(at)]) {
      return false;
    }
    place = place + 1 == table_.size() ? 0 : place + 1;
  }
  table_[place] = static_cast<std::uint32_t>(at);
  return true;
}

// Takes an id that is there out of the hash table, and moves up those that it kept from their home.
void GrowingIds::unhash(std::int64_t id) {
  const std::size_t size = table_.size();
  std::size_t hole = home_of(id);
  while (ids_[table_[hole]] != id) {
    hole = hole + 1 == size ? 0 : hole + 1;
  }
  for (std::size_t at = hole;;) {
    at = at + 1 == size ? 0 : at + 1;
    if (table_[at] == kEmpty) {
      break;
    }
    const std::size_t home = home_of(ids_[table_[at]]);
    if ((at + size - home) % size >= (at + size - hole) % size) {  // Its home is not behind it.
      table_[hole] = table_[at];
      hole = at;
    }
  }
  table_[hole] = kEmpty;
}

void GrowingIds::set_id(std::int64_t place, std::int64_t id) {
  const std::int64_t at = place - shape_.made;
  ids_[index(at)] = id;
  changed_.add((shape_.bit_bytes() + at * 8) / kBlockUnit);
}

void GrowingIds::hold(std::int64_t place, std::int64_t id) {
  flip(place);
  set_id(place, id);
  hash(place - shape_.made);
  ++rows_;
}

void GrowingIds::give_up(std::int64_t place) {
  unhash(ids_[index(place - shape_.made)]);
  set_id(place, 0);
  flip(place);
  --rows_;
  free_from_ = std::min(free_from_, place);
}

Result<std::int64_t> GrowingIds::add(std::span<const std::int64_t> ids,
                                     std::span<std::int64_t> scratch) {
  std::int64_t added = 0;
  while (!ids.empty()) {
    const auto some = ids.first(std::min(ids.size(), scratch.size()));
    const auto places = scratch.first(some.size());
    if (auto found = find(some, places); !found) {
      undo();
      return tl::unexpected(std::move(found).error());
    }
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < some.size(); ++i) {
      if (places[i] >= 0 || look_up(some[i]) >= 0) {  // There; or twice in this request.
        continue;
      }
      const std::int64_t place = next_free();
      if (place < 0) {
        lock.unlock();
        undo();
        return -1;
      }
      hold(place, some[i]);
      new_.add(place - shape_.made);
      ++added;
    }
    ids = ids.subspan(some.size());
  }
  return added;
}

std::int64_t GrowingIds::next_new(std::int64_t from) const {
  const MutexLock lock(mutex_);
  const std::int64_t at = new_.next(std::max(from - shape_.made, std::int64_t{0}));
  return at < 0 ? -1 : shape_.made + at;
}

void GrowingIds::settle() {
  const MutexLock lock(mutex_);
  for (std::int64_t at = new_.next(0); at >= 0; at = new_.next(at + 1)) {
    new_.remove(at);
  }
}

void GrowingIds::undo() {
  const MutexLock lock(mutex_);
  for (std::int64_t at = new_.next(0); at >= 0; at = new_.next(at + 1)) {
    give_up(shape_.made + at);
    new_.remove(at);
  }
}

void GrowingIds::remove(std::int64_t place) {
  const MutexLock lock(mutex_);
  if (place >= shape_.made && bit(place)) {
    give_up(place);
  } else if (place < shape_.made && !bit(place)) {
    flip(place);
    ++erased_;
    --rows_;
  }
}

void GrowingIds::touch(BlockMap& map) {
  const MutexLock lock(mutex_);
  for (std::int64_t unit = changed_.next(0); unit >= 0; unit = changed_.next(unit + 1)) {
    map.touch(unit);
  }
  changed_.remove_all();
}

}  // namespace plimsoll
