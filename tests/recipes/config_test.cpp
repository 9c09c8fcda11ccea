// SPDX-License-Identifier: Apache-2.0
//
// Every key is tried in every form a user can write it in; tables of fields drive the tests. They
// are of two recipes: the first, which run.toml does not name, and another. Both together have
// options of every kind.
#include "run/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "run/field_table.h"
#include "run/recipe.h"
#include "run/sealed_file.h"

namespace plimsoll {

struct FirstConfig : RunConfig {
  std::int64_t epochs{30};
  std::int64_t batch_size{2048};
  double lr{1e-5};
  std::string label_init{"normal"};
  std::int64_t queue_bytes{0};
  std::int64_t store_bytes{0};
  std::int64_t cache_bytes{0};
  std::int64_t loader_threads{2};
};

struct OtherSizes {
  std::string hidden_dims{"80,40,16"};
  std::int64_t heads{4};
};

struct OtherConfig : RunConfig {
  std::string stage{"all"};
  OtherSizes teacher{};
  std::int64_t max_epochs{300};
  double dropout{0.2};
  bool use_kd{true};
};

namespace {

constexpr auto kIdentity = FieldRole::kIdentity;
constexpr auto kFree = FieldRole::kFree;
using First = FirstConfig;
using Other = OtherConfig;

template <class Config>
std::vector<Field> with_common(std::initializer_list<Field> own) {
  using F = FieldTable<Config>;
  std::vector<Field> fields{F::data("Data to train on"),
                            F::out(),
                            F::memory_limit(),
                            F::disk_limit(),
                            F::seed(),
                            F::checkpoint_every_n_steps(),
                            F::foreign_bytes(),
                            F::compute_threads(kIdentity, "Number of threads that compute")};
  fields.insert(fields.end(), own);
  return fields;
}

const std::vector<Field>& first_fields() {
  using F = FieldTable<First>;
  static const std::vector<Field> fields = with_common<First>({
      F::whole<&First::epochs>("epochs", kIdentity, 1, 1e6, "Number of passes over the data"),
      F::whole_or_auto<&First::batch_size>("batch_size", 2, 1 << 20, "Batch size, in rows"),
      F::real<&First::lr>("lr", 0, 1e3, "Learning rate of the model"),
      F::choice<&First::label_init>("label_init", "normal|zeros|uniform", "Initial values"),
      F::bytes<&First::queue_bytes>("queue_bytes", "Memory of the queue"),
      F::bytes<&First::store_bytes>("store_bytes", "Memory of the rows"),
      F::bytes<&First::cache_bytes>("cache_bytes", "Memory of the features"),
      F::whole<&First::loader_threads>("loader_threads", kFree, 1, 256, "Number of threads"),
      F::tensorboard(),
  });
  return fields;
}

const std::vector<Field>& other_fields() {
  using F = FieldTable<Other>;
  static const std::vector<Field> fields = with_common<Other>({
      F::choice<&Other::stage>("stage", "all|normal|fusion", "Stage of training", kFree),
      F::widths<&Other::teacher, &OtherSizes::hidden_dims>("teacher_hidden_dims", 1, 65536,
                                                           "Widths of the layers"),
      F::whole<&Other::teacher, &OtherSizes::heads>("teacher_heads", kIdentity, 1, 256,
                                                    "Attention heads"),
      F::whole<&Other::max_epochs>("max_epochs", kIdentity, 1, 1e6, "Most epochs of a stage"),
      F::real<&Other::dropout>("dropout", 0, 0.99, "Dropout rate of the model"),
      F::on_off<&Other::use_kd>("use_kd", kIdentity, "Whether a teacher is asked"),
      F::keep_checkpoints(),
      F::cleanup_every_n_steps(),
  });
  return fields;
}

constexpr std::array kPresets{Preset{"small", "max_epochs = 2\nteacher_heads = 3\n"}};

}  // namespace

template <>
const RecipeOptions& recipe_options<FirstConfig>() noexcept {
  static const RecipeOptions options{.recipe = kFirstRecipe,
                                     .fields = first_fields(),
                                     .data_advice = "name it with --data DIR",
                                     .keys_advice = "its help lists every key"};
  return options;
}

template <>
const RecipeOptions& recipe_options<OtherConfig>() noexcept {
  static const RecipeOptions options{.recipe = "other",
                                     .fields = other_fields(),
                                     .data_advice = "name it with --data DIR",
                                     .keys_advice = "its help lists every key",
                                     .presets = kPresets};
  return options;
}

namespace {

namespace fs = std::filesystem;

using FirstSettings = Settings<FirstConfig>;
using OtherSettings = Settings<OtherConfig>;

template <class Any>
Recipe recipe_of(const char* name) {
  return {.name = name, .settings = [] { return std::make_unique<Any>(); }};
}

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(add_recipe(recipe_of<FirstSettings>(kFirstRecipe)));
    ASSERT_TRUE(add_recipe(recipe_of<OtherSettings>("other")));
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
using Recipes = ::testing::Types<FirstSettings, OtherSettings>;
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
  const std::string first = FirstSettings().to_toml();
  EXPECT_TRUE(
      first.starts_with("# Every option of this run and where it came from.\n[cosir]\n"
                        "data = \"\"                                 # from default\n"))
      << first.substr(0, 200);
  EXPECT_EQ(FirstSettings().identity().front().first, "seed");
  write_run(first);
  EXPECT_EQ(recipe_of_run(folder_).value()->name, "cosir");
  const std::string other = OtherSettings().to_toml();
  EXPECT_NE(other.find("\nrecipe = \"other\"\n[other]\n"), std::string::npos);
  const std::pair<std::string, std::string> recipe{"recipe", "\"other\""};
  EXPECT_EQ(OtherSettings().identity().front(), recipe);
  write_run(other);
  EXPECT_EQ(recipe_of_run(folder_).value()->name, "other");
}

TEST_F(ConfigTest, AnotherRecipesRunIsRefusedByName) {
  const auto run = write_run(OtherSettings().to_toml());
  FirstSettings first;
  auto read = first.read_file(run, true);
  ASSERT_FALSE(read);
  EXPECT_NE(
      read.error().to_string().find("run.toml:2: this belongs to the recipe other, not to cosir"),
      std::string::npos)
      << read.error().to_string();
  write_run(FirstSettings().to_toml());
  OtherSettings other;
  read = other.read_file(run, true);
  ASSERT_FALSE(read);
  EXPECT_NE(read.error().to_string().find("belongs to the recipe cosir, not to other"),
            std::string::npos)
      << read.error().to_string();
  EXPECT_EQ(other.items(), OtherSettings().items());
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
    FirstSettings settings;
    ASSERT_TRUE(settings.set("lr", fmt::format("{}", value), "--set"));
    FirstSettings again;
    ASSERT_TRUE(again.read_file(write_run(settings.to_toml()), true));
    EXPECT_EQ(again.config().lr, value);
  }
}

TEST_F(ConfigTest, LaterSourcesWinAndAreRemembered) {
  FirstSettings settings;
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
  FirstSettings settings;
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
    FirstSettings settings;
    const auto read = settings.read_file(write("c.toml", content));
    ASSERT_FALSE(read) << content;
    EXPECT_NE(read.error().to_string().find(expected), std::string::npos)
        << read.error().to_string();
  }
  FirstSettings settings;
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
  FirstSettings settings;
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
