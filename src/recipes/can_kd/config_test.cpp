// SPDX-License-Identifier: Apache-2.0
//
// Presets and the original's spellings of `can-kd`, and that its page of documentation lists every
// key as it is. What holds for the keys of every recipe is tested in run/config_test.cpp.
#include "recipes/can_kd/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace plimsoll {
namespace {

namespace fs = std::filesystem;

/// Settings of one source: each key and text as after `--`.
Result<CanKdSettings> given(std::vector<std::pair<std::string, std::string>> keys) {
  CanKdSettings settings;
  std::vector<GivenKey> all;
  for (auto& [key, text] : keys) {
    all.push_back({key, text, "--" + key});
  }
  if (auto set = settings.set_all(std::move(all)); !set) {
    return tl::unexpected(std::move(set).error());
  }
  return settings;
}

CanKdSettings read_json(const std::string& text) {
  const auto path = fs::temp_directory_path() / fmt::format("can-kd-{}.json", ::getpid());
  std::ofstream(path) << text;
  CanKdSettings settings;
  const auto read = settings.read_file(path);
  fs::remove(path);
  EXPECT_TRUE(read) << read.error().to_string();
  return settings;
}

bool same(const CanKdSizes& a, const CanKdSizes& b) {
  return a.vgae_hidden_dims == b.vgae_hidden_dims && a.vgae_heads == b.vgae_heads &&
         a.vgae_embedding_dim == b.vgae_embedding_dim && a.gat_hidden == b.gat_hidden &&
         a.gat_layers == b.gat_layers && a.gat_heads == b.gat_heads &&
         a.gat_embedding_dim == b.gat_embedding_dim && a.gat_fc_layers == b.gat_fc_layers;
}

std::string refusal(std::vector<std::pair<std::string, std::string>> keys) {
  const auto settings = given(std::move(keys));
  return settings ? "accepted" : settings.error().to_string();
}

TEST(CanKdConfigTest, DefaultsAreTheOriginalsSizesAndTraining) {
  const CanKdConfig config;
  EXPECT_TRUE(same(config.teacher, {"1024,512,96", 4, 64, 64, 5, 8, 32, 3}));
  EXPECT_TRUE(same(config.student, {"80,40,16", 1, 4, 24, 2, 4, 8, 1}));
  EXPECT_EQ(config.max_epochs, 300);
  EXPECT_EQ(config.kd_temperature, 4.0);
  EXPECT_EQ(config.seed, 42);
}

TEST(CanKdConfigTest, WordsOfAPresetChooseStageSizeAndArchitecture) {
  const std::vector<std::pair<std::string, std::string>> stages{
      {"vgae", "autoencoder"}, {"gat", "curriculum"}, {"fusion", "fusion"}, {"dqn", "fusion"}};
  for (const auto& [word, stage] : stages) {
    for (const char* size : {"teacher", "student", "both"}) {
      const auto settings = given({{"preset", fmt::format("{},{}", word, size)}}).value();
      EXPECT_EQ(settings.config().stage, stage);
      EXPECT_EQ(settings.config().model_size, size);
      EXPECT_EQ(settings.source_of("stage"), "preset " + word);
      EXPECT_TRUE(same(settings.config().teacher, CanKdConfig{}.teacher));
    }
  }
}

TEST(CanKdConfigTest, SmallLargeAndOriginalSetTheKeysTheyName) {
  const auto small = given({{"preset", "small"}}).value();
  EXPECT_TRUE(same(small.config().teacher, {"128,64,24", 2, 16, 24, 3, 4, 8, 2}));
  EXPECT_TRUE(same(small.config().student, {"16,8,4", 1, 2, 8, 2, 3, 3, 1}));
  EXPECT_EQ(small.config().max_epochs, 100);
  EXPECT_EQ(small.config().patience, 25);
  EXPECT_EQ(small.config().student_gat_patience, 25);
  EXPECT_EQ(small.config().batch_size, 256);
  EXPECT_EQ(small.config().stage, "all");
  EXPECT_EQ(small.source_of("teacher_gat_heads"), "preset small");
  EXPECT_EQ(small.source_of("seed"), "default");
  EXPECT_NE(small.to_toml().find("# from preset small"), std::string::npos);

  const auto large = given({{"preset", "large,gat"}}).value();
  EXPECT_TRUE(same(large.config().teacher, {"480,240,48", 4, 32, 48, 3, 8, 16, 3}));
  EXPECT_TRUE(same(large.config().student, CanKdConfig{}.student));

  CanKdSettings back = small;
  ASSERT_TRUE(back.set("preset", "original", "--preset"));
  EXPECT_EQ(back.items(), CanKdSettings().items());
  EXPECT_EQ(back.source_of("teacher_gat_heads"), "preset original");
}

TEST(CanKdConfigTest, OtherKeysOfASourceWinOverItsPresetAndLaterSourcesOverAll) {
  const auto one = given({{"teacher_gat_heads", "3"}, {"preset", "small"}, {"seed", "7"}}).value();
  EXPECT_EQ(one.config().teacher.gat_heads, 3);
  EXPECT_EQ(one.source_of("teacher_gat_heads"), "--teacher_gat_heads");
  EXPECT_EQ(one.config().student.gat_heads, 3);
  EXPECT_EQ(one.config().seed, 7);
  CanKdSettings file = read_json(R"({"preset": ["small", "student"], "max_epochs": 30})");
  EXPECT_EQ(file.config().max_epochs, 30);
  EXPECT_EQ(file.config().model_size, "student");
  EXPECT_EQ(file.config().teacher.gat_heads, 4);
  ASSERT_TRUE(file.set_all({{"preset", "small", "--preset"}}));
  EXPECT_EQ(file.config().max_epochs, 100);
}

TEST(CanKdConfigTest, WrongPresetsNameTheNearestWordOrTheContradiction) {
  EXPECT_NE(refusal({{"preset", "gat,studnet"}}).find("did you mean 'student'?"),
            std::string::npos);
  EXPECT_NE(refusal({{"preset", "smal"}}).find("did you mean 'small'?"), std::string::npos);
  EXPECT_NE(refusal({{"preset", "everything"}}).find("words of vgae, gat, "), std::string::npos);
  EXPECT_NE(refusal({{"preset", ""}}).find("preset must be words of"), std::string::npos);
  EXPECT_NE(refusal({{"preset", "vgae,gat"}}).find("'vgae' and 'gat' exclude each other"),
            std::string::npos);
  EXPECT_NE(refusal({{"preset", "small,large"}}).find("exclude each other"), std::string::npos);
  EXPECT_NE(refusal({{"prest", "small"}}).find("did you mean 'preset'?"), std::string::npos);
  EXPECT_NE(refusal({{"model_size", "large"}}).find("both, teacher, student"), std::string::npos);
}

TEST(CanKdConfigTest, ArchitectureKeysWithoutASizeMeanTheOneThatModelSizeNames) {
  for (const char* size : {"both", "teacher", "student"}) {
    // The size comes last on purpose: the order within a source does not matter.
    const auto settings = given({{"gat_hidden", "11"},
                                 {"gat_layers", "3"},
                                 {"gat_heads", "5"},
                                 {"gat_embedding_dim", "13"},
                                 {"gat_fc_layers", "4"},
                                 {"vgae_latent_dim", "17"},
                                 {"vgae_hidden_dims", "90, 45, 9"},
                                 {"vgae_heads", "2"},
                                 {"vgae_embedding_dim", "6"},
                                 {"model_size", size}})
                              .value();
    const CanKdConfig defaults;
    const CanKdSizes set{"90,45,17", 2, 6, 11, 3, 5, 13, 4};
    const std::string word = size;
    EXPECT_TRUE(same(settings.config().teacher, word == "student" ? defaults.teacher : set));
    EXPECT_TRUE(same(settings.config().student, word == "teacher" ? defaults.student : set));
  }
  const auto own = given({{"student_gat_heads", "7"}, {"gat_heads", "5"}}).value();
  EXPECT_EQ(own.config().student.gat_heads, 7);
  EXPECT_EQ(own.config().teacher.gat_heads, 5);
  EXPECT_NE(refusal({{"gat_heads", "0"}}).find("gat_heads must be a whole number from 1"),
            std::string::npos);
  EXPECT_NE(refusal({{"vgae_hidden_dims", "90"}}).find("2 to 8 whole numbers"), std::string::npos);
}

TEST(CanKdConfigTest, SpellingsOfTheOriginalSetTheKeysTheyMean) {
  const auto settings = given({{"use_kd", "true"},
                               {"teacher_path", "teacher.pt"},
                               {"offload_teacher_to_cpu", "true"},
                               {"gradient_checkpointing", "true"},
                               {"precision", "16-mixed"},
                               {"optimize_batch_size", "true"},
                               {"batch_size", "512"},
                               {"gat_lr", "0.25"},
                               {"lr", "0.5"},
                               {"dqn_hidden", "576"},
                               {"dqn_gamma", "0.99"},
                               {"dqn_epsilon", "0.5"},
                               {"dqn_epsilon_decay", "0.75"},
                               {"dqn_min_epsilon", "0.125"},
                               {"dqn_buffer_size", "777"},
                               {"dqn_batch_size", "33"},
                               {"dqn_target_update", "44"}})
                            .value();
  const CanKdConfig& config = settings.config();
  EXPECT_TRUE(config.use_kd && config.offload_teacher_to_cpu && config.gradient_checkpointing);
  EXPECT_EQ(config.teacher_path, "teacher.pt");
  EXPECT_EQ(config.precision, "16-mixed");
  EXPECT_EQ(config.batch_size, 0) << "auto, whatever the number beside it";
  EXPECT_EQ(config.vgae_lr, 0.5);
  EXPECT_EQ(config.gat_lr, 0.25) << "the key of one model wins over lr";
  EXPECT_EQ(config.fusion_lr, 0.5);
  EXPECT_EQ(settings.source_of("vgae_lr"), "--lr");
  EXPECT_EQ(config.fusion_hidden, 576);
  EXPECT_EQ(config.fusion_gamma, 0.99);
  EXPECT_EQ(config.fusion_epsilon, 0.5);
  EXPECT_EQ(config.fusion_epsilon_decay, 0.75);
  EXPECT_EQ(config.fusion_epsilon_min, 0.125);
  EXPECT_EQ(config.fusion_replay, 777);
  EXPECT_EQ(config.fusion_batch, 33);
  EXPECT_EQ(config.fusion_target_update, 44);
  EXPECT_EQ(given({{"optimize_batch_size", "false"}}).value().config().batch_size, 4096);
  EXPECT_EQ(given({{"model_type", "dqn"}, {"scale", "small"}}).value().config().stage, "fusion");
  EXPECT_EQ(given({{"scale", "large"}}).value().config().model_size, "teacher");
  EXPECT_NE(refusal({{"lr", "fast"}}).find("lr must be a number from 0 to 1000, not 'fast'"),
            std::string::npos);
}

TEST(CanKdConfigTest, KeysThatMeanNothingHereAreIgnoredWithAReason) {
  const CanKdSettings defaults;
  for (const IgnoredKey& ignored : defaults.options().ignored) {
    CanKdSettings settings;
    ASSERT_TRUE(settings.set(ignored.name, "whatever", "--set")) << ignored.name;
    ASSERT_TRUE(settings.set(ignored.name, "whatever", "--set"));
    EXPECT_EQ(settings.items(), defaults.items()) << ignored.name;
    ASSERT_EQ(settings.notes().size(), 1U) << ignored.name;
    EXPECT_EQ(settings.notes().front(),
              fmt::format("ignored: {} = whatever: {}", ignored.name, ignored.reason));
  }
}

// A file as the original writes it: every field of its flat configuration, with another value where
// the value means something here.
TEST(CanKdConfigTest, AFlatConfigurationOfTheOriginalLoads) {
  const CanKdSettings settings = read_json(R"({
    "dataset": "set_01", "modality": "automotive", "model_size": "student", "seed": 43,
    "lr": 0.005, "max_epochs": 31, "batch_size": 4096, "patience": 32, "weight_decay": 0.0002,
    "gradient_clip": 2.0, "precision": "16-mixed", "use_scheduler": true,
    "scheduler_type": "step", "scheduler_t_max": -1, "scheduler_step_size": 51,
    "scheduler_gamma": 0.2, "gradient_checkpointing": false, "use_teacher_cache": false,
    "clear_cache_every_n": 101, "offload_teacher_to_cpu": true, "optimize_batch_size": true,
    "safety_factor": 0.5, "batch_size_mode": "binsearch", "max_batch_size_trials": 10,
    "accumulate_grad_batches": 2, "find_unused_parameters": false, "save_top_k": 1,
    "monitor_metric": "val_loss", "monitor_mode": "min", "log_every_n_steps": 51,
    "test_every_n_epochs": 6, "deterministic": false, "cudnn_benchmark": true,
    "gat_hidden": 25, "gat_layers": 3, "gat_heads": 5, "gat_dropout": 0.1,
    "gat_embedding_dim": 9, "vgae_hidden_dims": [81, 41, 17], "vgae_latent_dim": 17,
    "vgae_heads": 2, "vgae_embedding_dim": 5, "vgae_dropout": 0.25, "dqn_hidden": 160,
    "dqn_layers": 2, "dqn_gamma": 0.99, "dqn_epsilon": 0.1, "dqn_epsilon_decay": 0.99,
    "dqn_min_epsilon": 0.02, "dqn_buffer_size": 50000, "dqn_batch_size": 64,
    "dqn_target_update": 50, "use_kd": true, "teacher_path": "", "kd_temperature": 3.0,
    "kd_alpha": 0.6, "kd_vgae_latent_weight": 0.4, "kd_vgae_recon_weight": 0.3,
    "log_teacher_student_comparison": true, "curriculum_start_ratio": 2.0,
    "curriculum_end_ratio": 11.0, "difficulty_percentile": 70.0, "use_vgae_mining": false,
    "difficulty_cache_update": 9, "curriculum_memory_multiplier": 1.0, "fusion_episodes": 400,
    "fusion_max_samples": 150000, "max_val_samples": 30000, "episode_sample_size": 20000,
    "training_step_interval": 32, "gpu_training_steps": 16, "fusion_lr": 0.002,
    "alpha_steps": 21, "run_test": false, "experiment_root": "experimentruns",
    "device": "cuda", "num_workers": 8, "mp_start_method": "spawn"})");
  const CanKdConfig& config = settings.config();
  EXPECT_TRUE(same(config.student, {"81,41,17", 2, 5, 25, 3, 5, 9, 1}));
  EXPECT_TRUE(same(config.teacher, CanKdConfig{}.teacher));
  EXPECT_EQ(config.model_size, "student");
  EXPECT_EQ(config.batch_size, 0);
  EXPECT_EQ(config.vgae_lr, 0.005);
  EXPECT_EQ(config.fusion_lr, 0.002);
  EXPECT_EQ(config.scheduler_t_max, -1);
  EXPECT_EQ(config.fusion_replay, 50000);
  EXPECT_FALSE(config.use_vgae_mining || config.run_test || config.gradient_checkpointing);
  EXPECT_EQ(settings.notes().size(), 23U);
  for (const char* key : {"max_epochs",
                          "patience",
                          "weight_decay",
                          "gradient_clip",
                          "kd_alpha",
                          "use_scheduler",
                          "scheduler_type",
                          "scheduler_step_size",
                          "seed",
                          "scheduler_gamma",
                          "use_teacher_cache",
                          "clear_cache_every_n",
                          "offload_teacher_to_cpu",
                          "accumulate_grad_batches",
                          "gat_dropout",
                          "log_every_n_steps",
                          "test_every_n_epochs",
                          "vgae_dropout",
                          "precision",
                          "kd_temperature",
                          "kd_vgae_latent_weight",
                          "kd_vgae_recon_weight",
                          "curriculum_start_ratio",
                          "curriculum_end_ratio",
                          "fusion_episodes",
                          "difficulty_percentile",
                          "difficulty_cache_update"}) {
    EXPECT_NE(settings.literal(key), CanKdSettings().literal(key)) << key;
  }
}

