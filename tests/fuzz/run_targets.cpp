// SPDX-License-Identifier: Apache-2.0
//
// The manifest of a run: whatever it holds, it is refused as damaged, or names one checkpoint
// twice.
#include <system_error>

#include <unistd.h>

#include <fmt/format.h>

#include "run/run_folder.h"
#include "run/sealed_file.h"
#include "tests/fuzz/table.h"
#include "tests/fuzz/target.h"

namespace plimsoll::fuzz {
namespace {

// A run with two checkpoints, the newer one published.
class Run {
 public:
  static const Run& get() {
    static const Run made;
    return made;
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

}  // namespace

std::vector<Target> run_targets() {
  return {{"manifest", manifest_seeds, manifest}};
}

}  // namespace plimsoll::fuzz
