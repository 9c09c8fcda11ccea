// SPDX-License-Identifier: Apache-2.0
//
// governor_fuzz: many threads reserve, grow, shrink, release, admit, press and move the limit.
//
//   governor_fuzz [--seconds 8] [--seed 1] [--threads 4]
//
// Goal: the ledger's sums hold after every step of every thread; nobody waits for ever; and what
// the moves under pressure say they gave is gone from memory, page by page. Method: rounds of a
// governor each, over real slabs in small regions. Workers hold leases and admissions, one thread
// moves the limit, one maps memory that nobody leased, one trains (step_boundary). Each thread
// draws from (seed, round, thread), checks a copy of the ledger after every operation, and counts
// it; when a count stands still for kHungSeconds the program says which and ends. Some leases
// outlive their round: the orphans of the next. One line of JSON at the end.
//
// Threads: as many as asked for, and three.   Memory: 200 MiB and a little.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <fmt/format.h>

#include "base/mutex.h"
#include "memory/admission.h"
#include "memory/slab.h"
#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"

namespace plimsoll {
namespace {

using namespace literals;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kRegion = 64 << 10;
constexpr std::int64_t kCacheBytes = 24 << 20;
constexpr int kCaches = 3;
constexpr std::int64_t kTensorFloor = 16 << 20;
constexpr std::int64_t kForeign = 16 << 20;
constexpr std::int64_t kRoom = 160 << 20;  // Of the first limit, above what is resident then.
constexpr auto kRound = std::chrono::milliseconds(2000);
constexpr int kHungSeconds = 60;
constexpr int kThreadsMax = 32;

struct Options {
  double seconds{8};
  std::uint64_t seed{1};
  int threads{4};
};
Options options;

[[noreturn]] void end(const std::string& why) {
  std::fprintf(stderr, "governor_fuzz: %s; repeat with --seed %llu --seconds %g --threads %d\n",
               why.c_str(), static_cast<unsigned long long>(options.seed), options.seconds,
               options.threads);
  std::_Exit(1);
}

#define EXPECT_OR_END(condition)                                 \
  do {                                                           \
    if (!(condition)) {                                          \
      end(fmt::format("line {}: not {}", __LINE__, #condition)); \
    }                                                            \
  } while (false)

// Written by all threads, read by the main one: order is free.
struct Tally {
  std::array<std::atomic<std::int64_t>, kThreadsMax + 3> operations{};
  std::atomic<std::int64_t> refusals{0};
  std::atomic<std::int64_t> limits{0};
  std::atomic<std::int64_t> unsettled{0};
  std::atomic<std::int64_t> stops{0};
  std::atomic<std::int64_t> shrunk{0};  // Bytes that shrinking said it gave,
  std::atomic<std::int64_t> absent{0};  // and of them those the kernel no longer holds.
  std::atomic<std::int64_t> purged{0};
  std::atomic<std::int64_t> grown{0};
  std::atomic<std::int64_t> orphans{0};  // Bytes that outlived their round.
};
Tally tally;

// Every sum of the ledger, recomputed from its parts.
void check_sums(const Governor& governor) {
  const LedgerState state = governor.state();
  std::int64_t leased = 0;
  std::int64_t committed = 0;
  for (const PoolState& pool : state.pools) {
    EXPECT_OR_END(pool.leased_bytes >= 0 && pool.leased_bytes <= pool.peak_bytes);
    EXPECT_OR_END(pool.floor_bytes >= 0 && pool.yielded_bytes >= 0);
    leased += pool.leased_bytes;
    committed += std::max(pool.floor_bytes, pool.leased_bytes);
  }
  EXPECT_OR_END(state.leased_bytes == leased);
  EXPECT_OR_END(state.committed_bytes == committed);
  EXPECT_OR_END(state.asked_bytes <= state.limit_bytes);
  EXPECT_OR_END(state.free_bytes() >= 0);
  EXPECT_OR_END(state.pools[static_cast<std::size_t>(Tag::kForeign)].floor_bytes == kForeign);
  EXPECT_OR_END(state.pools[static_cast<std::size_t>(Tag::kTensor)].floor_bytes >= kTensorFloor);
}

// How many of the range's pages the kernel holds.
std::int64_t resident_in(const std::byte* data, std::int64_t bytes) {
  std::array<unsigned char, kRegion / 4096> pages{};
  EXPECT_OR_END(
      ::mincore(const_cast<std::byte*>(data), static_cast<std::size_t>(bytes), pages.data()) == 0);
  std::int64_t held = 0;
  for (const unsigned char page : pages) {
    held += (page & 1U) * 4096;
  }
  return held;
}

// A cache as the stores have: admitted, elastic, resident, some of it in use at any time.
class Cache : public Reclaimer {
 public:
  Cache(Governor& governor, Tag tag) {
    admission_.take(governor, tag, kCacheBytes, "cache_bytes").or_throw();
    slab_ = Slab::create(governor, tag, kCacheBytes).or_throw();
    admission_.make_elastic();
    handle_ = governor.add_reclaimer(this).or_throw();
  }
  ~Cache() override { handle_ = ReclaimerHandle(); }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  std::int64_t reclaim(PressureMove move, std::int64_t wanted_bytes) noexcept override {
    const MutexLock lock(mutex_);
    std::int64_t given = 0;
    while (move == PressureMove::kShrink && given < wanted_bytes && held_ - kRegion >= busy_) {
      held_ -= kRegion;
      const std::int64_t here = slab_.release_pages(held_, kRegion);
      tally.absent += here - resident_in(slab_.data() + held_, kRegion);
      given += here;
    }
    tally.shrunk += given;
    return given;
  }
  std::int64_t grow_back(std::int64_t room_bytes) noexcept override {
    const MutexLock lock(mutex_);
    std::int64_t taken = 0;
    while (taken + kRegion <= room_bytes && held_ < kCacheBytes &&
           slab_.reacquire_pages(held_, kRegion)) {
      std::memset(slab_.data() + held_, 1, kRegion);
      held_ += kRegion;
      taken += kRegion;
    }
    tally.grown += taken;
    return taken;
  }
  // What is in use from now on: of what is there.
  void use(std::int64_t bytes) {
    const MutexLock lock(mutex_);
    busy_ = std::min(bytes, held_);
  }
  [[nodiscard]] const char* name() const noexcept override { return "cache"; }

 private:
  Mutex mutex_;
  Admission admission_;
  Slab slab_;
  std::int64_t held_ PLIMSOLL_GUARDED_BY(mutex_){kCacheBytes};
  std::int64_t busy_ PLIMSOLL_GUARDED_BY(mutex_){0};
  ReclaimerHandle handle_;
};

// Idle leases, as an arena's free pages: given back by a purge.
class Idle : public Reclaimer {
 public:
  explicit Idle(Governor& governor) : handle_(governor.add_reclaimer(this).or_throw()) {}
  ~Idle() override { handle_ = ReclaimerHandle(); }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;
  void keep(Lease lease) {
    Lease dropped;
    const MutexLock lock(mutex_);
    dropped = std::exchange(lease_, std::move(lease));
  }
  std::int64_t reclaim(PressureMove move, std::int64_t) noexcept override {
    const MutexLock lock(mutex_);
    const std::int64_t held = move == PressureMove::kPurge ? lease_.bytes() : 0;
    lease_.shrink(lease_.bytes() - held);
    tally.purged += held;
    return held;
  }
  [[nodiscard]] const char* name() const noexcept override { return "idle"; }

 private:
  Mutex mutex_;
  Lease lease_ PLIMSOLL_GUARDED_BY(mutex_);
  ReclaimerHandle handle_;
};

struct Round {
  Governor governor;
  std::array<std::unique_ptr<Cache>, kCaches> caches;
  std::unique_ptr<Idle> idle;
  std::int64_t first_limit{0};
  std::int64_t number{0};
  std::atomic<bool> over{false};  // Written by the main thread.

  [[nodiscard]] std::mt19937_64 random_of(int thread) const {
    std::seed_seq seeds{options.seed, static_cast<std::uint64_t>(number),
                        static_cast<std::uint64_t>(thread)};
    return std::mt19937_64(seeds);
  }
};

std::int64_t draw(std::mt19937_64& random, std::int64_t below) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below));
}

void count(int thread) {
  tally.operations[static_cast<std::size_t>(thread)].fetch_add(1, std::memory_order_relaxed);
}

// Reserves, grows, shrinks, releases; admits and takes back. Returns what it still holds.
std::vector<Lease> work(Round& round, int thread) {
  constexpr std::array kTags{Tag::kTensor, Tag::kOther, Tag::kForeign};
  constexpr std::size_t kMost = 24;
  auto random = round.random_of(thread);
  std::vector<Lease> leases;
  std::vector<PoolSpec> admitted;
  while (!round.over) {
    const auto tag = kTags[static_cast<std::size_t>(draw(random, kTags.size()))];
    const std::int64_t bytes = draw(random, 8_MiB);
    const auto at = leases.empty() ? 0 : static_cast<std::size_t>(draw(random, std::ssize(leases)));
    const std::int64_t what = draw(random, 100);
    if (what < 35 && leases.size() < kMost) {
      auto lease =
          what < 20 ? round.governor.reserve(tag, bytes) : round.governor.try_reserve(tag, bytes);
      tally.refusals += lease ? 0 : 1;
      if (lease) {
        EXPECT_OR_END(lease->bytes() == bytes);
        leases.push_back(*std::move(lease));
      }
    } else if (what < 50 && !leases.empty()) {
      const std::int64_t before = leases[at].bytes();
      const bool grown = leases[at].grow(before + bytes).has_value();
      tally.refusals += grown ? 0 : 1;
      EXPECT_OR_END(leases[at].bytes() == (grown ? before + bytes : before));
    } else if (what < 65 && !leases.empty()) {
      leases[at].shrink(leases[at].bytes() / 2);
    } else if (what < 80 && !leases.empty()) {
      std::swap(leases[at], leases.back());
      leases.pop_back();
    } else if (what < 85 && admitted.size() < 4) {
      const PoolSpec spec{
          .tag = Tag::kOther, .floor_bytes = bytes, .elastic_bytes = draw(random, bytes + 1)};
      if (round.governor.admit(spec)) {
        admitted.push_back(spec);
      }
    } else if (what < 90 && !admitted.empty()) {
      round.governor.release_admission(admitted.back());
      admitted.pop_back();
    } else if (what < 95) {
      round.caches[static_cast<std::size_t>(draw(random, kCaches))]->use(
          draw(random, kCacheBytes * 5 / 4) * draw(random, 2));
    } else if (auto lease = round.governor.try_reserve(Tag::kTensor, bytes / 4); lease) {
      round.idle->keep(*std::move(lease));
    }
    check_sums(round.governor);
    count(thread);
  }
  for (const PoolSpec& spec : admitted) {
    round.governor.release_admission(spec);
  }
  return leases;
}

void move_limit(Round& round, int thread) {
  auto random = round.random_of(thread);
  while (!round.over) {
    const std::int64_t lowest = round.governor.state().baseline_bytes;
    const std::int64_t wanted = draw(random, 4) == 0
                                    ? round.first_limit
                                    : lowest + 1 + draw(random, round.first_limit - lowest);
    const auto change = round.governor.set_limit(std::to_string(wanted), "fuzz").or_throw();
    EXPECT_OR_END(change.asked_bytes <= wanted && change.limit_bytes >= change.asked_bytes);
    tally.limits += 1;
    tally.unsettled += change.settled() ? 0 : 1;
    check_sums(round.governor);
    count(thread);
    std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 4000)));
  }
}