TEST(CanKdConfigTest, ANestedConfigurationOfTheOriginalLoads) {
  const CanKdSettings settings = read_json(R"({
    "dataset": "hcrl_ch", "model_type": "gat", "scale": "small", "seed": 44,
    "vgae": {"hidden_dims": [80, 40, 16], "latent_dim": 15, "dropout": 0.1},
    "gat": {"hidden": 26, "fc_layers": 2, "embedding_dim": 8},
    "dqn": {"hidden": 161, "min_epsilon": 0.03, "layers": 2},
    "training": {"lr": 0.004, "max_epochs": 33, "batch_size": 100, "memory_estimation": "static"},
    "auxiliaries": [{"type": "kd", "model_path": "t.pt", "alpha": 0.2, "temperature": 5.0,
                     "vgae_latent_weight": 0.1}],
    "fusion": {"episodes": 401, "lr": 0.003, "alpha_steps": 21, "max_samples": 9},
    "preprocessing": {"window_size": 100}, "run_test": true})");
  const CanKdConfig& config = settings.config();
  EXPECT_EQ(config.stage, "curriculum");
  EXPECT_EQ(config.model_size, "student");
  EXPECT_TRUE(same(config.student, {"80,40,15", 1, 4, 26, 2, 4, 8, 2}));
  EXPECT_EQ(config.vgae_dropout, 0.1);
  EXPECT_EQ(config.fusion_hidden, 161);
  EXPECT_EQ(config.fusion_epsilon_min, 0.03);
  EXPECT_EQ(config.gat_lr, 0.004);
  EXPECT_EQ(config.fusion_lr, 0.003);
  EXPECT_EQ(config.max_epochs, 33);
  EXPECT_EQ(config.batch_size, 100);
  EXPECT_TRUE(config.use_kd);
  EXPECT_EQ(config.teacher_path, "t.pt");
  EXPECT_EQ(config.kd_alpha, 0.2);
  EXPECT_EQ(config.kd_temperature, 5.0);
  EXPECT_EQ(config.kd_vgae_latent_weight, 0.1);
  EXPECT_EQ(config.fusion_episodes, 401);
  const CanKdSettings nobody = read_json(R"({"auxiliaries": [], "teacher_path": null})");
  EXPECT_EQ(nobody.items(), CanKdSettings().items());
}

