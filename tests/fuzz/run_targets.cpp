// SPDX-License-Identifier: Apache-2.0
//
// The manifest of a run: whatever it holds, it is refused as damaged, or names one checkpoint
// twice. Its looks and how its command ended: whatever they hold, there is an answer.
#include <system_error>

#include <unistd.h>

#include <fmt/format.h>

#include "run/run_folder.h"
#include "run/sealed_file.h"
#include "run/why.h"
#include "tests/fuzz/table.h"
#include "tests/fuzz/target.h"

namespace plimsoll::fuzz {
namespace {

// A run with two checkpoints, the newer one published.
class Run {
 public:
  static const Run& get() {
    static const Run kMade;
    return kMade;
  }
  [[nodiscard]] const RunFolder& folder() const { return folder_; }
  [[nodiscard]] fs::path manifest() const {
    return folder_.root() / "checkpoints" / "manifest.json";
  }

 private:
  Run() {
    for (const std::int64_t step : {70, 12'000'000}) {
      fs::create_directories(folder_.checkpoint_path(step));
      folder_.publish(step, 2).or_throw();
    }
  }
  ~Run() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  fs::path root_ = [] {
    std::string pattern = (fs::temp_directory_path() / "plimsoll-fuzz-XXXXXX").string();
    return fs::path(::mkdtemp(pattern.data()));
  }();
  RunFolder folder_ = RunFolder::create(root_ / "run", "seed = 1\n").or_throw();
};

std::vector<std::string> manifest_seeds() {
  const std::string good = test::slurp(Run::get().manifest());
  return {good,
          "{\"format\":2,\"step\":70,\"checkpoint\":\"step-000000070\"}\n",
          "{\"format\":1,\"step\":18446744073709551615,\"checkpoint\":\"step--00000001\"}",
          "{\"format\":2,\"step\":7e1,\"checkpoint\":[\"step-000000070\"]}",
          "null",
          std::string(50'000, '[')};
}

void manifest(std::span<const std::byte> bytes) {
  const Run& run = Run::get();
  const std::string text = text_of(bytes);
  // With a right checksum where it can have one, so that what it says is looked at too.
  if (text.ends_with("}\n")) {
    write_sealed(run.manifest(), text).or_throw();
  } else {
    test::spill(run.manifest(), text);
  }
  const auto step = run.folder().published_step();
  if (!step) {
    if (step.error().code != ErrorCode::kCorrupt) {
      contradiction("manifest", step.error().to_string());
    }
    return;
  }
  if (!*step || **step < 0 || text.find(checkpoint_name(**step)) == std::string::npos ||
      text.find(std::to_string(**step)) == std::string::npos) {
    contradiction("manifest", fmt::format("step {} of: {}", step->value_or(-1), text));
  }
}

fs::path looks_file() {
  return Run::get().folder().root() / LookHistory::kFile;
}

std::vector<std::string> look_seeds() {
  {
    auto history = LookHistory::open(looks_file(), {.pid = 7, .cgroup = "/a"}).or_throw();
    for (std::int64_t at = 0; at < 40; ++at) {
      history.add({.step = at, .phase = "train", .largest = {{.pid = 7, .name = "python"}}})
          .or_throw();
    }
  }
  std::string good = test::slurp(looks_file());
  // Half the file, with looks at its end: short enough that most mutations meet one of them.
  return {good.substr(0, 4096 + 40 * 256), good, "PLIF", std::string(5000, 'x')};
}

void looks(std::span<const std::byte> bytes) {
  const std::string text = text_of(bytes);
  test::spill(looks_file(), text);
  const auto kept = LookHistory::read(looks_file());
  if (!kept) {
    if (kept.error().code != ErrorCode::kCorrupt) {
      contradiction("looks", kept.error().to_string());
    }
    return;
  }
  for (std::size_t at = 1; at < kept->looks.size(); ++at) {
    if (kept->looks[at].number <= kept->looks[at - 1].number) {
      contradiction("looks", fmt::format("look {} twice", kept->looks[at].number));
    }
  }
  static_cast<void>(who_grew(*kept));
}

std::vector<std::string> ending_seeds() {
  return {R"({"command":["a"],"ending":"stopped","status":143,"limit_bytes":7,"advice":["b"]})",
          R"({"ending":7,"advice":{"a":[1,"b"]},"status":1e400})", "[]", std::string(50'000, '[')};
}

void ending(std::span<const std::byte> bytes) {
  const fs::path root = Run::get().folder().root();
  fs::remove(root / "checkpoints" / "manifest.json");  // What manifest() left is no manifest.
  test::spill(root / EndedCommand::kFile, text_of(bytes));
  const auto read = read_ended(root);
  const auto why = explain_end(root, KernelNow{});
  if (!why) {
    contradiction("ending", why.error().to_string());
  }
  if (read && why->summary.empty()) {
    contradiction("ending", "no summary");
  }
  if (why->to_json().empty() || why->to_text().empty()) {
    contradiction("ending", "no text");
  }
}

}  // namespace

std::vector<Target> run_targets() {
  return {{"manifest", manifest_seeds, manifest},
          {"looks", look_seeds, looks},
          {"ending", ending_seeds, ending}};
}

}  // namespace plimsoll::fuzz