// Resident memory that no lease explains, as a NumPy array would be.
void press(Round& round, int thread) {
  auto random = round.random_of(thread);
  while (!round.over) {
    const auto bytes = static_cast<std::size_t>(1_MiB + draw(random, 96_MiB));
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    EXPECT_OR_END(memory != MAP_FAILED);
    std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 20000)));
    ::munmap(memory, bytes);
    std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 20000)));
    count(thread);
  }
}

void train(Round& round, int thread) {
  while (!round.over) {
    const PressureReport report = round.governor.step_boundary();
    EXPECT_OR_END(!report.stop || report.needed_bytes > 0);
    tally.stops += report.stop ? 1 : 0;
    check_sums(round.governor);
    count(thread);
  }
}

// Ends the program when a thread has done nothing for kHungSeconds; a thread may be slow.
void watch(Round& round, int threads) {
  const auto until = Clock::now() + kRound;
  std::array<std::int64_t, kThreadsMax + 3> seen{};
  seen.fill(-1);
  auto moved = Clock::now();
  std::int64_t slowest = 0;
  while (Clock::now() < until || slowest < 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    slowest = 0;
    for (int t = 0; t < threads; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const std::int64_t now = tally.operations[at].load(std::memory_order_relaxed);
      slowest = now == seen[at] ? -1 : slowest;
    }
    if (slowest == 0) {  // All have moved on since all last had.
      moved = Clock::now();
      for (int t = 0; t < threads; ++t) {
        seen[static_cast<std::size_t>(t)] = tally.operations[static_cast<std::size_t>(t)];
      }
    } else if (Clock::now() - moved > std::chrono::seconds(kHungSeconds)) {
      end(fmt::format("a thread hangs in round {}\n{}", round.number,
                      round.governor.state().to_string()));
    }
  }
}

