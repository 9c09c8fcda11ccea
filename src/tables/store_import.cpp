// SPDX-License-Identifier: Apache-2.0
//
// A reader visits blocks of (ids, rows), once for the ids and once for the rows.
#include "tables/store_import.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/bfloat16.h"
#include "base/check.h"
#include "data/megatron.h"
#include "data/npy.h"
#include "data/safetensors.h"
#include "os/directories.h"
#include "os/file.h"
#include "store/embedding_description.h"
#include "store/row_optimizer.h"
#include "tables/new_file.h"
#include "tables/store_export.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kImportBytes = 1 << 20;
constexpr std::size_t kLineMost = std::size_t{16} << 20;  // Of a .csv: some million floats.

using Visit = VisitRows;

/// One file of rows. dim() is known once it has been opened.
class RowReader {
 public:
  virtual ~RowReader() = default;
  [[nodiscard]] virtual std::int64_t dim() const = 0;
  /// Visits every row; `rows` empty when only the ids are wanted.
  virtual Result<void> visit(bool with_rows, const Visit& visit) = 0;
};

// ---- Arrays -----------------------------------------------------------------------------------

/// Rows and, if there are any, ids of one file or two.
class ArrayReader final : public RowReader {
 public:
  static Result<std::unique_ptr<RowReader>> safetensors(const fs::path& path) {
    PLIMSOLL_TRY(const auto reader, SafetensorsReader::open(path));
    PLIMSOLL_TRY(const auto* const ids, reader.find("ids"));
    PLIMSOLL_TRY(const auto* const rows, reader.find("rows"));
    PLIMSOLL_TRY(auto id_rows, reader.rows_of(*ids));
    PLIMSOLL_TRY(auto row_rows, reader.rows_of(*rows));
    return make(std::move(row_rows), std::move(id_rows), 0);
  }
  /// `first_id`: of its rows when there are no ids beside it, or −1 when there must be.
  static Result<std::unique_ptr<RowReader>> npy(const fs::path& path, std::int64_t first_id) {
    PLIMSOLL_TRY(auto rows, open_npy(path));
    fs::path ids_path = path;
    ids_path.replace_extension(".ids.npy");
    std::error_code status;
    std::optional<TensorRows> ids;
    if (fs::exists(ids_path, status)) {
      PLIMSOLL_TRY(ids, open_npy(ids_path));
    } else if (first_id < 0) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: its rows have no ids: {} is not there", path.string(),
                              ids_path.string()),
                  "put them there (int64 [rows]), or number the rows 0, 1, 2, … with --number-rows "
                  "(number_rows)");
    }
    return make(std::move(rows), std::move(ids), first_id);
  }
  [[nodiscard]] std::int64_t rows() const { return rows_.rows(); }
  [[nodiscard]] std::int64_t dim() const override { return rows_.row_shape()[0]; }

  Result<void> visit(bool with_rows, const Visit& visit) override {
    const std::int64_t step = std::max<std::int64_t>(1, kImportBytes / rows_.row_bytes());
    std::vector<std::int64_t> ids;
    std::vector<float> values;
    for (std::int64_t first = 0; first < rows_.rows(); first += step) {
      const auto count = std::min(step, rows_.rows() - first);
      ids.resize(static_cast<std::size_t>(count));
      std::iota(ids.begin(), ids.end(), first_id_ + first);
      if (ids_) {
        PLIMSOLL_TRY_VOID(ids_->read(first, std::as_writable_bytes(std::span(ids))));
      }
      values.resize(with_rows ? static_cast<std::size_t>(count * dim()) : 0);
      if (with_rows) {
        PLIMSOLL_TRY_VOID(read_rows(first, values));
      }
      PLIMSOLL_TRY_VOID(visit(ids, values));
    }
    return {};
  }

 private:
  static Result<std::unique_ptr<RowReader>> make(TensorRows rows, std::optional<TensorRows> ids,
                                                 std::int64_t first_id) {
    if ((rows.dtype() != DType::kFloat32 && rows.dtype() != DType::kBFloat16) ||
        rows.row_shape().size() != 1 || rows.row_bytes() == 0) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the rows are {} {}, expected float32 or bfloat16 [rows, dim]",
                              rows.path().string(), dtype_name(rows.dtype()),
                              shape_text(rows.row_shape())));
    }
    if (ids && (ids->dtype() != DType::kInt64 || !ids->row_shape().empty() ||
                ids->rows() != rows.rows())) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("{}: the ids are {} of {}, expected int64 [{}]", ids->path().string(),
                              dtype_name(ids->dtype()), ids->rows(), rows.rows()));
    }
    std::unique_ptr<ArrayReader> made(new ArrayReader());
    made->rows_ = std::move(rows);
    made->ids_ = std::move(ids);
    made->first_id_ = first_id;
    return std::unique_ptr<RowReader>(std::move(made));
  }

  Result<void> read_rows(std::int64_t first, std::span<float> values) {
    if (rows_.dtype() == DType::kFloat32) {
      return rows_.read(first, std::as_writable_bytes(values));
    }
    halves_.resize(values.size());
    PLIMSOLL_TRY_VOID(rows_.read(first, std::as_writable_bytes(std::span(halves_))));
    std::transform(halves_.begin(), halves_.end(), values.begin(), widen_bfloat16);
    return {};
  }

  TensorRows rows_;
  std::vector<std::uint16_t> halves_;  // Of bfloat16 rows: one block.
  std::optional<TensorRows> ids_;
  std::int64_t first_id_{0};
};

