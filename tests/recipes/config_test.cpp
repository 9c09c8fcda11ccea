// SPDX-License-Identifier: Apache-2.0
//
// Every key of every recipe is tried in every form a user can write it in; the tables of fields
// drive the tests, so a new key is covered the moment it exists.
#include "run/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "recipes/can_kd/config.h"
#include "recipes/cosir/config.h"
#include "run/sealed_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(add_recipe(describe_cosir()));
    ASSERT_TRUE(add_recipe(describe_can_kd()));
    folder_ = fs::temp_directory_path() /
              fmt::format("plimsoll-config-{}-{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }
  fs::path write_run(const std::string& text) const {
    EXPECT_TRUE(write_sealed(folder_ / "run.toml", text));
    return folder_ / "run.toml";
  }

  fs::path folder_;
};

template <class AnyRecipe>
class RecipeConfigTest : public ConfigTest {};
using Recipes = ::testing::Types<CosirSettings, CanKdSettings>;
TYPED_TEST_SUITE(RecipeConfigTest, Recipes);

/// A value of the field that is not its default, as the user would type it.
std::string other_value(const Field& field, const AnySettings& defaults) {
  switch (field.kind) {
    case FieldKind::kText:
      return "some \"quoted\" \\ place # from here";
    case FieldKind::kLimit:
      return "321MiB";
    case FieldKind::kBytes:
      return "77MiB";
    case FieldKind::kAuto:
      return "auto";
    case FieldKind::kInteger: {
      const auto now = std::stoll(defaults.text_of(field.name));
      return fmt::format("{}", static_cast<double>(now) < field.most ? now + 1 : now - 1);
    }
    case FieldKind::kReal:
      return "0.12500001";
    case FieldKind::kSwitch:
      return defaults.text_of(field.name) == "true" ? "false" : "true";
    case FieldKind::kWidths:
      return "7,65536,1";
    case FieldKind::kChoice: {
      const std::string choices = field.choices;
      return choices.substr(choices.rfind('|') + 1);
    }
  }
  return "";
}

/// The value as a literal of a JSON or TOML file.
std::string literal(const Field& field, const std::string& text) {
  const bool bare = field.kind == FieldKind::kInteger || field.kind == FieldKind::kReal ||
                    field.kind == FieldKind::kSwitch;
  if (bare) {
    return text;
  }
  std::string quoted{"\""};
  for (const char c : text) {
    quoted += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  }
  return quoted + '"';
}

template <class AnyRecipe>
AnyRecipe with(const Field& field, const std::string& text) {
  AnyRecipe settings;
  EXPECT_TRUE(settings.set(field.name, text, "--set"));
  return settings;
}

TYPED_TEST(RecipeConfigTest, EveryKeyHasItsOwnNameAndEveryFieldADefaultItWouldAccept) {
  const TypeParam defaults;
  const RecipeOptions& options = defaults.options();
  std::set<std::string> names;
  for (const Field& field : options.fields) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_GT(std::string(field.help).size(), 4U) << field.name;
    const auto text = [&] {
      std::string plain = defaults.literal(field.name);
      return plain.front() == '"' ? plain.substr(1, plain.size() - 2) : plain;
    }();
    TypeParam settings;
    EXPECT_TRUE(settings.set(field.name, text, "--set")) << field.name << " = " << text;
    EXPECT_EQ(settings.literal(field.name), defaults.literal(field.name));
  }
  for (const Preset& preset : options.presets) {
    TypeParam settings;
    const auto read = settings.read_file(preset.name);
    EXPECT_TRUE(read) << read.error().to_string();
    EXPECT_NE(settings.items(), defaults.items()) << preset.name;
  }
}

