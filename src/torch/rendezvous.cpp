// SPDX-License-Identifier: Apache-2.0
#include "torch/rendezvous.h"

#include <charconv>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/check.h"

namespace plimsoll {
namespace {

Result<std::int64_t> number_in(const char* name, std::int64_t least, std::int64_t most) {
  const char* const text = std::getenv(name);
  const std::string_view digits = text == nullptr ? "" : text;
  std::int64_t number = -1;
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (status != std::errc() || end != digits.data() + digits.size() || number < least ||
      number > most) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: '{}' is no number from {} to {}", name, digits, least, most),
                "start ranks with torchrun --standalone --nproc-per-node");
  }
  return number;
}

// What all ranks say, one exchange after another, through a store.
class RankStore {
 public:
  explicit RankStore(const LaunchedRank& own) : own_(own) {
    c10d::TCPStoreOptions options;
    options.port = own.port;
    options.isServer = own.rank == 0 && !own.store_is_launchers;
    options.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::PrefixStore>(
        "plimsoll-" + own.restart, c10::make_intrusive<c10d::TCPStore>(own.host, options));
  }

  std::vector<std::string> all(const std::string& text) {
    ++exchanges_;
    const auto key = [&](int rank) { return fmt::format("{}/{}", exchanges_, rank); };
    store_->set(key(own_.rank), std::vector<std::uint8_t>(text.begin(), text.end()));
    std::vector<std::string> texts;
    for (int rank = 0; rank < own_.count; ++rank) {
      const std::vector<std::uint8_t> said = store_->get(key(rank));
      texts.emplace_back(said.begin(), said.end());
    }
    return texts;
  }

  // Once no rank asks for anything any more, so that a server of rank 0's may end.
  void part() {
    if (store_->add("parted", 1) == own_.count) {
      store_->set("all parted", std::vector<std::uint8_t>{});
    }
    if (own_.rank == 0 && !own_.store_is_launchers) {
      store_->wait({"all parted"});
    }
  }

 private:
  const LaunchedRank& own_;
  c10::intrusive_ptr<c10d::Store> store_;
  int exchanges_{0};
};

// "+ADDRESS", or "-WHY NOT": what all ranks hear.
std::string told(const Result<RankMemory>& memory) {
  return memory ? "+" + memory->address() : "-" + memory.error().to_string();
}

Result<std::vector<std::string>> agreed(const std::vector<std::string>& said) {
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    if (!said[rank].starts_with('+')) {
      return fail(ErrorCode::kIo, fmt::format("rank {} cannot share memory with the others: {}",
                                              rank, said[rank].substr(1)));
    }
    texts.push_back(said[rank].substr(1));
  }
  return texts;
}

Result<RankMemory> joined(RankStore& store, const RankWords& words) {
  auto memory = RankMemory::create(words);
  PLIMSOLL_TRY(const auto addresses, agreed(store.all(told(memory))));
  const auto opened = memory->open(addresses);
  PLIMSOLL_TRY(const auto all_opened,
               agreed(store.all(opened ? "+" : "-" + opened.error().to_string())));
  static_cast<void>(all_opened);
  return memory;
}

}  // namespace

Result<std::optional<LaunchedRank>> launched_rank() {
  if (std::getenv("RANK") == nullptr) {
    return std::nullopt;
  }
  LaunchedRank own;
  PLIMSOLL_TRY(const std::int64_t count, number_in("WORLD_SIZE", 1, 4096));
  if (count == 1) {
    return std::nullopt;
  }
  PLIMSOLL_TRY(const std::int64_t rank, number_in("RANK", 0, count - 1));
  PLIMSOLL_TRY(const std::int64_t port, number_in("MASTER_PORT", 1, 65535));
  if (std::getenv("LOCAL_WORLD_SIZE") != nullptr) {
    PLIMSOLL_TRY(const std::int64_t local, number_in("LOCAL_WORLD_SIZE", 1, count));
    if (local != count) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{} ranks, {} of them on this machine: the ranks of a run are on one "
                              "machine yet",
                              count, local),
                  "start them with torchrun --standalone --nproc-per-node");
    }
  }
  const auto text = [](const char* name, const char* otherwise) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? otherwise : value);
  };
  own.rank = static_cast<int>(rank);
  own.count = static_cast<int>(count);
  own.port = static_cast<std::uint16_t>(port);
  own.host = text("MASTER_ADDR", "localhost");
  own.restart = text("TORCHELASTIC_RESTART_COUNT", "0");
  own.store_is_launchers = text("TORCHELASTIC_USE_AGENT_STORE", "") == "True";
  return own;
}

Result<RankMemory> join_ranks(const LaunchedRank& own, std::int64_t word_bytes,
                              std::chrono::seconds longest) {
  try {
    RankStore store(own);
    auto memory = joined(
        store, {.rank = own.rank, .count = own.count, .bytes = word_bytes, .longest = longest});
    store.part();
    return memory;
  } catch (const std::exception& error) {  // c10's, of a store that does not answer.
    const std::string text = error.what();
    return fail(ErrorCode::kIo, fmt::format("rank {} of {} at {}:{}: {}", own.rank, own.count,
                                            own.host, own.port, text.substr(0, text.find('\n'))));
  }
}

}  // namespace plimsoll
