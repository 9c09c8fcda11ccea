// SPDX-License-Identifier: Apache-2.0
//
// RankCrew: the processes that a launcher (torchrun) started together to make one run's steps.
//
// Rank 0 has the run; the others work for it and keep nothing (decision 0052). Each part of a step
// is done in agree(), after which all know how it went for everybody, so that they stay at the same
// place. What they pass to one another lies in a room, memory of rank 0 that all have mapped.
//
// Reading order: memory/rank_memory.h, rendezvous.h, this file, hands.h of a recipe.
//
// Threads: the thread that trains; own() any.
// Memory:  RankMemory's; a room is leased by each rank, for pages of shared memory count in whoever
//          touches them.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/rank_memory.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"
#include "run/config.h"
#include "run/limit_requests.h"
#include "run/recipe.h"
#include "run/train_options.h"
#include "torch/admission.h"

namespace plimsoll {

/// What a rank says: where it is, how it went, and what others should know.
struct RankWord {
  std::int64_t place{0};
  std::int64_t how{0};  ///< 0: fine; otherwise 1 + an ErrorCode.
  std::array<std::int64_t, 8> numbers{};
  std::array<char, 432> text{};  ///< Of an error; ends with a zero.
};

class RankCrew {
 public:
  /// The crew that launched_rank() says this process is of; none: it runs alone. It ends with its
  /// launcher. Errors: of launched_rank() and join_ranks().
  static Result<std::unique_ptr<RankCrew>> join();

  RankCrew(const RankCrew&) = delete;
  RankCrew& operator=(const RankCrew&) = delete;
  ~RankCrew();  ///< Leaves: those that wait for this one hear it.

  [[nodiscard]] int rank() const noexcept { return memory_.rank(); }
  [[nodiscard]] int count() const noexcept { return memory_.count(); }
  [[nodiscard]] bool first() const noexcept { return rank() == 0; }
  /// The place of share(); those of recipes come behind it.
  static constexpr std::int64_t kShare = 0;

  /// Stopped (SIGSTOP, a debugger) for longer than this, a rank is ended by those that wait.
  static constexpr std::chrono::seconds kStoppedMost{30};

  /// A rank has ended, and nothing can be agreed any more.
  [[nodiscard]] bool broken() const noexcept { return broken_; }

  /// Does `work` and says how it went, with `numbers`; gives what all ranks said, once all have.
  ///
  /// Errors: what `work` gave, here (thrown: thrown again) or at another rank, which is named; kIo
  ///         where one has ended; kInternal where one is at another place.
  Result<std::span<const RankWord>> agree(std::int64_t place, std::span<const std::int64_t> numbers,
                                          const std::function<Result<void>()>& work);
  /// agree(), without work.
  Result<std::span<const RankWord>> say(std::int64_t place,
                                        std::span<const std::int64_t> numbers = {});

  /// What each rank may hold of a limit for all of them and their launcher: equal shares. On all
  /// ranks at once, at kShare. Errors: of find_limit(); as agree().
  Result<std::int64_t> share(const std::string& memory_limit);
  /// Makes config.memory_limit this rank's share of it. Only the first one writes to a disk.
  /// Errors: as share().
  Result<void> take_share(RunConfig& config);
  /// Errors: kInvalidArgument for a batch_size of 0, "auto".
  Result<void> takes_batch(std::int64_t batch_size) const;

  /// The limit of which that is a share.
  [[nodiscard]] std::int64_t whole(std::int64_t share_bytes) const noexcept;
  /// What this rank may hold of another limit while the others keep their shares. Any thread.
  /// Requires: share().
  [[nodiscard]] std::int64_t own(std::int64_t whole_bytes) const noexcept;

  /// Makes a room of `bytes`, the same on all ranks, for as long as a copy of it is left. Its
  /// rows() are `bytes` and more, at a multiple of 64; what is in them is not defined. Once.
  /// Errors: kOverBudget; kIo; as agree().
  Result<RankRows> make_room(std::int64_t place, std::int64_t bytes, Governor& governor);

 private:
  friend Result<RecipeReport> with_crew(const std::function<Result<RecipeReport>(RankCrew*)>& lead,
                                        const std::function<Result<void>(RankCrew&)>& lend_a_hand);
  explicit RankCrew(RankMemory memory) : memory_(std::move(memory)) {}
  void end_stopped();
  // So that the others tell it too: the launcher ends all ranks once one has ended, which may be
  // before this one has told anybody. Waits until all listen or have left.
  void tell_why(const Error& error);

  RankMemory memory_;
  bool broken_{false};
  std::int64_t launcher_bytes_{0};
  std::int64_t share_bytes_{0};
  std::vector<int> pids_;
  std::vector<std::optional<std::chrono::steady_clock::time_point>> stopped_;  // Since when.
  std::chrono::steady_clock::time_point looked_{};
  std::vector<RankWord> said_;
  Lease lease_;  // Of another rank's memory.
};

/// A recipe's training as the launcher has it: `lead`, with the crew that this rank is the first
/// of, or nullptr where there is none; or `lend_a_hand`, which ends when the first one does: SIGINT
/// and SIGTERM are ignored meanwhile, and the report is empty. Errors: of RankCrew::join() and of
/// both; a refusal of memory says what it is a share of.
Result<RecipeReport> with_crew(const std::function<Result<RecipeReport>(RankCrew*)>& lead,
                               const std::function<Result<void>(RankCrew&)>& lend_a_hand);

/// How a recipe of a crew trains: torchrun starts ranks again with the command that began the run,
/// which goes on then.
[[nodiscard]] TrainOptions started_again(TrainOptions options, const RankCrew* crew,
                                         const std::filesystem::path& run);

/// RankCrew::whole() and own() for a RunLoop; empty without a crew, which must outlive them.
[[nodiscard]] WholeLimit whole_limit(const RankCrew* crew);
[[nodiscard]] OwnLimit own_limit(const RankCrew* crew);

}  // namespace plimsoll
