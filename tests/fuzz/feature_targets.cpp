// SPDX-License-Identifier: Apache-2.0
//
// Targets for the files of a feature store.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/crc32c.h"
#include "plimsoll/feature_store.h"
#include "store/feature_block.h"
#include "store/feature_format.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"
#include "tests/support/feature_set.h"

namespace plimsoll::fuzz {
namespace {

namespace fs = std::filesystem;

// A real store of one column, grouped, with sparse ids; with LZ4 where this build has it, or of two
// parts, or ragged and of two parts.
class Features {
 public:
  static Features& plain() {
    static Features features(BlockCompression::kNone, 80);
    return features;
  }
  static Features& packed() {
    static Features features(lz4_available() ? BlockCompression::kLz4 : BlockCompression::kNone,
                             80);
    return features;
  }
  static Features& parted() {
    static Features features(BlockCompression::kNone, 50);
    return features;
  }
  static Features& ragged() {
    static Features features(BlockCompression::kNone, 50, 70);
    return features;
  }
  test::ScratchDirectory scratch{};
  Governor governor{process_governor()};
  test::FeatureSet set{};
  fs::path directory{scratch / "set"};
  std::vector<std::string> names{};
  std::vector<std::string> good{};

 private:
  Features(BlockCompression compression, std::int64_t first_part, std::int64_t length_max = 0)
      : set(test::make_set(
            3, 80,
            {{.name = "x", .dtype = DType::kFloat32, .shape = {6}, .length_max = length_max}},
            test::IdKind::kSparse, test::GroupKind::kVaried)) {
    if (compression != BlockCompression::kNone) {
      test::make_compressible(set, 3, 0.6);
    }
    test::write_set(governor, directory, test::slice(set, 0, first_part), 1 << 20, compression)
        .or_throw();
    test::extend_set(governor, directory, set, first_part, set.rows()).or_throw();
    for (const auto& entry : fs::recursive_directory_iterator(directory)) {
      if (entry.is_regular_file()) {
        names.push_back(fs::relative(entry.path(), directory).string());
      }
    }
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      good.push_back(test::slurp(directory / name));
    }
  }
};

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void feature_header(std::span<const std::byte> bytes) {
  static const std::string kGood = test::slurp(Features::plain().directory / "features.json");
  const auto parsed = parse_feature_header(text_of(bytes), "fuzz");
  if (!parsed) {
    if (parsed.error().code != ErrorCode::kCorrupt) {
      contradiction("feature_header", parsed.error().to_string());
    }
  } else if (parsed->to_json() != kGood && parse_feature_header(parsed->to_json(), "again")) {
    return;  // Another sound header: its own text is read again to the same.
  } else if (parsed->to_json() != kGood) {
    contradiction("feature_header", "what it accepted it does not accept again");
  }
}

std::vector<std::string> feature_header_seeds() {
  return {test::slurp(Features::plain().directory / "features.json"),
          test::slurp(Features::packed().directory / "features.json"),
          test::slurp(Features::parted().directory / "part-000001" / "features.json"),
          test::slurp(Features::ragged().directory / "features.json")};
}

// Makes pages of a table sound again, so that what reads their entries has to stand them.
void repair_pages(std::string& table) {
  constexpr std::size_t kPage = 4096;
  for (std::size_t at = 0; at + kPage <= table.size(); at += kPage) {
    const auto number = static_cast<std::uint32_t>(at / kPage);
    std::memcpy(table.data() + at + kPage - 8, &number, 4);
    const std::uint32_t crc = crc32c(std::as_bytes(std::span(table.data() + at, kPage - 4)));
    std::memcpy(table.data() + at + kPage - 4, &crc, 4);
  }
}

void read_damaged(Features& features, const char* target, std::size_t which) {
  std::vector<std::byte> out(features.set.values[0].size());
  const std::vector<std::span<std::byte>> spans{out};
  auto store = FeatureStore::open(features.governor,
                                  {.directory = features.directory, .cache_bytes = 256 << 10});
  if (store && store->read(features.set.ids, std::vector<int>{0}, spans) &&
      out != features.set.values[0]) {
    contradiction(target, features.names[which] + ": other bytes than were stored");
  }
  // A part's own header in the place of the store's is sound: that directory is a part's.
  const bool is_part = !store && features.names[which] == "features.json" &&
                       store.error().advice == std::string_view("name the directory above it");
  if (!store && store.error().code != ErrorCode::kCorrupt && !is_part) {
    contradiction(target, store.error().to_string());
  }
}

void damage_files(Features& features, const char* target, std::span<const std::byte> bytes) {
  if (bytes.empty()) {
    return;
  }
  const std::size_t which = static_cast<std::size_t>(bytes[0]) % features.names.size();
  const fs::path path = features.directory / features.names[which];
  std::string text = text_of(bytes.subspan(1));
  test::spill(path, text);
  read_damaged(features, target, which);
  const std::string file = path.filename().string();
  if (file == kFeatureBlocksFile || file == kFeaturePlacesFile || file == kFeatureLengthsFile) {
    repair_pages(text);
    test::spill(path, text);
    read_damaged(features, target, which);
  }
  test::spill(path, features.good[which]);
}

void feature_files(std::span<const std::byte> bytes) {
  damage_files(Features::plain(), "feature_files", bytes);
}

void packed_files(std::span<const std::byte> bytes) {
  damage_files(Features::packed(), "packed_files", bytes);
}

void part_files(std::span<const std::byte> bytes) {
  damage_files(Features::parted(), "part_files", bytes);
}

void ragged_files(std::span<const std::byte> bytes) {
  damage_files(Features::ragged(), "ragged_files", bytes);
}

std::vector<std::string> file_seeds(const Features& features) {
  std::vector<std::string> seeds;
  for (std::size_t i = 0; i < features.names.size(); ++i) {
    std::string seed = features.good[i];
    seed.insert(seed.begin(), static_cast<char>(i));
    seeds.push_back(std::move(seed));
  }
  return seeds;
}

std::vector<std::string> feature_file_seeds() {
  return file_seeds(Features::plain());
}

std::vector<std::string> packed_file_seeds() {
  return file_seeds(Features::packed());
}

std::vector<std::string> part_file_seeds() {
  return file_seeds(Features::parted());
}

std::vector<std::string> ragged_file_seeds() {
  return file_seeds(Features::ragged());
}

constexpr std::size_t kBlockBytes = 4096;

// What is decoded fills a block, touches nothing around it, and comes out of compression again.
void feature_block(std::span<const std::byte> bytes) {
  constexpr std::byte kGuard{0x5A};
  constexpr std::size_t kGuardBytes = 64;
  static std::vector<std::byte> guarded(kBlockBytes + 2 * kGuardBytes);
  std::fill(guarded.begin(), guarded.end(), kGuard);
  const auto block = std::span(guarded).subspan(kGuardBytes, kBlockBytes);
  const bool decoded = decode_block(bytes, block);
  const auto touched = [&](std::span<const std::byte> guard) {
    return std::any_of(guard.begin(), guard.end(), [&](std::byte b) { return b != kGuard; });
  };
  if (touched(std::span(guarded).first(kGuardBytes)) ||
      touched(std::span(guarded).last(kGuardBytes))) {
    contradiction("feature_block", "bytes beside the block were written");
  }
  if (!decoded) {
    return;
  }
  static std::vector<std::uint64_t> state(static_cast<std::size_t>(encoder_state_bytes() / 8 + 1));
  static std::vector<std::byte> again(kBlockBytes);
  const std::vector<std::byte> first(block.begin(), block.end());
  const std::int64_t size = encode_block(first, again, std::as_writable_bytes(std::span(state)));
  if (size > 0 && (!decode_block(std::span(again).first(static_cast<std::size_t>(size)), block) ||
                   !std::equal(first.begin(), first.end(), block.begin()))) {
    contradiction("feature_block", "a block does not survive compression");
  }
}

std::vector<std::string> feature_block_seeds() {
  std::vector<std::string> seeds;
  std::vector<std::uint64_t> state(static_cast<std::size_t>(encoder_state_bytes() / 8 + 1));
  for (std::size_t period = 1; period <= 512; period *= 8) {
    std::vector<std::byte> block(kBlockBytes);
    for (std::size_t i = 0; i < kBlockBytes; ++i) {
      block[i] = static_cast<std::byte>(i % period * 7);
    }
    std::vector<std::byte> out(kBlockBytes);
    const std::int64_t size = encode_block(block, out, std::as_writable_bytes(std::span(state)));
    seeds.push_back(text_of(std::span(out).first(static_cast<std::size_t>(size))));
  }
  return seeds;
}

}  // namespace

std::vector<Target> feature_targets() {
  return {{"feature_header", feature_header_seeds, feature_header},
          {"feature_files", feature_file_seeds, feature_files},
          {"packed_files", packed_file_seeds, packed_files},
          {"part_files", part_file_seeds, part_files},
          {"ragged_files", ragged_file_seeds, ragged_files},
          {"feature_block", feature_block_seeds, feature_block}};
}

}  // namespace plimsoll::fuzz