TYPED_TEST(RecipeConfigTest, EveryKeyReadsTheSameFromAFlagTomlAndJson) {
  const TypeParam defaults;
  const std::string recipe = defaults.options().recipe;
  for (const Field& field : defaults.options().fields) {
    const std::string text = other_value(field, defaults);
    const std::string expected = with<TypeParam>(field, text).literal(field.name);
    EXPECT_NE(expected, defaults.literal(field.name)) << field.name;
    const std::string value = literal(field, text);
    const std::vector<std::pair<std::string, std::string>> files{
        {"flat.toml", fmt::format("{} = {}\n", field.name, value)},
        {"table.toml", fmt::format("[{}]\n{} = {}\n", recipe, field.name, value)},
        {"named.toml", fmt::format("recipe = \"{}\"\n{} = {}\n", recipe, field.name, value)},
        {"flat.json", fmt::format("{{\"{}\": {}}}", field.name, value)},
        {"table.json", fmt::format("{{\"{}\": {{\"{}\": {}}}}}", recipe, field.name, value)}};
    for (const auto& [name, content] : files) {
      TypeParam settings;
      const auto read = settings.read_file(this->write(name, content));
      ASSERT_TRUE(read) << read.error().to_string();
      EXPECT_EQ(settings.literal(field.name), expected) << content;
      EXPECT_NE(settings.source_of(field.name).find(name), std::string::npos);
    }
  }
}

TYPED_TEST(RecipeConfigTest, RunTomlGivesBackEveryValueAndItsSource) {
  const TypeParam defaults;
  for (const Field& field : defaults.options().fields) {
    auto settings = with<TypeParam>(field, other_value(field, defaults));
    TypeParam again;
    const auto read = again.read_file(this->write_run(settings.to_toml()), true);
    ASSERT_TRUE(read) << read.error().to_string() << "\n" << settings.to_toml();
    EXPECT_EQ(again.items(), settings.items());
    EXPECT_EQ(again.to_toml(), settings.to_toml()) << field.name;
    EXPECT_EQ(again.source_of(field.name), "--set");
  }
}

TEST_F(ConfigTest, ARunSaysWhichRecipeItIsUnlessItIsTheFirst) {
  const std::string cosir = CosirSettings().to_toml();
  EXPECT_TRUE(
      cosir.starts_with("# Every option of this run and where it came from.\n[cosir]\n"
                        "data = \"\"                                 # from default\n"))
      << cosir.substr(0, 200);
  EXPECT_EQ(CosirSettings().identity().front().first, "epochs");
  write_run(cosir);
  EXPECT_EQ(recipe_of_run(folder_).value()->name, "cosir");
  const std::string can_kd = CanKdSettings().to_toml();
  EXPECT_NE(can_kd.find("\nrecipe = \"can-kd\"\n[can-kd]\n"), std::string::npos);
  const std::pair<std::string, std::string> recipe{"recipe", "\"can-kd\""};
  EXPECT_EQ(CanKdSettings().identity().front(), recipe);
  write_run(can_kd);
  EXPECT_EQ(recipe_of_run(folder_).value()->name, "can-kd");
}

TEST_F(ConfigTest, AnotherRecipesRunIsRefusedByName) {
  const auto run = write_run(CanKdSettings().to_toml());
  CosirSettings cosir;
  auto read = cosir.read_file(run, true);
  ASSERT_FALSE(read);
  EXPECT_NE(
      read.error().to_string().find("run.toml:2: this belongs to the recipe can-kd, not to cosir"),
      std::string::npos)
      << read.error().to_string();
  write_run(CosirSettings().to_toml());
  CanKdSettings can_kd;
  read = can_kd.read_file(run, true);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().to_string().find("belongs to the recipe cosir, not to can-kd"),
            std::string::npos)
      << read.error().to_string();
  EXPECT_EQ(can_kd.items(), CanKdSettings().items());
  write_run("recipe = \"tomorrow\"\n");
  const auto unknown = recipe_of_run(folder_);
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().to_string().find("'tomorrow'"), std::string::npos);
  EXPECT_EQ(recipe_of_run(folder_ / "nowhere").error().code, ErrorCode::kNotFound);
}

