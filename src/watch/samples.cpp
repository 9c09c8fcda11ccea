// SPDX-License-Identifier: Apache-2.0
//
// The table is open addressing with linear probing; what is removed is closed up by moving what
// follows back, so there are no tombstones. Nothing here allocates while the lock is held: hooks of
// malloc() would come back.
#include "watch/samples.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include <fmt/format.h>

#include "base/mutex.h"
#include "base/philox.h"
#include "os/clock.h"

namespace plimsoll {
namespace {

constexpr std::uint64_t kSampleSeed = 0x5a3;
constexpr std::size_t kSlots = 2 * Samples::kMost;
constexpr std::size_t kFilter = 1 << 16;
constexpr std::size_t kPlaceSlots = 2 * Samples::kPlacesMost;
constexpr std::int64_t kShare = 200;               // Samples take at most this part of the time.
constexpr std::int64_t kJudgedAfter = 10'000'000;  // Nanoseconds of samples before that is judged.
constexpr double kUneven =
    4;  // A line of whose bytes a quarter is of the lesser half counts whole.
constexpr std::uint8_t kFilterMost = 255;  // Stays there: a slot that overflowed.

struct Line {
  std::uint32_t file{0};
  int line{0};
};

struct SampleTables {
  std::array<Samples::Live, kSlots> slots{};
  std::array<Line, Samples::kPlacesMost> lines{};       // 0: no line was known.
  std::array<std::uint16_t, kPlaceSlots> line_slots{};  // Into lines; 0: free.
  std::array<std::array<char, Place::kFileMost>, Samples::kFilesMost> files{};
};

struct Sampling {
  std::atomic<std::uint32_t> on{0};  // The number of the search; 0: none.
  std::atomic<bool> tensors{false};
  std::atomic<double> mean{Samples::kMeanBytes};
  std::atomic<std::uint32_t> step{0};
  std::atomic<PlaceNow> place_now{nullptr};
  std::atomic<std::int64_t> spent_ns{0};
  std::atomic<std::int64_t> judged_ns{0};  // Of spent_ns, when the mean was last judged.
  std::atomic<std::int64_t> began_ns{0};
  std::atomic<std::uint64_t> threads{0};
  std::array<std::atomic<std::uint8_t>, kFilter> filter{};  // Written under mutex.
  Mutex mutex;
  // Below: under mutex.
  SampleTables* tables{nullptr};  // From the first search on.
  std::uint32_t searches{0};
  std::size_t live{0};
  std::size_t lines{1};
  std::size_t files{0};
};

// No heap memory: that would be part of what is watched.
constinit SampleTables sample_tables{};

Sampling& sampling() noexcept {
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): allocators are called until the very end.
  static auto* const kImmortal = new Sampling;
  return *kImmortal;
}
Sampling& sampler = sampling();

struct Countdown {
  std::int64_t left{0};
  std::uint64_t thread{0};  // 0: none yet.
  std::uint32_t search{0};  // What `left` was drawn for.
  std::uint64_t draws{0};
};
thread_local constinit Countdown countdown{};

std::size_t filter_slot(std::uintptr_t address) noexcept {
  return mix64(address) >> 48;
}
std::size_t home(std::uintptr_t address) noexcept {
  return mix64(address) % kSlots;
}

void draw() noexcept {
  if (countdown.thread == 0) {
    countdown.thread = 1 + sampler.threads.fetch_add(1, std::memory_order_relaxed);
  }
  const float chance = uniform01(philox(kSampleSeed, countdown.thread, countdown.draws++)[0]);
  countdown.left += 1 + static_cast<std::int64_t>(-std::log(chance) * sampler.mean.load());
}

double stands_for(std::size_t bytes) noexcept {
  const auto n = static_cast<double>(bytes);
  return n / -std::expm1(-n / sampler.mean.load(std::memory_order_relaxed));
}

void note_filter(std::uintptr_t address, int change) noexcept {
  auto& slot = sampler.filter[filter_slot(address)];
  const std::uint8_t now = slot.load(std::memory_order_relaxed);
  if (now != kFilterMost) {
    slot.store(static_cast<std::uint8_t>(now + change), std::memory_order_relaxed);
  }
}

std::size_t find_sample(std::uintptr_t address) noexcept {
  std::size_t at = home(address);
  while (sampler.tables->slots[at].address != 0 && sampler.tables->slots[at].address != address) {
    at = (at + 1) % kSlots;
  }
  return at;
}

void erase_sample(std::size_t at) noexcept {
  auto& slots = sampler.tables->slots;
  note_filter(slots[at].address, -1);
  --sampler.live;
  std::size_t hole = at;
  for (std::size_t next = (at + 1) % kSlots; slots[next].address != 0; next = (next + 1) % kSlots) {
    const std::size_t wanted = home(slots[next].address);
    if ((next - wanted + kSlots) % kSlots >= (next - hole + kSlots) % kSlots) {
      slots[hole] = slots[next];
      hole = next;
    }
  }
  slots[hole] = {};
}

// Every second sample goes, and the others count twice.
void halve() noexcept {
  sampler.mean = 2 * sampler.mean;
  bool goes = false;
  for (std::size_t at = 0; at < kSlots;) {
    if (sampler.tables->slots[at].address == 0) {
      ++at;
      continue;
    }
    goes = !goes;
    if (goes) {
      erase_sample(at);  // Another may have moved here.
    } else {
      sampler.tables->slots[at].stands_for *= 2;
      ++at;
    }
  }
}

std::uint32_t file_number(const Place& place) noexcept {
  auto& files = sampler.tables->files;
  for (std::size_t at = 0; at < sampler.files; ++at) {
    if (std::strcmp(files[at].data(), place.file.data()) == 0) {
      return static_cast<std::uint32_t>(at);
    }
  }
  if (sampler.files == Samples::kFilesMost) {
    return static_cast<std::uint32_t>(Samples::kFilesMost);
  }
  files[sampler.files] = place.file;
  return static_cast<std::uint32_t>(sampler.files++);
}

std::uint32_t place_number(const Place& place) noexcept {
  if (place.file[0] == '\0') {
    return 0;
  }
  const std::uint32_t file = file_number(place);
  if (file == Samples::kFilesMost) {
    return 0;
  }
  auto& slots = sampler.tables->line_slots;
  std::size_t at =
      mix64((std::uint64_t{file} << 32) + static_cast<std::uint32_t>(place.line)) % kPlaceSlots;
  for (; slots[at] != 0; at = (at + 1) % kPlaceSlots) {
    const Line& line = sampler.tables->lines[slots[at]];
    if (line.file == file && line.line == place.line) {
      return slots[at];
    }
  }
  if (sampler.lines == Samples::kPlacesMost) {
    return 0;
  }
  sampler.tables->lines[sampler.lines] = {.file = file, .line = place.line};
  slots[at] = static_cast<std::uint16_t>(sampler.lines);
  return static_cast<std::uint32_t>(sampler.lines++);
}

void insert(Samples::Live sample, const Place& place) noexcept {
  const MutexLock lock(sampler.mutex);
  if (!Samples::on() || sampler.tables == nullptr) {
    return;
  }
  if (sampler.live == Samples::kMost) {
    halve();
    sample.stands_for = stands_for(sample.bytes);
  }
  sample.place = place_number(place);
  const std::size_t at = find_sample(sample.address);
  if (sampler.tables->slots[at].address == 0) {
    ++sampler.live;
    note_filter(sample.address, 1);
  }  // Else its free was not seen.
  sampler.tables->slots[at] = sample;
}

void take(void* pointer, std::size_t bytes, std::uint32_t step) noexcept {
  const std::int64_t before = now_ns();
  Place place;
  if (const PlaceNow now = sampler.place_now; now != nullptr) {
    now(place);
  }
  insert({.address = reinterpret_cast<std::uintptr_t>(pointer),
          .bytes = bytes,
          .stands_for = stands_for(bytes),
          .step = step},
         place);
  sampler.spent_ns.fetch_add(now_ns() - before, std::memory_order_relaxed);
}

// Locked by a thread that is not there, it may be; and what is freed here is another's.
void forget_in_child() noexcept {
  sampler.on = 0;
  new (&sampler.mutex) Mutex;
}

}  // namespace

