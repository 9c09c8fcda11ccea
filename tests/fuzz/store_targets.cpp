// SPDX-License-Identifier: Apache-2.0
//
// Targets for the files of an embedding table: superblocks, page tables, pages, ids, table.json.
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "os/file.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "store/embedding_format.h"
#include "store/embedding_growing_ids.h"
#include "store/id_page.h"
#include "tests/fuzz/table.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"

namespace plimsoll::fuzz {

Governor& process_governor() {
  struct Closing {
    Governor governor{Governor::create({.memory_limit = "2GiB"}).or_throw()};
    ~Closing() { governor.close(); }
  };
  static Closing held;
  return held.governor;
}

namespace {

// A file that is only memory, for readers that want a path.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("plimsoll-fuzz", MFD_CLOEXEC)) {}
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  [[nodiscard]] fs::path hold(std::span<const std::byte> bytes) const {
    if (::ftruncate(descriptor_, static_cast<off_t>(bytes.size())) != 0 ||
        ::pwrite(descriptor_, bytes.data(), bytes.size(), 0) !=
            static_cast<ssize_t>(bytes.size())) {
      contradiction("memory file", "cannot be written");
    }
    return fmt::format("/proc/self/fd/{}", descriptor_);
  }

 private:
  int descriptor_;
};

// ---- super ------------------------------------------------------------------------------------

void read_super(std::span<const std::byte> bytes) {
  static const MemoryFile kMemory;
  const auto super = SuperFile::open(kMemory.hold(bytes), false);
  if (!super) {
    if (super.error().code != ErrorCode::kCorrupt) {
      contradiction("superblock", super.error().to_string());
    }
    return;
  }
  const std::string text = text_of(bytes);
  for (const auto& [state, superblock] : super->slots()) {
    if (state == SuperFile::SlotState::kValid &&
        text.find(text_of(std::as_bytes(std::span(&superblock.step, 1)))) == std::string::npos) {
      contradiction("superblock", "a step that is nowhere in its file");
    }
  }
}

// The checksum of a superblock covers 56 bytes and is at byte 12; see docs/formats.
void repair_super(std::span<std::byte> bytes) {
  for (std::size_t at = 0; at + 56 <= bytes.size(); at += 512) {
    const auto record = bytes.subspan(at, 56);
    if (record[0] == std::byte{0}) {
      continue;
    }
    std::memset(record.data() + 12, 0, 4);
    const std::uint32_t crc = crc32c(record);
    std::memcpy(record.data() + 12, &crc, sizeof crc);
  }
}

void superblock(std::span<const std::byte> bytes) {
  read_super(bytes);
  std::vector<std::byte> repaired(bytes.begin(), bytes.end());
  repair_super(repaired);
  read_super(repaired);
}

std::vector<std::string> superblock_seeds() {
  return {Table::get().file("super"), std::string(8192, '\0')};
}

// ---- pages ------------------------------------------------------------------------------------

struct SoundPage {
  std::string bytes;
  std::uint32_t crc;
};

const std::vector<SoundPage>& sound_pages() {
  static const std::vector<SoundPage> kPages = [] {
    const Table& table = Table::get();
    const TableShape shape = table.description().shape();
    std::vector<SoundPage> made;
    for (std::int64_t page = 0; page < shape.pages; ++page) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(shape.page_bytes));
      for (std::int64_t row = 0; row < shape.rows_in_page(page); ++row) {
        const auto id = table.ids()[static_cast<std::size_t>(page * shape.rows_per_page + row)];
        std::memcpy(bytes.data() + kPageHeaderBytes + row * shape.record_bytes, &id, sizeof id);
      }
      const auto crc = seal_page(shape, table.description().fingerprint(), page, bytes);
      made.push_back({text_of(bytes), crc});
    }
    return made;
  }();
  return kPages;
}

// Bytes a row's checksum covers, and the header; the unused tail of a page may hold anything.
bool covered_bytes_equal(const TableShape& shape, std::int64_t page, std::span<const std::byte> a,
                         const std::string& b) {
  const auto end = kPageHeaderBytes + shape.rows_in_page(page) * shape.record_bytes;
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(end)) == 0;
}

void page(std::span<const std::byte> bytes) {
  const TableDescription& table = Table::get().description();
  const TableShape shape = table.shape();
  if (bytes.size() < static_cast<std::size_t>(shape.page_bytes)) {
    return;  // The reader never asks: a short file fails before.
  }
  PageHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto number =
      static_cast<std::int64_t>(header.page % static_cast<std::uint64_t>(shape.pages));
  const SoundPage& sound = sound_pages()[static_cast<std::size_t>(number)];
  const auto whole = bytes.first(static_cast<std::size_t>(shape.page_bytes));
  if (page_is_sound(shape, table.fingerprint(), number, sound.crc, whole) &&
      !covered_bytes_equal(shape, number, whole, sound.bytes)) {
    contradiction("page", fmt::format("altered bytes of page {} pass for it", number));
  }
  std::vector<std::byte> repaired(whole.begin(), whole.end());
  const auto crc = seal_page(shape, table.fingerprint(), number, repaired);
  if (!page_is_sound(shape, table.fingerprint(), number, crc, repaired)) {
    contradiction("page", fmt::format("page {} as sealed is not sound", number));
  }
}

