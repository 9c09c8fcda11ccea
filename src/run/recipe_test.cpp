// SPDX-License-Identifier: Apache-2.0
#include "run/recipe.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace plimsoll {
namespace {

Recipe described(std::string name, std::string about = "") {
  return {.name = std::move(name), .about = std::move(about), .settings = [] {
            return std::unique_ptr<AnySettings>();
          }};
}

TEST(RecipesTest, AreFoundByNameInTheOrderTheyCame) {
  ASSERT_TRUE(add_recipe(described("first")));
  ASSERT_TRUE(add_recipe(described("second", "old")));
  ASSERT_TRUE(add_recipe(described("second", "new")));
  ASSERT_EQ(recipes().size(), 2U);
  EXPECT_EQ(recipes()[0].name, "first");
  EXPECT_EQ(find_recipe("second")->about, "new");
  EXPECT_EQ(find_recipe("third"), nullptr);
  const auto unknown = recipe_named("third");
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().to_string().find("there is no recipe \"third\"; there are \"first\", "
                                             "\"second\""),
            std::string::npos)
      << unknown.error().to_string();
}

TEST(RecipesTest, WhatARecipeLacksIsNamed) {
  EXPECT_EQ(work_missing(described("first"), "plan").to_string(), "the recipe first has no plan");
}

TEST(RecipesTest, NamesAreWordsOfACommandLine) {
  for (const char* name : {"", "-x", "Toy", "to y", "toy.", "töy"}) {
    const auto added = add_recipe(described(name));
    ASSERT_FALSE(added) << name;
    EXPECT_EQ(added.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_FALSE(add_recipe({.name = "bare"}));
}

TEST(RecipesTest, ThereAreSoManyAndNoMore) {
  while (recipes().size() < kRecipesMax) {
    ASSERT_TRUE(add_recipe(described("recipe-" + std::to_string(recipes().size()))));
  }
  const Recipe* first = recipes().data();
  const auto more = add_recipe(described("one-more"));
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().code, ErrorCode::kOverBudget);
  EXPECT_EQ(recipes().data(), first) << "recipes moved";
}

}  // namespace
}  // namespace plimsoll
