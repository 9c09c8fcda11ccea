// SPDX-License-Identifier: Apache-2.0
//
// Targets for what only tables in sample order have: maps and extents. (The checksum of a map is in
// the superblock: here every altered map is read as if that had been repaired.)
#include <cstring>

#include <fmt/format.h>

#include "plimsoll/sample_order.h"
#include "store/timeline_layout.h"
#include "store/timeline_space.h"
#include "tests/fuzz/table.h"
#include "tests/fuzz/target.h"

namespace plimsoll::fuzz {
namespace {

template <bool grows = false>
const Table& table() {
  return Table::get<RowLayout::kSampleOrder, grows>();
}

template <bool grows = false>
const TimelineShape& shape() {
  static const TimelineShape kMade = timeline_shape(table<grows>().description());
  return kMade;
}

// ---- Maps -------------------------------------------------------------------------------------

bool same(const MapView& a, const MapView& b) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin());
  };
  return equal(a.extents, b.extents) && equal(a.segments, b.segments) &&
         a.streams.size() == b.streams.size() && a.state == b.state;
}

// What is accepted as the state of a table is written again as it was.
template <bool grows>
void timeline_map(std::span<const std::byte> bytes) {
  static const TimelineShape& rows = shape<grows>();
  static const TimelineSpace::Sizes kSizes = TimelineSpace::sizes(rows);
  static const std::int64_t kMost = TimelineSpace::map_bytes_most(rows, kSizes);
  static Slab slab = Slab::create(table<grows>().governor(), Tag::kEmbedding,
                                  TimelineSpace::memory_bytes(rows, kSizes) + 4096)
                         .or_throw();
  static const TimelineSpace kEmpty(rows, kSizes, slab);
  static const std::string kZeroed(reinterpret_cast<const char*>(slab.data()),
                                   static_cast<std::size_t>(slab.bytes()));
  static std::vector<std::byte> map(static_cast<std::size_t>(kMost));
  static std::vector<std::byte> again(static_cast<std::size_t>(kMost));
  if (bytes.size() > map.size()) {
    return;  // The reader refuses the size before.
  }
  std::memcpy(map.data(), bytes.data(), bytes.size());
  const std::span<const std::byte> given = std::span(map).first(bytes.size());
  const auto view = view_map(rows, given);
  if (!view) {
    if (view.error().code != ErrorCode::kCorrupt) {
      contradiction("timeline_map", view.error().to_string());
    }
    return;
  }
  std::memcpy(slab.data(), kZeroed.data(), kZeroed.size());
  TimelineSpace space = kEmpty;
  const auto state = space.adopt(0, given);
  if (!state) {
    if (state.error().code != ErrorCode::kCorrupt && state.error().code != ErrorCode::kOverBudget) {
      contradiction("timeline_map", state.error().to_string());
    }
    return;
  }
  if (space.used_segments() != static_cast<std::int64_t>(view->segments.size())) {
    contradiction("timeline_map", "segments that nobody uses, or two do");
  }
  const auto saved = view_map(rows, space.save(*state, 0, again));
  if (!saved || !same(*view, *saved)) {
    contradiction("timeline_map", "an accepted map is not written again as it was");
  }
}

template <bool grows>
std::vector<std::string> timeline_map_seeds() {
  return {table<grows>().file("map.0"), table<grows>().file("map.1")};
}

// ---- Extents ----------------------------------------------------------------------------------

constexpr std::uint32_t kExtentRows = 9;
constexpr std::uint32_t kExtentIndex = 3;
constexpr std::uint64_t kOwner = 0x1234;

struct SoundExtent {
  std::string bytes;
  std::uint64_t mark;
};

SoundExtent seal(std::vector<std::byte> bytes) {
  const std::uint32_t crc =
      seal_extent(shape().record_bytes, kOwner, kExtentIndex, kExtentRows, bytes);
  return {text_of(bytes), extent_mark(kExtentIndex, crc)};
}

const SoundExtent& sound_extent() {
  static const SoundExtent kMade = [] {
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(extent_bytes(shape().record_bytes, kExtentRows)));
    for (std::size_t i = kExtentHeaderBytes; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(mix64(i));
    }
    return seal(std::move(bytes));
  }();
  return kMade;
}

void extent(std::span<const std::byte> bytes) {
  const SoundExtent& sound = sound_extent();
  if (bytes.size() != sound.bytes.size()) {
    return;  // The reader asks for as many as the map says.
  }
  const auto covered =
      static_cast<std::size_t>(kExtentHeaderBytes + kExtentRows * shape().record_bytes);
  std::uint64_t mark = 0;
  if (extent_is_sound(shape().record_bytes, kOwner, kExtentIndex, kExtentRows, bytes, mark) &&
      mark == sound.mark && std::memcmp(bytes.data(), sound.bytes.data(), covered) != 0) {
    contradiction("extent", "altered bytes pass for it");
  }
  const SoundExtent repaired = seal({bytes.begin(), bytes.end()});
  if (!extent_is_sound(shape().record_bytes, kOwner, kExtentIndex, kExtentRows,
                       std::as_bytes(std::span(repaired.bytes)), mark) ||
      mark != repaired.mark) {
    contradiction("extent", "an extent as sealed is not sound");
  }
}

std::vector<std::string> extent_seeds() {
  return {sound_extent().bytes};
}

}  // namespace

std::vector<Target> timeline_targets() {
  return {{"timeline_map", timeline_map_seeds<false>, timeline_map<false>},
          {"growing_map", timeline_map_seeds<true>, timeline_map<true>},
          {"extent", extent_seeds, extent}};
}

}  // namespace plimsoll::fuzz