// ---- Text -------------------------------------------------------------------------------------

/// A file by lines, read a block at a time.
class Lines {
 public:
  static Result<Lines> open(const fs::path& path) {
    Lines lines;
    PLIMSOLL_TRY(lines.file_, File::open(path, FileMode::kRead));
    PLIMSOLL_TRY(lines.bytes_, lines.file_.size());
    return lines;
  }
  /// The next line without its end; nothing at the end of the file.
  Result<std::optional<std::string_view>> next() {
    for (;;) {
      const auto rest = std::string_view(text_).substr(at_);
      const std::size_t end = rest.find('\n');
      const bool last = read_ == bytes_;
      if (end == std::string_view::npos && !last && rest.size() < kLineMost) {
        PLIMSOLL_TRY_VOID(read_more());
        continue;
      }
      if (rest.empty()) {
        return std::optional<std::string_view>{};
      }
      if (end == std::string_view::npos && !last) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}:{}: the line has no end within {} bytes", file_.path().string(),
                                number_ + 1, kLineMost));
      }
      auto line = rest.substr(0, end);
      at_ += end == std::string_view::npos ? rest.size() : end + 1;
      ++number_;
      return std::optional(line.ends_with('\r') ? line.substr(0, line.size() - 1) : line);
    }
  }
  [[nodiscard]] std::string place() const {
    return fmt::format("{}:{}", file_.path().string(), number_);
  }
  [[nodiscard]] std::int64_t number() const { return number_; }

 private:
  Result<void> read_more() {
    text_.erase(0, std::exchange(at_, 0));
    const auto had = text_.size();
    const auto size = std::min(bytes_ - read_, kImportBytes);
    text_.resize(had + static_cast<std::size_t>(size));
    PLIMSOLL_TRY_VOID(file_.read_at(read_, std::as_writable_bytes(std::span(text_).subspan(had))));
    read_ += size;
    return {};
  }

  File file_;
  std::int64_t bytes_{0};
  std::int64_t read_{0};
  std::int64_t number_{0};
  std::string text_;
  std::size_t at_{0};
};

class CsvReader final : public RowReader {
 public:
  static Result<std::unique_ptr<RowReader>> open(const fs::path& path) {
    std::unique_ptr<CsvReader> reader(new CsvReader(path));
    PLIMSOLL_TRY(auto lines, Lines::open(path));
    PLIMSOLL_TRY(auto line, lines.next());
    if (line && is_heading(*line)) {
      PLIMSOLL_TRY(line, lines.next());
    }
    reader->dim_ = line ? std::count(line->begin(), line->end(), ',') : 0;
    if (reader->dim_ < 1) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: an id and at least one number were expected", lines.place()));
    }
    return std::unique_ptr<RowReader>(std::move(reader));
  }
  [[nodiscard]] std::int64_t dim() const override { return dim_; }

  Result<void> visit(bool with_rows, const Visit& visit) override {
    PLIMSOLL_TRY(auto lines, Lines::open(path_));
    const auto block =
        static_cast<std::size_t>(std::max<std::int64_t>(1, kImportBytes / (4 * dim_)));
    std::vector<std::int64_t> ids;
    std::vector<float> values;
    for (;;) {
      PLIMSOLL_TRY(const auto line, lines.next());
      if (!line || ids.size() == block) {
        PLIMSOLL_TRY_VOID(visit(ids, values));
        ids.clear();
        values.clear();
      }
      if (!line) {
        return {};
      }
      if (line->empty() || (lines.number() == 1 && is_heading(*line))) {
        continue;
      }
      PLIMSOLL_TRY_VOID(parse(lines, *line, with_rows, ids, values));
    }
  }

 private:
  explicit CsvReader(fs::path path) : path_(std::move(path)) {}

  static bool is_heading(std::string_view line) {
    std::int64_t id = 0;
    return std::from_chars(line.data(), line.data() + line.size(), id).ec != std::errc();
  }

  Result<void> parse(const Lines& lines, std::string_view line, bool with_rows,
                     std::vector<std::int64_t>& ids, std::vector<float>& values) const {
    const char* at = line.data();
    const char* const end = at + line.size();
    std::int64_t id = 0;
    auto parsed = std::from_chars(at, end, id);
    if (parsed.ec != std::errc()) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: the line begins with no id", lines.place()));
    }
    ids.push_back(id);
    if (!with_rows) {
      return {};
    }
    std::int64_t count = 0;
    for (at = parsed.ptr; at < end && *at == ',' && count <= dim_; at = parsed.ptr, ++count) {
      float value = 0.0F;
      parsed = std::from_chars(at + 1, end, value);
      if (parsed.ec != std::errc()) {
        return fail(ErrorCode::kCorrupt,
                    fmt::format("{}: number {} cannot be read", lines.place(), count + 1));
      }
      values.push_back(value);
    }
    if (at != end || count != dim_) {
      return fail(ErrorCode::kCorrupt,
                  fmt::format("{}: {} numbers, expected {}", lines.place(), count, dim_));
    }
    return {};
  }

  fs::path path_;
  std::int64_t dim_{0};
};

