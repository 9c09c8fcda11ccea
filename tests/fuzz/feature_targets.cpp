// SPDX-License-Identifier: Apache-2.0
//
// Targets for the files of a feature store.
#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "plimsoll/feature_store.h"
#include "store/feature_format.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll::fuzz {
namespace {

namespace fs = std::filesystem;

// A real store of one column, grouped, with sparse ids.
class Features {
 public:
  static Features& get() {
    static Features features;
    return features;
  }
  test::ScratchDirectory scratch{};
  Governor governor{Governor::current().valid() ? Governor::current() : test::governor_of()};
  test::FeatureSet set{test::make_set(3, 80,
                                      {{.name = "x", .dtype = DType::kFloat32, .shape = {6}}},
                                      test::IdKind::kSparse, test::GroupKind::kVaried)};
  fs::path directory{scratch / "set"};
  std::vector<std::string> names{};
  std::vector<std::string> good{};

 private:
  Features() {
    test::write_set(governor, directory, set).or_throw();
    names = test::names_in(directory);
    for (const std::string& name : names) {
      good.push_back(test::slurp(directory / name));
    }
  }
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void feature_header(std::span<const std::byte> bytes) {
  static const std::string good = test::slurp(Features::get().directory / "features.json");
  const auto parsed = parse_feature_header(text_of(bytes), "fuzz");
  if (!parsed) {
    if (parsed.error().code != ErrorCode::kCorrupt) {
      contradiction("feature_header", parsed.error().to_string());
    }
  } else if (parsed->to_json() != good && parse_feature_header(parsed->to_json(), "again")) {
    return;  // Another sound header: its own text is read again to the same.
  } else if (parsed->to_json() != good) {
    contradiction("feature_header", "what it accepted it does not accept again");
  }
}

std::vector<std::string> feature_header_seeds() {
  return {test::slurp(Features::get().directory / "features.json")};
}

void feature_files(std::span<const std::byte> bytes) {
  if (bytes.empty()) {
    return;
  }
  Features& features = Features::get();
  const std::size_t which = static_cast<std::size_t>(bytes[0]) % features.names.size();
  const fs::path path = features.directory / features.names[which];
  test::spill(path, text_of(bytes.subspan(1)));
  static std::vector<std::byte> out(features.set.values[0].size());
  const std::vector<std::span<std::byte>> spans{out};
  auto store = FeatureStore::open(features.governor,
                                  {.directory = features.directory, .cache_bytes = 256 << 10});
  if (store && store->read(features.set.ids, std::vector<int>{0}, spans) &&
      out != features.set.values[0]) {
    contradiction("feature_files", features.names[which] + ": other bytes than were stored");
  }
  if (!store && store.error().code != ErrorCode::kCorrupt) {
    contradiction("feature_files", store.error().to_string());
  }
  test::spill(path, features.good[which]);
}

std::vector<std::string> feature_file_seeds() {
  const Features& features = Features::get();
  std::vector<std::string> seeds;
  for (std::size_t i = 0; i < features.names.size(); ++i) {
    std::string seed = features.good[i];
    seed.insert(seed.begin(), static_cast<char>(i));
    seeds.push_back(std::move(seed));
  }
  return seeds;
}

}  // namespace

std::vector<Target> feature_targets() {
  return {{"feature_header", feature_header_seeds, feature_header},
          {"feature_files", feature_file_seeds, feature_files}};
}

}  // namespace plimsoll::fuzz
