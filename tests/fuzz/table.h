// SPDX-License-Identifier: Apache-2.0
//
// A real table of three commits, of either layout, fixed or growing, and where a copy of it may be
// damaged.
//
// Threads: single-owner.   Memory: four small tables, under the temporary directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <unistd.h>

#include "base/philox.h"
#include "plimsoll/embedding_store.h"
#include "store/embedding_description.h"
#include "tests/fuzz/target.h"
#include "tests/support/array_files.h"

namespace plimsoll::fuzz {

namespace fs = std::filesystem;

inline constexpr std::int64_t kRows = 300;
inline constexpr std::int64_t kDim = 40;

inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class Table {
 public:
  /// `grows`: a third of the rows were inserted before the first commit.
  template <RowLayout layout = RowLayout::kAnyOrder, bool grows = false>
  static const Table& get() {
    static const Table made(layout, grows);
    return made;
  }
  [[nodiscard]] const fs::path& directory() const { return directory_; }
  [[nodiscard]] const TableDescription& description() const { return description_; }
  [[nodiscard]] std::string file(const char* name) const { return test::slurp(directory_ / name); }
  [[nodiscard]] EmbeddingStoreOptions options() const {
    return {.directory = directory_,
            .dim = kDim,
            .layout = layout_,
            .ids = std::span(ids_).first(grows_ ? kRows * 2 / 3 : kRows),
            .rows_max = grows_ ? kRows + 20 : 0,
            .batch_rows = layout_ == RowLayout::kAnyOrder ? 512 : 24,
            .io_threads = 0};
  }
  [[nodiscard]] const std::vector<std::int64_t>& ids() const { return ids_; }
  [[nodiscard]] const std::vector<float>& rows() const { return rows_; }
  /// The process's, whichever table made it.
  [[nodiscard]] Governor governor() const { return governor_; }

 private:
  Table(RowLayout layout, bool grows) : layout_(layout), grows_(grows) {
    std::string pattern = (fs::temp_directory_path() / "plimsoll-fuzz-XXXXXX").string();
    root_ = ::mkdtemp(pattern.data());
    directory_ = root_ / "table";
    for (std::int64_t i = 0; i < kRows; ++i) {
      ids_.push_back(static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(i))));
    }
    auto store = EmbeddingStore::open(governor_, options()).or_throw();
    if (grows) {
      store.insert(ids_).or_throw();
    }
    for (std::int64_t step = 1; step <= 3; ++step) {
      rows_.assign(static_cast<std::size_t>(kRows * kDim), static_cast<float>(step));
      store.begin_epoch(step).or_throw();
      for (std::size_t at = 0; at < ids_.size(); at += 20) {  // In sample order: out of order.
        store.update(std::span(ids_).subspan(at, 20), std::span(rows_).first(20 * kDim)).or_throw();
      }
      store.commit(step).or_throw();
    }
    description_ = read_description(directory_).or_throw();
  }
  ~Table() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }

  const RowLayout layout_;
  const bool grows_;
  Governor governor_{process_governor()};
  fs::path root_;
  fs::path directory_;
  TableDescription description_;
  std::vector<std::int64_t> ids_;
  std::vector<float> rows_;
};

}  // namespace plimsoll::fuzz
