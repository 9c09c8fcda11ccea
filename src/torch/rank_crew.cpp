// SPDX-License-Identifier: Apache-2.0
#include "torch/rank_crew.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include "base/check.h"
#include "os/process_tree.h"
#include "plimsoll/bytes.h"
#include "plimsoll/limits.h"
#include "plimsoll/torch.h"
#include "run/run_folder.h"
#include "torch/rendezvous.h"

namespace plimsoll {
namespace {

// Where all say who they are, and one why it ends; places of recipes begin at 0.
constexpr std::int64_t kBegun = -1;
constexpr std::int64_t kFailed = -2;

bool of_torchrun() {
  return std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
}

RankWord word_of(std::int64_t place, std::span<const std::int64_t> numbers) {
  RankWord word;
  word.place = place;
  PLIMSOLL_CHECK(numbers.size() <= word.numbers.size(), "more numbers than a word has");
  std::copy(numbers.begin(), numbers.end(), word.numbers.begin());
  return word;
}

void tell(RankWord& word, ErrorCode code, std::string_view text) {
  word.how = 1 + static_cast<std::int64_t>(code);
  text = text.substr(0, word.text.size() - 1);
  std::copy(text.begin(), text.end(), word.text.begin());
}

// While there is one, signals that ask for a stop are ignored.
class StopsIgnored {
 public:
  StopsIgnored() noexcept {
    for (std::size_t k = 0; k < kSignals.size(); ++k) {
      struct sigaction ignored {};
      ignored.sa_handler = SIG_IGN;
      ::sigaction(kSignals[k], &ignored, &before_[k]);
    }
  }
  ~StopsIgnored() {
    for (std::size_t k = 0; k < kSignals.size(); ++k) {
      ::sigaction(kSignals[k], &before_[k], nullptr);
    }
  }
  StopsIgnored(const StopsIgnored&) = delete;
  StopsIgnored& operator=(const StopsIgnored&) = delete;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM};
  std::array<struct sigaction, kSignals.size()> before_{};
};

Result<RecipeReport> helped(RankCrew& crew,
                            const std::function<Result<void>(RankCrew&)>& lend_a_hand) {
  const StopsIgnored ignored;
  const auto done = without_refusal([&] { return lend_a_hand(crew); });
  TensorArena::detach();
  PLIMSOLL_TRY_VOID(done);
  return RecipeReport{.json = "", .text = ""};
}

}  // namespace

Result<std::unique_ptr<RankCrew>> RankCrew::join() {
  PLIMSOLL_TRY(const auto launched, launched_rank());
  if (!launched) {
    return nullptr;
  }
  if (of_torchrun()) {
    // Of a launcher that is killed nothing trains on, beside the one that is started next.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  }
  PLIMSOLL_TRY(RankMemory memory,
               join_ranks(*launched, sizeof(RankWord),
                          std::chrono::seconds(0)));  // An evaluation may be long.
  std::unique_ptr<RankCrew> crew(new RankCrew(std::move(memory)));
  const std::array<std::int64_t, 1> own{::getpid()};
  PLIMSOLL_TRY(const auto said, crew->agree(kBegun, own, [] { return Result<void>{}; }));
  for (const RankWord& word : said) {
    crew->pids_.push_back(static_cast<int>(word.numbers[0]));
  }
  return crew;
}

RankCrew::~RankCrew() {
  memory_.close();
}

void RankCrew::end_stopped() {
  const auto now = std::chrono::steady_clock::now();
  stopped_.resize(pids_.size());
  if (now - std::exchange(looked_, now) > std::chrono::seconds(1)) {
    // It has only begun to wait; or was stopped itself, and others may just have gone on.
    std::fill(stopped_.begin(), stopped_.end(), std::nullopt);
  }
  for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
    if (!process_stopped(pids_[rank])) {
      // Who was ended is no longer stopped, and named all the same.
      if (process_began(pids_[rank])) {
        stopped_[rank].reset();
      }
    } else if (!stopped_[rank]) {
      stopped_[rank] = now;
    } else if (now - *stopped_[rank] > kStoppedMost) {
      ::kill(pids_[rank], SIGKILL);
    }
  }
}

Result<std::span<const RankWord>> RankCrew::agree(std::int64_t place,
                                                  std::span<const std::int64_t> numbers,
                                                  const std::function<Result<void>()>& work) {
  RankWord own = word_of(place, numbers);
  std::exception_ptr thrown;
  Result<void> done;
  try {
    done = work();
    if (!done) {
      tell(own, done.error().code, done.error().to_string());
    }
  } catch (const c10::OutOfMemoryError& error) {
    thrown = std::current_exception();
    tell(own, ErrorCode::kOverBudget, error.what_without_backtrace());
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    tell(own, ErrorCode::kInternal, error.what());
  }
  std::array<std::byte, sizeof(RankWord)> bytes{};
  std::memcpy(bytes.data(), &own, sizeof own);
  auto words = memory_.word(bytes, [this] {
    end_stopped();
    return true;
  });
  broken_ = broken_ || !words;
  if (thrown) {
    std::rethrow_exception(thrown);
  }
  PLIMSOLL_TRY_VOID(done);
  if (!words) {
    std::string why = words.error().to_string();
    for (std::size_t rank = 0; rank < stopped_.size(); ++rank) {
      why += !stopped_[rank] ? ""
                             : fmt::format("; rank {} has been stopped (SIGSTOP) for {} s", rank,
                                           kStoppedMost.count());
    }
    return fail(words.error().code,
                fmt::format("{}, and the others end with it; the last commit stands", why),
                "start all ranks again");
  }
  said_.resize(static_cast<std::size_t>(count()));
  std::memcpy(said_.data(), words->data(), words->size());
  for (int rank = 0; rank < count(); ++rank) {
    RankWord& word = said_[static_cast<std::size_t>(rank)];
    word.text.back() = 0;
    if (word.how != 0) {
      return fail(static_cast<ErrorCode>(word.how - 1),
                  fmt::format("rank {} of {}: {}", rank, count(), word.text.data()));
    }
    if (word.place != place) {
      broken_ = true;
      return fail(ErrorCode::kInternal, fmt::format("rank {} is at place {} of a step, and rank {} "
                                                    "at {}",
                                                    rank, word.place, this->rank(), place));
    }
  }
  return said_;
}