void Samples::begin(double mean_bytes, PlaceNow place_now) {
  static const bool kOnce = [] {
    ::pthread_atfork(nullptr, nullptr, forget_in_child);
    return true;
  }();
  static_cast<void>(kOnce);
  end();
  const MutexLock lock(sampler.mutex);
  if (sampler.tables == nullptr) {
    sampler.tables = &sample_tables;
    std::memset(static_cast<void*>(sampler.tables), 0, sizeof(SampleTables));  // All of it at once.
  }
  sampler.mean = std::max(mean_bytes, 1.0);
  sampler.place_now = place_now;
  sampler.step = 0;
  sampler.spent_ns = 0;
  sampler.judged_ns = 0;
  sampler.began_ns = now_ns();
  sampler.on = ++sampler.searches;
}

void Samples::end() noexcept {
  const MutexLock lock(sampler.mutex);
  sampler.on = 0;
  sampler.tensors = false;
  if (sampler.tables != nullptr) {
    sampler.tables->slots.fill({});
    sampler.tables->line_slots.fill(0);
  }
  for (auto& slot : sampler.filter) {
    slot.store(0, std::memory_order_relaxed);
  }
  sampler.live = 0;
  sampler.lines = 1;
  sampler.files = 0;
}

void Samples::show_tensors(bool shown) noexcept {
  sampler.tensors = shown;
}