TEST_F(ConfigTest, RandomRealNumbersSurviveRunTomlToTheLastBit) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const double value = std::exp(std::uniform_real_distribution<>(-30, 6)(random));
    CosirSettings settings;
    ASSERT_TRUE(settings.set("lr", fmt::format("{}", value), "--set"));
    CosirSettings again;
    ASSERT_TRUE(again.read_file(write_run(settings.to_toml()), true));
    EXPECT_EQ(again.config().lr, value);
  }
}

TEST_F(ConfigTest, LaterSourcesWinAndAreRemembered) {
  CosirSettings settings;
  EXPECT_EQ(settings.source_of("epochs"), "default");
  ASSERT_TRUE(settings.read_file(write("c.toml", "# first\nepochs = 5\nseed = 9\n")));
  ASSERT_TRUE(settings.set("epochs", "6", "--epochs"));
  EXPECT_EQ(settings.config().epochs, 6);
  ASSERT_TRUE(settings.set_pair("epochs=7", "--set"));
  EXPECT_EQ(settings.config().epochs, 7);
  EXPECT_EQ(settings.source_of("epochs"), "--set");
  EXPECT_EQ(settings.source_of("seed"), (folder_ / "c.toml").string() + ":3");
}

TEST_F(ConfigTest, UnknownKeysNameTheFileTheLineAndTheNearestKey) {
  CosirSettings settings;
  const auto path = write("c.toml", "seed = 1\n\nbatchsize = 3\n");
  const auto read = settings.read_file(path);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kInvalidArgument);
  const std::string text = read.error().to_string();
  EXPECT_NE(text.find(path.string() + ":3: unknown key 'batchsize'; did you mean 'batch_size'?"),
            std::string::npos)
      << text;
  const auto set = settings.set_pair("epoch=3", "--set");
  ASSERT_FALSE(set);
  EXPECT_NE(set.error().to_string().find("--set: unknown key 'epoch'; did you mean 'epochs'?"),
            std::string::npos);
  const std::vector<std::string> words{"epochs", "seed"};
  EXPECT_EQ(nearest_word("zzzzzzzzzzzz", words), "");
}

TYPED_TEST(RecipeConfigTest, ValuesOutsideTheirRangeNameTheKeyAndWhatItAccepts) {
  const TypeParam defaults;
  for (const Field& field : defaults.options().fields) {
    std::vector<std::string> wrong;
    switch (field.kind) {
      case FieldKind::kText:
        wrong = {"two\nlines"};
        break;
      case FieldKind::kLimit:
        wrong = {"lots", "-3MiB", "5parsecs"};
        break;
      case FieldKind::kBytes:
        wrong = {"", "-2", "lots", "25%"};
        break;
      case FieldKind::kAuto:
        wrong = {"",
                 "automatic",
                 "1.5",
                 "0",
                 fmt::format("{}", static_cast<std::int64_t>(field.least) - 1),
                 "99999999999999999999"};
        break;
      case FieldKind::kInteger:
        wrong = {"",
                 "x",
                 "1.5",
                 fmt::format("{}", static_cast<std::int64_t>(field.least) - 1),
                 fmt::format("{}", static_cast<std::int64_t>(field.most) + 1),
                 "99999999999999999999"};
        break;
      case FieldKind::kReal:
        wrong = {"", "x", "nan", "inf", "1e300", "-0.5", "1,5"};
        break;
      case FieldKind::kWidths:
        wrong = {"", "5", "5,", ",5", "0,5", "65537,2", "5;6", "1.5,2", "1,2,3,4,5,6,7,8,9"};
        break;
      case FieldKind::kSwitch:
        wrong = {"", "yes", "1", "True"};
        break;
      case FieldKind::kChoice:
        wrong = {"", "nonsense", "auto|true"};
        break;
    }
    for (const auto& text : wrong) {
      TypeParam settings;
      const auto set = settings.set(field.name, text, "--set");
      ASSERT_FALSE(set) << field.name << " = " << text;
      EXPECT_EQ(set.error().code, ErrorCode::kInvalidArgument);
      EXPECT_NE(set.error().to_string().find(field.accepts()), std::string::npos);
      EXPECT_EQ(settings.literal(field.name), defaults.literal(field.name));
      EXPECT_EQ(settings.source_of(field.name), "default");
    }
  }
}