// ---- Chunks of the original ---------------------------------------------------------------------

ReadSavedRows& saved_rows_reader() {
  static ReadSavedRows one;
  return one;
}

class ChunkReader final : public RowReader {
 public:
  static Result<std::unique_ptr<RowReader>> open(const Governor& governor, const fs::path& path) {
    if (!saved_rows_reader()) {
      return fail(ErrorCode::kInvalidArgument, path.string() + ": saved rows are read in Python",
                  "import them by plimsoll.store.import_rows()");
    }
    std::unique_ptr<ChunkReader> made(new ChunkReader(governor, path));
    PLIMSOLL_TRY(made->lease_, made->governor_.reserve(Tag::kOther, 0));
    PLIMSOLL_TRY(made->dim_, saved_rows_reader()(governor, path, false,
                                                 [&](auto ids, auto) { return made->keep(ids); }));
    return std::unique_ptr<RowReader>(std::move(made));
  }
  [[nodiscard]] std::int64_t dim() const override { return dim_; }

  Result<void> visit(bool with_rows, const Visit& visit) override {
    if (!with_rows) {
      return visit(ids_, {});
    }
    std::size_t at = 0;
    const auto checked = [&](std::span<const std::int64_t> ids, std::span<const float> rows) {
      const auto known = std::span(ids_).subspan(std::min(at, ids_.size()));
      at += ids.size();
      const bool same = ids.size() <= known.size() &&
                        std::equal(ids.begin(), ids.end(), known.begin()) &&
                        rows.size() == ids.size() * static_cast<std::size_t>(dim_);
      return same ? visit(ids, rows) : changed();
    };
    PLIMSOLL_TRY(const std::int64_t dim, saved_rows_reader()(governor_, path_, true, checked));
    return dim == dim_ && at == ids_.size() ? Result<void>{} : changed();
  }

 private:
  ChunkReader(Governor governor, fs::path path) noexcept
      : governor_(std::move(governor)), path_(std::move(path)) {}
  Result<void> keep(std::span<const std::int64_t> ids) {
    const std::size_t count = ids_.size() + ids.size();
    PLIMSOLL_TRY_VOID(lease_.grow(static_cast<std::int64_t>(count * sizeof(std::int64_t))));
    ids_.reserve(count);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    return {};
  }
  [[nodiscard]] Result<void> changed() const {
    return fail(ErrorCode::kCorrupt, path_.string() + ": it changed while it was read",
                "import it again");
  }

  Governor governor_;
  fs::path path_;
  Lease lease_;
  std::vector<std::int64_t> ids_;
  std::int64_t dim_{0};
};

// ---- The table --------------------------------------------------------------------------------

