// SPDX-License-Identifier: Apache-2.0
//
// Defaults and presets of `can-kd`, and that its page of documentation lists every key as it is.
// What holds for the keys of every recipe is tested in tests/recipes/config_test.cpp.
#include "recipes/can_kd/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

bool same(const CanKdSizes& a, const CanKdSizes& b) {
  return a.vgae_hidden_dims == b.vgae_hidden_dims && a.vgae_heads == b.vgae_heads &&
         a.vgae_embedding_dim == b.vgae_embedding_dim && a.gat_hidden == b.gat_hidden &&
         a.gat_layers == b.gat_layers && a.gat_heads == b.gat_heads &&
         a.gat_embedding_dim == b.gat_embedding_dim && a.gat_fc_layers == b.gat_fc_layers;
}

TEST(CanKdConfigTest, DefaultsAreTheOriginalsSizesAndTraining) {
  const CanKdConfig config;
  EXPECT_TRUE(same(config.teacher, {"1024,512,96", 4, 64, 64, 5, 8, 32, 3}));
  EXPECT_TRUE(same(config.student, {"80,40,16", 1, 4, 24, 2, 4, 8, 1}));
  EXPECT_EQ(config.max_epochs, 300);
  EXPECT_EQ(config.kd_temperature, 4.0);
  EXPECT_EQ(config.seed, 42);
}

TEST(CanKdConfigTest, SmallAndLargeSetTheKeysTheyName) {
  CanKdSettings small;
  ASSERT_TRUE(small.read_file("small"));
  EXPECT_TRUE(same(small.config().teacher, {"128,64,24", 2, 16, 24, 3, 4, 8, 2}));
  EXPECT_TRUE(same(small.config().student, {"16,8,4", 1, 2, 8, 2, 3, 3, 1}));
  EXPECT_EQ(small.config().max_epochs, 100);
  EXPECT_EQ(small.config().patience, 25);
  EXPECT_EQ(small.config().student_gat_patience, 25);
  EXPECT_EQ(small.config().batch_size, 256);
  EXPECT_EQ(small.config().stage, "all");
  EXPECT_EQ(small.source_of("teacher_gat_heads"), "preset small:9");
  EXPECT_EQ(small.source_of("seed"), "default");
  EXPECT_NE(small.to_toml().find("# from preset small:"), std::string::npos);

  CanKdSettings large;
  ASSERT_TRUE(large.read_file("large"));
  EXPECT_TRUE(same(large.config().teacher, {"480,240,48", 4, 32, 48, 3, 8, 16, 3}));
  EXPECT_TRUE(same(large.config().student, CanKdConfig{}.student));

  const auto wrong = large.read_file("smal");
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.error().to_string().find("smal: not a configuration file by its name, and no "
                                           "preset of can-kd: small, large"),
            std::string::npos)
      << wrong.error().to_string();
}

/// The tables of docs/recipes/can-kd.md.
std::string tables() {
  const CanKdSettings defaults;
  const RecipeOptions& options = defaults.options();
  std::string text =
      "| key | default | what it does | accepts | may change |\n|---|---|---|---|---|\n";
  for (const Field& field : options.fields) {
    std::string preset = defaults.text_of(field.name);
    preset.erase(std::remove(preset.begin(), preset.end(), '"'), preset.end());
    text += fmt::format(
        "| `{}` | {} | {} | {} | {} |\n", field.name,
        preset.empty() ? "" : fmt::format("`{}`", preset), field.help, field.accepts(),
        field.role == FieldRole::kIdentity || std::string_view(field.name) == "out" ? "no" : "yes");
  }
  return text;
}

// With PLIMSOLL_REFRESH_DOCS=1 the page is written anew instead.
TEST(CanKdConfigTest, ThePageOfDocumentationListsEveryKeyAsItIs) {
  const char* root = std::getenv("PLIMSOLL_SOURCE_DIR");
  ASSERT_NE(root, nullptr) << "run through ctest, or name the source folder";
  const fs::path path = fs::path(root) / "docs" / "recipes" / "can-kd.md";
  std::stringstream page;
  page << std::ifstream(path).rdbuf();
  std::string text = page.str();
  const std::string begin = "<!-- options -->\n";
  const std::string end = "<!-- end of options -->\n";
  const auto from = text.find(begin) + begin.size();
  const auto to = text.find(end);
  ASSERT_NE(to, std::string::npos) << path;
  if (std::getenv("PLIMSOLL_REFRESH_DOCS") != nullptr) {
    text.replace(from, to - from, tables());
    std::ofstream(path) << text;
    return;
  }
  EXPECT_EQ(text.substr(from, to - from), tables())
      << "run this test once with PLIMSOLL_REFRESH_DOCS=1";
}

}  // namespace
}  // namespace plimsoll