TEST_F(ConfigTest, FilesOfTheWrongShapeSayWhere) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"epochs = \"5\"\n", ":1: epochs must be a whole number from 1 to 1000000, without quotes"},
      {"epochs = 5.0\n", ":1: epochs must be a whole number"},
      {"\ndata = 5\n", ":2: data must be text"},
      {"epochs = [1]\n", ":1: 'epochs' is neither text"},
      {"[model]\ndim = 5\n", "'model' is neither text"},
      {"epochs = \n", ":1: "},
      {"epochs = 1\nepochs = 2\n", ":2: "}};
  for (const auto& [content, expected] : cases) {
    CosirSettings settings;
    const auto read = settings.read_file(write("c.toml", content));
    ASSERT_FALSE(read) << content;
    EXPECT_NE(read.error().to_string().find(expected), std::string::npos)
        << read.error().to_string();
  }
  CosirSettings settings;
  for (const char* content : {"{\"epochs\": }", "[1]", "", "{\"epochs\": null}"}) {
    const auto read = settings.read_file(write("c.json", content));
    ASSERT_FALSE(read) << content;
    EXPECT_NE(read.error().to_string().find("c.json"), std::string::npos);
  }
  EXPECT_FALSE(settings.read_file(write("c.yaml", "epochs: 1")));
  const auto missing = settings.read_file(folder_ / "missing.toml");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

TEST_F(ConfigTest, ResumptionKeepsTheSourcesOfWhatItDoesNotChange) {
  CosirSettings settings;
  const std::vector<std::pair<std::string, std::string>> free{{"memory_limit", "2GiB"},
                                                              {"loader_threads", "7"},
                                                              {"queue_bytes", "8MiB"},
                                                              {"cache_bytes", "9MiB"},
                                                              {"store_bytes", "10MiB"}};
  ASSERT_TRUE(settings.override_with(free, "resume --set"));
  EXPECT_EQ(settings.config().loader_threads, 7);
  EXPECT_EQ(settings.source_of("memory_limit"), "resume --set");
  const std::vector<std::pair<std::string, std::string>> same{{"seed", "0"}};
  EXPECT_TRUE(settings.override_with(same, "--set"));
  EXPECT_EQ(settings.source_of("seed"), "default");
  const std::vector<std::pair<std::string, std::string>> both{{"queue_bytes", "1MiB"},
                                                              {"seed", "1"}};
  EXPECT_FALSE(settings.override_with(both, "--set"));
  EXPECT_EQ(settings.config().queue_bytes, 8 << 20) << "half of a refused resumption was kept";
}

TYPED_TEST(RecipeConfigTest, ResumptionChangesFreeKeysAndRefusesIdentityByName) {
  const TypeParam before;
  for (const Field& field : before.options().fields) {
    const std::vector<std::pair<std::string, std::string>> one{
        {field.name, other_value(field, before)}};
    TypeParam after;
    const auto changed = after.override_with(one, "--set");
    const bool fixed = field.role == FieldRole::kIdentity || std::string(field.name) == "out";
    EXPECT_EQ(changed.has_value(), !fixed) << field.name;
    if (fixed) {
      EXPECT_NE(changed.error().to_string().find(field.name), std::string::npos);
      EXPECT_EQ(after.items(), before.items());
    }
  }
}

TYPED_TEST(RecipeConfigTest, ResolvingNeedsPlacesAndFixesTheThreads) {
  TypeParam settings;
  EXPECT_FALSE(settings.resolve());
  ASSERT_TRUE(settings.set("data", "d", "--data"));
  EXPECT_FALSE(settings.resolve());
  ASSERT_TRUE(settings.set("out", "o", "--out"));
  ASSERT_TRUE(settings.resolve());
  EXPECT_GE(settings.config().compute_threads, 1);
  const std::string once = settings.to_toml();
  ASSERT_TRUE(settings.resolve());
  EXPECT_EQ(settings.to_toml(), once);
}

}  // namespace
}  // namespace plimsoll