Result<std::span<const RankWord>> RankCrew::say(std::int64_t place,
                                                std::span<const std::int64_t> numbers) {
  return agree(place, numbers, [] { return Result<void>(); });
}

void RankCrew::tell_why(const Error& error) {
  if (!broken_) {
    static_cast<void>(agree(kFailed, {}, [&]() -> Result<void> { return tl::unexpected(error); }));
  }
}

Result<std::int64_t> RankCrew::share(const std::string& memory_limit) {
  std::array<std::int64_t, 2> numbers{};
  PLIMSOLL_TRY(const LimitReport limit, find_limit({.user_limit = memory_limit}));
  numbers[0] = limit.limit_bytes;
  if (of_torchrun()) {
    if (const auto launcher = read_resident(::getppid())) {
      numbers[1] = launcher->anonymous + launcher->shared;
    }
  }
  PLIMSOLL_TRY(const auto said, agree(kShare, numbers, [] { return Result<void>{}; }));
  launcher_bytes_ = said[0].numbers[1];
  constexpr std::int64_t kLeast = 1 << 20;
  share_bytes_ = std::max((said[0].numbers[0] - launcher_bytes_) / count(), kLeast);
  return share_bytes_;
}

Result<void> RankCrew::take_share(RunConfig& config) {
  PLIMSOLL_TRY(const std::int64_t bytes, share(config.memory_limit));
  config.memory_limit = fmt::format("{}", bytes);
  if (!first()) {
    config.disk_limit.clear();
  }
  return {};
}

Result<void> RankCrew::takes_batch(std::int64_t batch_size) const {
  if (batch_size != 0) {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      fmt::format("batch_size = auto is planned for one process, and these are {} ranks", count()),
      "give batch_size a number");
}

std::int64_t RankCrew::whole(std::int64_t share_bytes) const noexcept {
  return share_bytes * count() + launcher_bytes_;
}

std::int64_t RankCrew::own(std::int64_t whole_bytes) const noexcept {
  return whole_bytes - launcher_bytes_ - (count() - 1) * share_bytes_;
}

Result<RankRows> RankCrew::make_room(std::int64_t place, std::int64_t bytes, Governor& governor) {
  const RankRowsShape shape{.count = 1, .dim = (bytes + 3) / 4};
  std::array<std::int64_t, 2> numbers{bytes, 0};
  std::optional<RankRows> own;
  // The others are told where it is by the word behind it.
  PLIMSOLL_TRY(auto said, agree(place, numbers, [&]() -> Result<void> {
                 if (first()) {
                   PLIMSOLL_TRY(own, memory_.take(shape, governor));
                 } else {
                   PLIMSOLL_TRY(lease_, governor.reserve(Tag::kOther, bytes));
                 }
                 return {};
               }));
  for (const RankWord& word : said) {
    PLIMSOLL_CHECK(word.numbers[0] == bytes, "ranks make rooms of different sizes");
  }
  numbers[1] = own ? own->begin() : 0;
  PLIMSOLL_TRY(said, agree(place, numbers, [] { return Result<void>{}; }));
  return first() ? *own : memory_.rows(0, said[0].numbers[1], shape);
}

Result<RecipeReport> with_crew(const std::function<Result<RecipeReport>(RankCrew*)>& lead,
                               const std::function<Result<void>(RankCrew&)>& lend_a_hand) {
  PLIMSOLL_TRY(const auto crew, RankCrew::join());
  auto done = !crew || crew->first() ? lead(crew.get()) : helped(*crew, lend_a_hand);
  if (done || !crew) {
    return done;
  }
  Error error = std::move(done).error();
  crew->tell_why(error);
  if (error.code == ErrorCode::kOverBudget) {
    const bool told = error.detail != nullptr;
    error.detail = std::make_shared<const std::string>(
        fmt::format("of {} ranks, each with {} of the limit: {}", crew->count(),
                    format_bytes(crew->share_bytes_), told ? *error.detail : error.to_string()));
    error.advice = told ? error.advice : "";  // to_string() had it.
  }
  return tl::unexpected(std::move(error));
}

TrainOptions started_again(TrainOptions options, const RankCrew* crew,
                           const std::filesystem::path& run) {
  const char* const restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const bool again = crew != nullptr && restarts != nullptr && std::string_view(restarts) != "0";
  options.resume = options.resume || (again && RunFolder::is_run(run));
  return options;
}

WholeLimit whole_limit(const RankCrew* crew) {
  return crew == nullptr ? WholeLimit() : [crew](std::int64_t share) { return crew->whole(share); };
}

OwnLimit own_limit(const RankCrew* crew) {
  return crew == nullptr ? OwnLimit() : [crew](std::int64_t whole) { return crew->own(whole); };
}

}  // namespace plimsoll
