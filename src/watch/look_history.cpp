// SPDX-License-Identifier: Apache-2.0
#include "watch/look_history.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"

namespace plimsoll {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

constexpr std::uint32_t kLookMagic = 0x324F4C50;     // "PLO2"
constexpr std::uint32_t kOldLookMagic = 0x4B4F4C50;  // "PLOK"
constexpr std::uint32_t kLifeMagic = 0x46494C50;     // "PLIF"
constexpr std::uint32_t kUnknownKib = UINT32_MAX;
constexpr std::int64_t kLifeBytes = 2048;
constexpr std::int64_t kHeadBytes = 2 * kLifeBytes;
constexpr std::size_t kWordBytes = 16;
constexpr std::size_t kOldLookBytes = 248;  // To before_kib.
constexpr std::size_t kOldOwners = 11;

struct LookSlot {
  std::uint32_t magic{kLookMagic};
  std::uint32_t crc{0};  // Of the slot, with this as 0.
  std::int64_t number{0};
  double time{0};
  std::int64_t step{0};
  std::int64_t limit_bytes{0};
  std::int64_t held_bytes{0};
  std::int64_t booted{0};
  double bytes_per_unit{0};
  std::int32_t life{0};
  std::int32_t epoch{0};
  std::uint32_t cgroup_oom_kills{0};
  std::uint32_t machine_oom_kills{0};
  float loss{0};
  float rows_per_second{0};
  std::array<std::uint32_t, kOldOwners> owners_kib{};
  std::uint8_t course{0};
  std::uint8_t owner{0};
  std::array<std::uint8_t, 2> spare{};
  std::array<char, kWordBytes> phase{};
  struct Process {
    std::int32_t pid{0};
    std::uint32_t kib{0};
    std::array<char, kWordBytes> name{};
  };
  std::array<Process, KeptLook::kProcessesMost> largest{};
  std::uint32_t before_kib{kUnknownKib};  // The twelfth owner.
  std::uint32_t unused{0};
};
constexpr std::int64_t kSlotBytes = 256;
static_assert(std::is_trivially_copyable_v<LookSlot> && sizeof(LookSlot) == kSlotBytes &&
              offsetof(LookSlot, before_kib) == kOldLookBytes && kOwnerCount == kOldOwners + 1);
static_assert(kHeadBytes + LookHistory::kLevels * LookHistory::kSlots * kSlotBytes ==
              LookHistory::kBytes);

struct LifeSlot {
  std::uint32_t magic{kLifeMagic};
  std::uint32_t crc{0};
  std::int32_t number{0};
  std::int32_t pid{0};
  double began{0};
  std::uint32_t steps{1};
  std::uint32_t spare{0};
  std::array<char, 1024> cgroup{};
  std::array<char, 992> command{};
};
static_assert(std::is_trivially_copyable_v<LifeSlot> && sizeof(LifeSlot) == kLifeBytes);

template <class Slot>
std::span<const std::byte> raw(const Slot& slot) {
  return std::as_bytes(std::span(&slot, 1));
}

template <class Slot>
void seal_slot(Slot& slot) {
  slot.crc = 0;
  slot.crc = crc32c(raw(slot));
}

// The slot at `at`, when it is whole; the first `bytes` of it are there.
template <class Slot>
std::optional<Slot> slot_at(const std::string& text, std::int64_t at, std::uint32_t magic,
                            std::size_t bytes = sizeof(Slot)) {
  Slot slot;
  if (at + static_cast<std::int64_t>(bytes) > std::ssize(text)) {
    return std::nullopt;
  }
  std::memcpy(&slot, text.data() + at, bytes);
  const std::uint32_t said = std::exchange(slot.crc, 0);
  const bool whole = slot.magic == magic && crc32c(raw(slot).first(bytes)) == said;
  return whole ? std::optional(slot) : std::nullopt;
}

// Of an earlier version, too, which had no owner for what was there before.
std::optional<LookSlot> look_at(const std::string& text, std::int64_t at) {
  const auto slot = slot_at<LookSlot>(text, at, kLookMagic);
  return slot ? slot : slot_at<LookSlot>(text, at, kOldLookMagic, kOldLookBytes);
}

template <std::size_t kBytes>
void put_word(std::array<char, kBytes>& into, const std::string& text) {
  text.copy(into.data(), kBytes - 1);
}

template <std::size_t kBytes>
std::string word_of(const std::array<char, kBytes>& from) {
  return {from.data(), ::strnlen(from.data(), kBytes)};
}

std::uint32_t to_kib(std::int64_t bytes) {
  return bytes < 0
             ? kUnknownKib
             : static_cast<std::uint32_t>(std::min<std::int64_t>(bytes >> 10, UINT32_MAX - 1));
}

std::int64_t from_kib(std::uint32_t kib) {
  return kib == kUnknownKib ? -1 : std::int64_t{kib} << 10;
}

// Where look `number` is: of the level whose looks are every fourth of the one below, and not of
// the one above, the oldest slot.
std::int64_t slot_offset(std::int64_t number) {
  const auto zeros = number == 0 ? 63 : std::countr_zero(static_cast<std::uint64_t>(number));
  const std::int64_t level = std::min<std::int64_t>(zeros / 2, LookHistory::kLevels - 1);
  const std::int64_t among = number >> (2 * level);
  const bool top = level == LookHistory::kLevels - 1;
  const std::int64_t of_level = top ? among : among - (among >> 2) - 1;
  return kHeadBytes + (level * LookHistory::kSlots + of_level % LookHistory::kSlots) * kSlotBytes;
}

LookSlot to_slot(const KeptLook& look) {
  LookSlot slot;
  slot.number = look.number;
  slot.time = look.time;
  slot.step = look.step;
  slot.limit_bytes = look.limit_bytes;
  slot.held_bytes = look.held_bytes;
  slot.booted = look.booted;
  slot.bytes_per_unit = look.bytes_per_unit;
  slot.life = look.life;
  slot.epoch = look.epoch;
  slot.cgroup_oom_kills = static_cast<std::uint32_t>(look.cgroup_oom_kills);
  slot.machine_oom_kills = static_cast<std::uint32_t>(look.machine_oom_kills);
  slot.loss = static_cast<float>(look.loss);
  slot.rows_per_second = static_cast<float>(look.rows_per_second);
  std::transform(look.owners.begin(), look.owners.begin() + kOldOwners, slot.owners_kib.begin(),
                 to_kib);
  slot.before_kib = to_kib(look.owners.back());
  slot.course = static_cast<std::uint8_t>(look.course);
  slot.owner = static_cast<std::uint8_t>(look.owner);
  put_word(slot.phase, look.phase);
  for (std::size_t at = 0; at < std::min(look.largest.size(), slot.largest.size()); ++at) {
    slot.largest[at].pid = look.largest[at].pid;
    slot.largest[at].kib = to_kib(look.largest[at].bytes);
    put_word(slot.largest[at].name, look.largest[at].name);
  }
  seal_slot(slot);
  return slot;
}

KeptLook to_look(const LookSlot& slot) {
  KeptLook look{.number = slot.number,
                .life = slot.life,
                .time = slot.time,
                .step = slot.step,
                .epoch = slot.epoch,
                .loss = slot.loss,
                .rows_per_second = slot.rows_per_second,
                .limit_bytes = slot.limit_bytes,
                .held_bytes = slot.held_bytes,
                .phase = word_of(slot.phase),
                .bytes_per_unit = slot.bytes_per_unit,
                .cgroup_oom_kills = slot.cgroup_oom_kills,
                .machine_oom_kills = slot.machine_oom_kills,
                .booted = slot.booted};
  std::ranges::transform(slot.owners_kib, look.owners.begin(), from_kib);
  look.owners.back() = from_kib(slot.before_kib);
  look.course = static_cast<Course>(
      std::min<std::uint8_t>(slot.course, static_cast<std::uint8_t>(Course::kCache)));
  look.owner = static_cast<Owner>(std::min<std::uint8_t>(slot.owner, kOwnerCount - 1));
  for (const auto& process : slot.largest) {
    if (process.pid > 0) {
      look.largest.push_back(
          {.pid = process.pid, .name = word_of(process.name), .bytes = from_kib(process.kib)});
    }
  }
  return look;
}

// A finite time, and counts that no look has below 0; what else a file may hold is no look.
bool is_sane(const LookSlot& slot) {
  return slot.number >= 0 && std::isfinite(slot.time) && slot.held_bytes >= 0 &&
         slot.limit_bytes >= 0 && std::isfinite(slot.bytes_per_unit);
}

LookHistory::Kept kept_in(const std::string& text) {
  LookHistory::Kept kept;
  for (std::int64_t at = 0; at < kHeadBytes; at += kLifeBytes) {
    const auto life = slot_at<LifeSlot>(text, at, kLifeMagic);
    if (life && std::isfinite(life->began) && life->number > kept.life.number) {
      kept.life = {.number = life->number,
                   .pid = life->pid,
                   .began = life->began,
                   .steps = life->steps != 0,
                   .cgroup = word_of(life->cgroup),
                   .command = word_of(life->command)};
    }
  }
  for (std::int64_t at = kHeadBytes; at + kSlotBytes <= std::ssize(text); at += kSlotBytes) {
    const auto slot = look_at(text, at);
    if (slot && is_sane(*slot) && slot_offset(slot->number) == at) {
      kept.looks.push_back(to_look(*slot));
    }
  }
  std::ranges::sort(kept.looks, {}, &KeptLook::number);
  return kept;
}

}  // namespace