bool Samples::tensors_shown() noexcept {
  return sampler.tensors.load(std::memory_order_relaxed);
}

bool Samples::on() noexcept {
  return sampler.on.load(std::memory_order_relaxed) != 0;
}

void Samples::step(std::uint32_t step) noexcept {
  sampler.step.store(step, std::memory_order_relaxed);
  const std::int64_t spent = sampler.spent_ns.load(std::memory_order_relaxed);
  if (spent - sampler.judged_ns > kJudgedAfter) {
    if (spent * kShare > now_ns() - sampler.began_ns) {
      sampler.mean = 2 * sampler.mean;
    }
    sampler.judged_ns = spent;
  }
}

void Samples::allocated(void* pointer, std::size_t bytes) noexcept {
  const std::uint32_t search = sampler.on.load(std::memory_order_relaxed);
  if (search == 0 || pointer == nullptr) {
    return;
  }
  if (countdown.search != search) {
    countdown.search = search;
    countdown.left = 0;
    draw();
  }
  countdown.left -= static_cast<std::int64_t>(bytes);
  if (countdown.left < 0) {
    countdown.left = 0;
    draw();
    take(pointer, bytes, sampler.step.load(std::memory_order_relaxed));
  }
}

void Samples::freed(void* pointer) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (!on() || sampler.filter[filter_slot(address)].load(std::memory_order_relaxed) == 0) {
    return;
  }
  const MutexLock lock(sampler.mutex);
  if (on() && address != 0) {
    if (const std::size_t at = find_sample(address); sampler.tables->slots[at].address != 0) {
      erase_sample(at);
    }
  }
}

void Samples::moved(std::uintptr_t address, void* pointer, std::size_t bytes) noexcept {
  if (!on() || pointer == nullptr) {
    return;
  }
  if (address != 0 && sampler.filter[filter_slot(address)].load(std::memory_order_relaxed) != 0) {
    std::uint32_t born = 0;
    bool was = false;
    {
      const MutexLock lock(sampler.mutex);
      if (!on()) {
        return;
      }
      if (const std::size_t at = find_sample(address); sampler.tables->slots[at].address != 0) {
        was = true;
        born = sampler.tables->slots[at].step;
        erase_sample(at);
      }
    }
    if (was) {
      take(pointer, bytes, born);
      return;
    }
  }
  allocated(pointer, bytes);
}

std::vector<Samples::Live> Samples::alive(std::uint32_t from, std::uint32_t to) {
  std::vector<Live> found;
  found.reserve(kMost);
  const MutexLock lock(sampler.mutex);
  if (on()) {
    for (const Live& one : sampler.tables->slots) {
      if (one.address != 0 && one.step >= from && one.step < to) {
        found.push_back(one);
      }
    }
  }
  return found;
}

std::vector<Samples::Site> Samples::by_site(const std::vector<Live>& alive, std::size_t most) {
  if (alive.empty()) {
    return {};
  }
  struct Halves {
    Site site{};
    double early{0};
    double late{0};
  };
  const auto [first, last] = std::ranges::minmax(alive, {}, &Live::step);
  std::unordered_map<std::uint32_t, Halves> sums;
  for (const Live& one : alive) {
    Halves& sum = sums[one.place];
    (one.step - first.step <= last.step - one.step ? sum.early : sum.late) += one.stands_for;
    ++sum.site.samples;
  }
  std::vector<Halves> ranked;
  for (auto& [place, sum] : sums) {
    sum.site.site = site(place);
    sum.site.bytes = std::llround(sum.early + sum.late);
    ranked.push_back(std::move(sum));
  }
  std::ranges::sort(ranked, [](const Halves& a, const Halves& b) {
    const auto steady = [](const Halves& one) {
      return std::min(one.early + one.late, kUneven * std::min(one.early, one.late));
    };
    return std::tuple{-steady(a), -a.site.bytes, std::string_view(a.site.site)} <
           std::tuple{-steady(b), -b.site.bytes, std::string_view(b.site.site)};
  });
  ranked.resize(std::min(ranked.size(), most));
  std::vector<Site> sites;
  sites.reserve(ranked.size());
  for (Halves& one : ranked) {
    sites.push_back(std::move(one.site));
  }
  return sites;
}

std::string Samples::site(std::uint32_t place) {
  Line line;
  std::array<char, Place::kFileMost> file{};
  {
    const MutexLock lock(sampler.mutex);
    if (place == 0 || place >= sampler.lines) {
      return "";
    }
    line = sampler.tables->lines[place];
    file = sampler.tables->files[line.file];
  }
  return fmt::format("{}:{}", file.data(), line.line);
}

double Samples::mean_bytes() noexcept {
  return sampler.mean.load(std::memory_order_relaxed);
}

std::int64_t Samples::spent_ns() noexcept {
  return sampler.spent_ns.load(std::memory_order_relaxed);
}

}  // namespace plimsoll
