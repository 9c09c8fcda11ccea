// SPDX-License-Identifier: Apache-2.0
//
// Goal: what one rank of a crew was refused or failed in, all hear, and go on together or not at
// all; a room is the same memory for all. Method: real processes, as a launcher starts them.
#include "torch/rank_crew.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "tests/support/feature_set.h"
#include "tests/support/launched_ranks.h"

namespace plimsoll {
namespace {

Result<void> nothing() {
  return {};
}

// work(crew) on three ranks; how each ended.
std::vector<int> crews_of_three(const std::function<void(RankCrew&)>& work) {
  const int port = free_port();
  return forked_ranks(3, [&](int rank, const RankTexts&) {
    launch(rank, 3, port, "0", false);
    const auto crew = RankCrew::join().or_throw();
    ASSERT_TRUE(crew != nullptr);
    EXPECT_EQ(crew->rank(), rank);
    EXPECT_EQ(crew->count(), 3);
    work(*crew);
  });
}

TEST(RankCrewTest, AProcessAloneIsOfNoCrew) {
  const auto ends = forked_ranks(1, [](int, const RankTexts&) {
    ::unsetenv("RANK");
    EXPECT_TRUE(RankCrew::join().or_throw() == nullptr);
  });
  EXPECT_EQ(ends, std::vector<int>(1));
}

TEST(RankCrewTest, AllHearWhatEachSays) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              for (std::int64_t turn = 0; turn < 50; ++turn) {
                const std::array<std::int64_t, 2> own{crew.rank(), turn};
                const auto said = crew.agree(turn, own, nothing).or_throw();
                for (int rank = 0; rank < 3; ++rank) {
                  const auto& word = said[static_cast<std::size_t>(rank)];
                  ASSERT_EQ(word.numbers[0], rank);
                  ASSERT_EQ(word.numbers[1], turn);
                }
              }
            }),
            std::vector<int>(3));
}

TEST(RankCrewTest, WhatOneIsRefusedAllAreAndTheyGoOn) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              const auto refused = crew.agree(0, {}, [&]() -> Result<void> {
                return crew.rank() == 1 ? fail(ErrorCode::kOverBudget, "no room", "raise it")
                                        : Result<void>{};
              });
              ASSERT_FALSE(refused);
              EXPECT_EQ(refused.error().code, ErrorCode::kOverBudget);
              EXPECT_EQ(refused.error().to_string(),
                        crew.rank() == 1 ? "no room: raise it" : "rank 1 of 3: no room: raise it");
              EXPECT_FALSE(crew.broken());

              const auto thrown = [&] {
                return crew.agree(1, {}, [&]() -> Result<void> {
                  if (crew.rank() == 2) {
                    throw c10::OutOfMemoryError(c10::SourceLocation{}, "torch is refused");
                  }
                  return {};
                });
              };
              if (crew.rank() == 2) {
                EXPECT_THROW(static_cast<void>(thrown()), c10::OutOfMemoryError);
              } else {
                const auto heard = thrown();
                ASSERT_FALSE(heard);
                EXPECT_EQ(heard.error().code, ErrorCode::kOverBudget);
                EXPECT_EQ(heard.error().to_string(), "rank 2 of 3: torch is refused");
              }
              EXPECT_TRUE(crew.agree(2, {}, nothing));
            }),
            std::vector<int>(3));
}

TEST(RankCrewTest, ATextThatIsLongerThanAWordIsCut) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              const auto failed = crew.agree(0, {}, [&]() -> Result<void> {
                return crew.first() ? fail(ErrorCode::kIo, std::string(1000, 'x')) : Result<void>{};
              });
              ASSERT_FALSE(failed);
              const std::string text = failed.error().to_string();
              EXPECT_EQ(std::count(text.begin(), text.end(), 'x'), crew.first() ? 1000 : 431);
            }),
            std::vector<int>(3));
}

TEST(RankCrewTest, ARankThatGoesAstrayOrLeavesEndsTheOthers) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              const auto apart = crew.agree(crew.rank() == 2 ? 5 : 4, {}, nothing);
              ASSERT_FALSE(apart);
              EXPECT_EQ(apart.error().code, ErrorCode::kInternal);
              EXPECT_TRUE(crew.broken());
            }),
            std::vector<int>(3));
  const auto ends = crews_of_three([](RankCrew& crew) {
    if (crew.rank() == 1) {
      ::_exit(7);
    }
    const auto alone = crew.agree(0, {}, nothing);
    ASSERT_FALSE(alone);
    EXPECT_NE(alone.error().to_string().find("has left"), std::string::npos);
    EXPECT_TRUE(crew.broken());
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 7, 0}));
}