TEST(CanKdConfigTest, AResumptionMayUseSpellingsOfWhatMayChange) {
  CanKdSettings settings;
  const std::vector<std::pair<std::string, std::string>> free{{"preset", "dqn,student"},
                                                              {"num_workers", "4"}};
  ASSERT_TRUE(settings.override_with(free, "resume"));
  EXPECT_EQ(settings.config().stage, "fusion");
  const std::vector<std::pair<std::string, std::string>> fixed{{"lr", "0.5"}};
  const auto refused = settings.override_with(fixed, "resume");
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().to_string().find("vgae_lr is part of this run's identity"),
            std::string::npos);
}

std::string join(std::string_view words, std::string_view between) {
  std::string joined;
  for (const char c : words) {
    joined += c == ' ' ? std::string(between) : std::string(1, c);
  }
  return joined;
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
  text += "\n| shorthand | sets | accepts |\n|---|---|---|\n";
  for (const Shorthand& shorthand : options.shorthands) {
    text += fmt::format("| `{}` | {} | {} |\n", shorthand.form.name,
                        *shorthand.sets == '\0' ? shorthand.form.help
                                                : fmt::format("`{}`", join(shorthand.sets, "`, `")),
                        shorthand.form.accepts());
  }
  text += "\n| accepted, ignored | because |\n|---|---|\n";
  for (const IgnoredKey& ignored : options.ignored) {
    text += fmt::format("| `{}` | {} |\n", ignored.name, ignored.reason);
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