std::vector<std::string> page_seeds() {
  std::vector<std::string> seeds;
  for (const SoundPage& sound : sound_pages()) {
    seeds.push_back(sound.bytes);
  }
  return seeds;
}

// ---- ids --------------------------------------------------------------------------------------

void id_page(std::span<const std::byte> bytes) {
  if (bytes.size() < static_cast<std::size_t>(kIdPageBytes)) {
    return;
  }
  std::vector<std::byte> copy(bytes.begin(), bytes.begin() + kIdPageBytes);
  for (const IdPageKind kind : {IdPageKind::kSorted, IdPageKind::kOrder}) {
    const auto number = id_page_header(copy).number;
    static_cast<void>(check_id_page(copy, kind, number, "fuzz"));
    IdPageHeader header = id_page_header(copy);
    header.magic = static_cast<std::uint32_t>(kind);
    std::memcpy(copy.data(), &header, sizeof header);
    header.crc = crc32c(std::span<const std::byte>(copy).subspan(8));
    std::memcpy(copy.data(), &header, sizeof header);
    if (check_id_page(copy, kind, header.number, "fuzz") && kind == IdPageKind::kSorted) {
      for (std::int64_t i = 0; i < id_page_count(copy); i += 37) {
        static_cast<void>(search_id_page(copy, id_page_id(copy, i)));
      }
    }
  }
}

std::vector<std::string> id_page_seeds() {
  const std::string sorted = Table::get().file("rows.ids");
  const std::string order = Table::get().file("rows.order");
  return {sorted.substr(0, 4096), order.substr(0, 4096)};
}

// ---- ids that come and go ---------------------------------------------------------------------

// What a commit says about them, behind a page table.
class Growing {
 public:
  static Growing& get() {
    static Growing growing;
    return growing;
  }
  // Takes `bytes`, or as many as there are, for those of a commit.
  bool adopt(std::span<const std::byte> bytes) {
    const std::size_t size = std::min(bytes.size(), file_.size());
    std::copy_n(bytes.begin(), size, file_.begin());
    std::fill(file_.begin() + static_cast<std::ptrdiff_t>(size), file_.end(), std::byte{0});
    return ids_.adopt().has_value();
  }
  [[nodiscard]] GrowingIds& ids() { return ids_; }
  [[nodiscard]] std::string bytes() const { return text_of(file_); }

  static constexpr GrowthShape kShape{.made = 40, .places = 300};

 private:
  Slab slab_{Slab::create(Table::get().governor(), Tag::kOther,
                          kShape.bytes() + kBlockUnit + GrowingIds::memory_bytes(kShape))
                 .or_throw()};
  IoPool pool_{0};
  IdIndex made_{
      IdIndex::open({}, "", IdFingerprint::dense(kShape.made), slab_, 1, pool_).or_throw()};
  std::span<std::byte> file_{slab_.take<std::byte>(kShape.bytes(), kBlockUnit)};
  GrowingIds ids_{kShape, made_, file_, slab_};
};

void growing_ids(std::span<const std::byte> bytes) {
  Growing& growing = Growing::get();
  if (!growing.adopt(bytes)) {
    return;
  }
  const GrowingIds& ids = growing.ids();
  std::int64_t rows = 0;
  for (std::int64_t place = ids.next_held(0); place >= 0; place = ids.next_held(place + 1)) {
    const std::int64_t id = place < Growing::kShape.made ? place : ids.id_at(place);
    std::int64_t found = -1;
    if (!ids.find({&id, 1}, {&found, 1}) || found != place) {
      contradiction("growing_ids", fmt::format("id {} is at {}, not at {}", id, found, place));
    }
    ++rows;
  }
  if (rows != ids.rows()) {
    contradiction("growing_ids", fmt::format("{} rows, but it says {}", rows, ids.rows()));
  }
}

std::vector<std::string> growing_ids_seeds() {
  Growing& growing = Growing::get();
  std::vector<std::string> seeds{std::string(8192, '\0')};
  static_cast<void>(growing.adopt({}));
  for (std::int64_t i = 0; i < 6; ++i) {
    std::vector<std::int64_t> some;
    for (std::int64_t k = 0; k < 50; ++k) {
      some.push_back((k * 37 + i * 11) % 120 - 20);
    }
    std::array<std::int64_t, 16> scratch;
    growing.ids().add(some, scratch).or_throw();
    growing.ids().settle();
    for (std::int64_t place = i; place < 90; place += 7) {
      growing.ids().remove(place);
    }
    seeds.push_back(growing.bytes());
  }
  return seeds;
}

// ---- table.json -------------------------------------------------------------------------------