TEST(RankCrewTest, ARoomIsTheSameMemoryForAllAndLeasedByEach) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              auto governor = test::governor_of();
              const std::int64_t before = governor.state().leased_bytes;
              const RankRows room = crew.make_room(0, 1 << 20, governor).or_throw();
              EXPECT_GE(governor.state().leased_bytes - before, 1 << 20);
              const auto floats = room.rows();
              ASSERT_EQ(floats.size(), std::size_t{1 << 18});
              EXPECT_EQ(reinterpret_cast<std::uintptr_t>(floats.data()) % 64, 0U);
              floats[static_cast<std::size_t>(crew.rank())] = static_cast<float>(crew.rank() + 10);
              ASSERT_TRUE(crew.agree(1, {}, nothing));
              for (std::size_t rank = 0; rank < 3; ++rank) {
                EXPECT_EQ(floats[rank], static_cast<float>(rank + 10));
              }
              ASSERT_TRUE(crew.agree(2, {}, nothing));
            }),
            std::vector<int>(3));
}

TEST(RankCrewTest, SharesOfALimitAreEqualAndRankZerosCount) {
  EXPECT_EQ(crews_of_three([](RankCrew& crew) {
              ::unsetenv("TORCHELASTIC_RUN_ID");
              const auto share = crew.share(crew.first() ? "300MiB" : "900MiB").or_throw();
              EXPECT_EQ(share, 100 << 20);
              EXPECT_EQ(crew.whole(share), 300 << 20);
              EXPECT_EQ(crew.own(500 << 20), 300 << 20);
            }),
            std::vector<int>(3));
}

TEST(RankCrewTest, TheFirstLeadsAndOthersLendAHandWhateverAsksThemToStop) {
  const int port = free_port();
  const auto ends = forked_ranks(2, [&](int rank, const RankTexts&) {
    launch(rank, 2, port, "0", false);
    const auto told = with_crew(
        [](RankCrew* crew) -> Result<RecipeReport> {
          PLIMSOLL_TRY(const auto share, crew->share("200MiB"));
          EXPECT_EQ(share, 100 << 20);
          PLIMSOLL_TRY_VOID(crew->agree(1, {}, nothing));
          return fail(ErrorCode::kOverBudget, "too little", "raise it");
        },
        [](RankCrew& crew) -> Result<void> {
          ::raise(SIGTERM);
          ::raise(SIGINT);
          PLIMSOLL_TRY_VOID(crew.share(""));
          PLIMSOLL_TRY_VOID(crew.agree(1, {}, nothing));
          return {};
        });
    if (rank == 1) {
      ASSERT_TRUE(told);
      EXPECT_EQ(told->json, "");
      ::raise(SIGTERM);  // Obeyed again.
    }
    EXPECT_EQ(told.error().to_string(),
              "of 2 ranks, each with 100.0 MiB of the limit: too little: raise it");
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGTERM}));
}

TEST(RankCrewTest, TheOthersTellWhatOneFailedInAlone) {
  for (const auto& [failing, code] :
       {std::pair(0, ErrorCode::kInvalidArgument), std::pair(1, ErrorCode::kOverBudget)}) {
    const int port = free_port();
    const auto ends = forked_ranks(3, [&](int rank, const RankTexts&) {
      launch(rank, 3, port, "0", false);
      const auto work = [&](RankCrew& crew) -> Result<void> {
        if (rank == failing) {
          return fail(code, "no such column", "name another");
        }
        PLIMSOLL_TRY_VOID(crew.say(4));
        return {};
      };
      const auto told = with_crew(
          [&](RankCrew* crew) -> Result<RecipeReport> {
            PLIMSOLL_TRY_VOID(work(*crew));
            return RecipeReport{};
          },
          work);
      ASSERT_FALSE(told);
      const std::string share =
          code == ErrorCode::kOverBudget ? "of 3 ranks, each with 0 B of the limit: " : "";
      const std::string by = rank == failing ? "" : fmt::format("rank {} of 3: ", failing);
      EXPECT_EQ(told.error().to_string(), share + by + "no such column: name another");
      EXPECT_EQ(told.error().code, code);
    });
    EXPECT_EQ(ends, std::vector<int>(3));
  }
}

TEST(RankCrewTest, AProcessAloneLeads) {
  const auto ends = forked_ranks(1, [](int, const RankTexts&) {
    ::unsetenv("RANK");
    const auto told = with_crew(
        [](RankCrew* crew) {
          EXPECT_TRUE(crew == nullptr);
          return RecipeReport{.json = "{}", .text = "done"};
        },
        [](RankCrew&) { return fail(ErrorCode::kInternal, "a hand"); });
    ASSERT_TRUE(told);
    EXPECT_EQ(told->text, "done");
  });
  EXPECT_EQ(ends, std::vector<int>(1));
}

}  // namespace
}  // namespace plimsoll