Result<LookHistory> LookHistory::open(const std::filesystem::path& path, KeptLife life) {
  Kept before;
  FileMode mode = FileMode::kCreate;
  if (const auto text = read_small_file(path, kBytes)) {
    before = kept_in(*text);
    mode = before.life.number > 0 ? FileMode::kReadWrite : FileMode::kCreate;
  }
  PLIMSOLL_TRY(File file, File::open(path, mode));
  file.reserve(0, kBytes);
  LifeSlot slot;
  slot.number = before.life.number + 1;
  slot.pid = life.pid;
  slot.began = life.began;
  slot.steps = life.steps ? 1 : 0;
  put_word(slot.cgroup, life.cgroup);
  put_word(slot.command, life.command);
  seal_slot(slot);
  PLIMSOLL_TRY_VOID(file.write_at(slot.number % 2 * kLifeBytes, raw(slot)));
  const std::int64_t next = before.looks.empty() ? 0 : before.looks.back().number + 1;
  return LookHistory(std::move(file), slot.number, next);
}

Result<void> LookHistory::add(KeptLook look) {
  look.number = next_;
  look.life = life_;
  const LookSlot slot = to_slot(look);
  PLIMSOLL_TRY_VOID(file_.write_at(slot_offset(look.number), raw(slot)));
  ++next_;
  return {};
}

Result<LookHistory::Kept> LookHistory::read(const std::filesystem::path& path) {
  PLIMSOLL_TRY(const std::string text, read_small_file(path, kBytes));
  Kept kept = kept_in(text);
  if (kept.life.number == 0) {
    return fail(ErrorCode::kCorrupt, path.string() + ": no history of looks",
                "remove it; the next start of the run makes another");
  }
  return kept;
}

std::int64_t boot_seconds() {
  std::ifstream file("/proc/stat");
  std::int64_t seconds = 0;
  for (std::string line; std::getline(file, line);) {
    if (std::istringstream words(line); line.starts_with("btime ") && words >> line >> seconds) {
      break;
    }
  }
  return seconds;
}

}  // namespace plimsoll