void read_table_json(const std::string& text) {
  static const fs::path kDirectory = [] {
    const fs::path made = Table::get().directory().parent_path() / "description";
    fs::create_directories(made);
    return made;
  }();
  test::spill(kDirectory / "table.json", text);
  const auto table = read_description(kDirectory);
  if (!table) {
    if (table.error().code != ErrorCode::kCorrupt) {
      contradiction("table.json", table.error().to_string());
    }
    return;
  }
  const TableShape shape = table->shape();
  if (shape.rows_per_page < 1 || shape.page_bytes % kBlockUnit != 0 ||
      shape.pages * shape.rows_per_page < shape.rows || shape.rows < 1) {
    contradiction("table.json", "accepted a table that has no shape: " + text);
  }
}

void table_json(std::span<const std::byte> bytes) {
  const std::string text = text_of(bytes);
  read_table_json(text);
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) {
    return;
  }
  json.erase("crc32c");
  const std::string compact = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  json["crc32c"] = crc32c(std::as_bytes(std::span(compact)));
  read_table_json(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::vector<std::string> table_json_seeds() {
  // And of one that may grow, whose checksum table_json() makes.
  auto growing = nlohmann::json::parse(Table::get().file("table.json"));
  TableDescription table = Table::get().description();
  table.rows_max = 2 * table.ids.rows;
  growing["version"] = 3;
  growing["rows_max"] = table.rows_max;
  growing["fingerprint"] = fmt::format("{:016x}", table.fingerprint());
  return {Table::get().file("table.json"), Table::get<RowLayout::kSampleOrder>().file("table.json"),
          growing.dump(), Table::get<RowLayout::kSampleOrder, true>().file("table.json")};
}

// ---- Whole tables -----------------------------------------------------------------------------

// The first byte chooses the file; the rest is its content.
template <RowLayout layout, bool grows>
constexpr auto open_files() {
  if constexpr (layout == RowLayout::kSampleOrder && grows) {
    return std::array{"super",    "map.0",    "map.1",      "map.2",
                      "rows.dat", "rows.ids", "rows.order", "rows.new"};
  } else {
    return std::array{"super", "map.0", "map.1", "map.2", "rows.dat", "rows.ids", "rows.order"};
  }
}

void open_and_read(const Table& table, const std::string& what) {
  auto store = EmbeddingStore::open(table.governor(), table.options());
  if (!store) {
    if (store.error().code != ErrorCode::kCorrupt) {
      contradiction("open", what + ": " + store.error().to_string());
    }
    return;
  }
  static std::vector<float> out(table.rows().size());
  if (!store->gather(table.ids(), out)) {
    return;
  }
  // Whichever commit it is, its rows are all of one value: the number of its step.
  const auto wanted = static_cast<float>(std::max<std::int64_t>(store->last_commit(), 0));
  const bool initial = store->last_commit() < 0;
  if (!initial && !std::all_of(out.begin(), out.end(), [&](float v) { return v == wanted; })) {
    contradiction("open", what + ": a wrong row");
  }
}

template <RowLayout layout, bool grows = false>
void open_table(std::span<const std::byte> bytes) {
  if (bytes.empty()) {
    return;
  }
  const Table& table = Table::get<layout, grows>();
  constexpr auto kFiles = open_files<layout, grows>();
  const char* name = kFiles[static_cast<std::size_t>(bytes[0]) % kFiles.size()];
  const fs::path path = table.directory() / name;
  static const std::vector<std::string> kGood = [] {
    std::vector<std::string> files;
    for (const char* file : open_files<layout, grows>()) {
      files.push_back(Table::get<layout, grows>().file(file));
    }
    return files;
  }();
  test::spill(path, text_of(bytes.subspan(1)));
  open_and_read(table, name);
  test::spill(path, kGood[static_cast<std::size_t>(bytes[0]) % kFiles.size()]);
}

template <RowLayout layout, bool grows = false>
std::vector<std::string> open_seeds() {
  std::vector<std::string> seeds;
  for (const char* file : open_files<layout, grows>()) {
    std::string seed = Table::get<layout, grows>().file(file);
    seed.insert(seed.begin(), static_cast<char>(seeds.size()));
    seeds.push_back(std::move(seed));
  }
  return seeds;
}

}  // namespace

std::vector<Target> store_targets() {
  return {
      {"superblock", superblock_seeds, superblock},
      {"page", page_seeds, page},
      {"id_page", id_page_seeds, id_page},
      {"growing_ids", growing_ids_seeds, growing_ids},
      {"table_json", table_json_seeds, table_json},
      {"open", open_seeds<RowLayout::kAnyOrder>, open_table<RowLayout::kAnyOrder>},
      {"open_timeline", open_seeds<RowLayout::kSampleOrder>, open_table<RowLayout::kSampleOrder>},
      {"open_growing", open_seeds<RowLayout::kAnyOrder, true>,
       open_table<RowLayout::kAnyOrder, true>},
      {"open_growing_timeline", open_seeds<RowLayout::kSampleOrder, true>,
       open_table<RowLayout::kSampleOrder, true>}};
}

}  // namespace plimsoll::fuzz