std::vector<Lease> play(std::int64_t number, std::vector<Lease> orphans) {
  Round round;
  round.number = number;
  std::int64_t outlived = 0;
  for (const Lease& lease : orphans) {
    outlived += lease.bytes();
  }
  round.first_limit = read_resident().or_throw().total() + outlived + kRoom;
  GovernorOptions how;
  how.memory_limit = std::to_string(round.first_limit);
  how.foreign_bytes = kForeign;
  round.governor = Governor::create(how).or_throw();
  EXPECT_OR_END(round.governor.state().orphan_bytes == outlived);
  tally.orphans += outlived;
  round.governor.admit({.tag = Tag::kTensor, .floor_bytes = kTensorFloor}).or_throw();
  constexpr std::array kTags{Tag::kEmbedding, Tag::kFeature, Tag::kLoader};
  for (std::size_t i = 0; i < kTags.size(); ++i) {
    round.caches[i] = std::make_unique<Cache>(round.governor, kTags[i]);
  }
  round.idle = std::make_unique<Idle>(round.governor);
  std::vector<std::vector<Lease>> left(static_cast<std::size_t>(options.threads));
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < options.threads; ++t) {
      threads.emplace_back([&, t] { left[static_cast<std::size_t>(t)] = work(round, t); });
    }
    threads.emplace_back([&] { move_limit(round, options.threads); });
    threads.emplace_back([&] { press(round, options.threads + 1); });
    threads.emplace_back([&] { train(round, options.threads + 2); });
    orphans.clear();  // While the others are at work.
    watch(round, options.threads + 3);
    round.over = true;
  }
  EXPECT_OR_END(round.governor.state().orphan_bytes == 0);
  // With the first limit back and nobody pressing, every promise is whole again; unless what the
  // first worker still holds was leased while they were yielded, and leaves nothing free.
  round.idle.reset();
  for (std::size_t t = 1; t < left.size(); ++t) {
    left[t].clear();
  }
  const auto whole = round.governor.set_limit(std::to_string(round.first_limit)).or_throw();
  for (const Tag tag : kTags) {
    if (whole.asked_bytes < round.first_limit) {
      break;  // The machine itself has become smaller.
    }
    const LedgerState state = round.governor.state();
    const PoolState& pool = state.pools[static_cast<std::size_t>(tag)];
    EXPECT_OR_END(pool.yielded_bytes + pool.floor_bytes == kCacheBytes);
    EXPECT_OR_END(pool.yielded_bytes == 0 || state.free_bytes() <= 0);
  }
  for (auto& cache : round.caches) {
    cache.reset();
  }
  std::int64_t held = 0;
  for (const Lease& lease : left[0]) {
    held += lease.bytes();
  }
  check_sums(round.governor);
  EXPECT_OR_END(round.governor.state().leased_bytes == held);
  round.governor.close();
  return std::move(left[0]);
}