Result<std::vector<std::unique_ptr<RowReader>>> open_files(const Governor& governor,
                                                           const ImportOptions& options) {
  if (options.files.empty()) {
    return fail(ErrorCode::kInvalidArgument, "no file to import");
  }
  std::vector<std::unique_ptr<RowReader>> readers;
  std::int64_t next_id = 0;
  for (const fs::path& path : options.files) {
    const bool chunk = options.format.empty() ? path.extension() == ".pt" : options.format == "pt";
    PLIMSOLL_TRY(const std::string form,
                 chunk ? Result<std::string>("pt") : store_file_form(path, options.format));
    if (chunk) {
      PLIMSOLL_TRY(readers.emplace_back(), ChunkReader::open(governor, path));
    } else if (form == "npy") {
      PLIMSOLL_TRY(auto reader, ArrayReader::npy(path, options.number_rows ? next_id : -1));
      next_id += static_cast<const ArrayReader&>(*reader).rows();
      readers.push_back(std::move(reader));
    } else {
      PLIMSOLL_TRY(auto reader,
                   form == "csv" ? CsvReader::open(path) : ArrayReader::safetensors(path));
      readers.push_back(std::move(reader));
    }
    if (readers.back()->dim() != readers.front()->dim()) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: {} numbers a row, but {} has {}", path.string(), readers.back()->dim(),
                      options.files.front().string(), readers.front()->dim()));
    }
  }
  return readers;
}

// Writes the ids of all files into one .npy, from which a table is made. Returns how many.
Result<std::int64_t> collect_ids(std::span<const std::unique_ptr<RowReader>> readers,
                                 const fs::path& path) {
  PLIMSOLL_TRY(auto file, NewFile::create(path));
  const TensorSpec unknown{"ids", DType::kInt64, {0}};
  PLIMSOLL_TRY_VOID(file.write(npy_header(unknown)));
  std::int64_t rows = 0;
  for (const auto& reader : readers) {
    PLIMSOLL_TRY_VOID(reader->visit(
        /*with_rows=*/false, [&](std::span<const std::int64_t> ids, auto) -> Result<void> {
          rows += static_cast<std::int64_t>(ids.size());
          return file.write(std::as_bytes(ids));
        }));
  }
  PLIMSOLL_TRY_VOID(file.rewrite_head(npy_header({"ids", DType::kInt64, {rows}})));
  PLIMSOLL_TRY_VOID(file.finish());
  return rows;
}

// Makes the table, whole and durable, in `folder`.
Result<std::int64_t> fill(Governor governor, const ImportOptions& options, const fs::path& folder,
                          std::span<const std::unique_ptr<RowReader>> readers,
                          const ProgressFn& progress) {
  const fs::path ids_file = folder / table_files::kGivenIds;
  PLIMSOLL_TRY(const std::int64_t rows, collect_ids(readers, ids_file));
  const std::int64_t dim = readers.front()->dim();
  PLIMSOLL_TRY(auto store, EmbeddingStore::open(governor, {.directory = folder,
                                                           .dim = dim,
                                                           .dtype = options.dtype,
                                                           .optimizer = {.kind = options.optimizer},
                                                           .init = {.kind = RowInitKind::kZeros},
                                                           .ids_file = ids_file}));
  PLIMSOLL_TRY_VOID(remove_file(ids_file));
  std::int64_t done = 0;
  for (const auto& reader : readers) {
    const auto filled = reader->visit(
        /*with_rows=*/true,
        [&](std::span<const std::int64_t> ids, std::span<const float> values) -> Result<void> {
          PLIMSOLL_TRY_VOID(store.update(ids, values));
          done += static_cast<std::int64_t>(values.size_bytes());
          if (progress && !progress(done, rows * dim * 4)) {
            return fail(ErrorCode::kInvalidArgument, "cancelled");
          }
          return {};
        });
    PLIMSOLL_TRY_VOID(filled);
  }
  PLIMSOLL_TRY_VOID(store.commit(0));
  return rows;
}

}  // namespace

void set_saved_rows_reader(ReadSavedRows read) {
  saved_rows_reader() = std::move(read);
}

std::map<std::string, RowOptimizer> optimizers_by_name() {
  std::map<std::string, RowOptimizer> names;
  for (const RowOptimizer kind : kRowOptimizers) {
    names.emplace(optimizer_name(kind), kind);
  }
  return names;
}

Result<std::int64_t> import_store(Governor governor, const ImportOptions& options,
                                  const ProgressFn& progress) {
  if (!options.files.empty() && is_megatron(options.files[0], options.format)) {
    if (options.files.size() > 1) {
      return fail(ErrorCode::kInvalidArgument, "Megatron's files are imported one pair at a time");
    }
    return import_megatron(std::move(governor), {.prefix = options.files[0], .out = options.out},
                           progress);
  }
  PLIMSOLL_TRY(const auto readers, open_files(governor, options));
  PLIMSOLL_TRY(auto partial, PartialDirectory::create(options.out, PartialDirectory::Target::kNew,
                                                      ".partial", table_files::kMade));
  PLIMSOLL_TRY(const std::int64_t rows, fill(governor, options, partial.path(), readers, progress));
  PLIMSOLL_TRY_VOID(partial.finish());
  return rows;
}

}  // namespace plimsoll