int run() {
  const auto began = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  std::vector<Lease> orphans;
  std::int64_t rounds = 0;
  while (rounds == 0 || spent() < options.seconds) {
    orphans = play(rounds++, std::move(orphans));
  }
  std::int64_t operations = 0;
  for (const auto& one : tally.operations) {
    operations += one;
  }
  // Moves under pressure really free: of what they say, all but pages the kernel had not yet let
  // go.
  EXPECT_OR_END(tally.shrunk > 0 && tally.absent >= tally.shrunk / 100 * 99);
  EXPECT_OR_END(tally.purged > 0 && tally.grown > 0 && tally.limits > 0 && tally.refusals > 0);
  std::printf(
      "%s\n",
      fmt::format("{{\"fuzz\": \"governor\", \"seed\": {}, \"seconds\": {:.1f}, \"threads\": {}, "
                  "\"rounds\": {}, \"operations\": {}, \"refusals\": {}, \"limits\": {}, "
                  "\"unsettled\": {}, \"stops\": {}, \"shrunk_bytes\": {}, \"freed_bytes\": {}, "
                  "\"purged_bytes\": {}, \"grown_bytes\": {}, \"orphan_bytes\": {}}}",
                  options.seed, spent(), options.threads + 3, rounds, operations,
                  tally.refusals.load(), tally.limits.load(), tally.unsettled.load(),
                  tally.stops.load(), tally.shrunk.load(), tally.absent.load(), tally.purged.load(),
                  tally.grown.load(), tally.orphans.load())
          .c_str());
  return 0;
}

}  // namespace
}  // namespace plimsoll

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name(argv[i]);
    if (name == "--seconds") {
      plimsoll::options.seconds = std::atof(argv[i + 1]);
    } else if (name == "--seed") {
      plimsoll::options.seed = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (name == "--threads") {
      plimsoll::options.threads = std::clamp(std::atoi(argv[i + 1]), 1, plimsoll::kThreadsMax);
    } else {
      plimsoll::end("no option " + name);
    }
  }
  return plimsoll::run();
}
