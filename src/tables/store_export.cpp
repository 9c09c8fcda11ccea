// SPDX-License-Identifier: Apache-2.0
//
// A source yields blocks of (ids, bytes); a sink takes them in one pass per tensor.
#include "tables/store_export.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bfloat16.h"
#include "base/check.h"
#include "data/image_set_format.h"
#include "data/megatron.h"
#include "data/safetensors.h"
#include "data/token_set_format.h"
#include "os/file.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/graph_set.h"
#include "plimsoll/token_set.h"
#include "tables/describe.h"
#include "tables/describe_graphs.h"
#include "tables/describe_tables.h"
#include "tables/new_file.h"

namespace plimsoll {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kExportBytes = 1 << 20;

/// One tensor to export; `bytes` is its size per row. The first one is always the ids.
struct Column {
  TensorSpec spec{};
  std::int64_t bytes{0};
  int index{-1};  // In the feature store; −1: the ids, or the rows of an embedding store.
};

using Block =
    std::function<Result<void>(std::span<const std::int64_t>, std::span<const std::byte>)>;

/// What both kinds of store look like to an export.
class Source {
 public:
  virtual ~Source() = default;
  [[nodiscard]] virtual std::int64_t rows() const = 0;
  [[nodiscard]] virtual const std::vector<Column>& columns() const = 0;
  /// Visits every row in order with the bytes of one column (not of the ids).
  virtual Result<void> visit(const Column& column, const Block& block) = 0;
};

Column ids_column(std::int64_t rows) {
  return {{"ids", DType::kInt64, {rows}}, 8, -1};
}

/// The weights of a table at one commit; or of the rows that changed since an older one.
class EmbeddingSource final : public Source {
 public:
  /// `as_stored`: bfloat16 rows as such, else as float32.
  static Result<std::unique_ptr<Source>> open(Governor governor, const fs::path& directory,
                                              std::int64_t since, std::int64_t step,
                                              bool as_stored) {
    PLIMSOLL_TRY(const TableInfo info, EmbeddingStore::inspect(directory));
    EmbeddingStoreOptions how{.directory = directory,
                              .dim = info.dim,
                              .dtype = info.dtype,
                              .optimizer = {.kind = info.optimizer},
                              .init = info.init,
                              .layout = info.layout,
                              .at_step = step,
                              .pinned = true};
    PLIMSOLL_TRY(auto store, EmbeddingStore::open(governor, how));
    std::unique_ptr<EmbeddingSource> source(new EmbeddingSource(std::move(store)));
    std::int64_t rows = source->store_.rows();
    if (since >= 0) {
      how.at_step = since;
      PLIMSOLL_TRY(auto older, EmbeddingStore::open(governor, how));
      source->older_.emplace(std::move(older));
      rows = 0;  // The forms say how many rows come before the first of them.
      PLIMSOLL_TRY_VOID(
          source->each_block([&](std::span<const std::int64_t> ids, auto) -> Result<void> {
            rows += static_cast<std::int64_t>(ids.size());
            return {};
          }));
    }
    source->rows_ = rows;
    source->halves_ = as_stored && info.dtype == RowDType::kBFloat16;
    const DType dtype = source->halves_ ? DType::kBFloat16 : DType::kFloat32;
    source->columns_ = {ids_column(rows),
                        {{"rows", dtype, {rows, info.dim}}, dtype_bytes(dtype) * info.dim, -1}};
    return std::unique_ptr<Source>(std::move(source));
  }
  [[nodiscard]] std::int64_t rows() const override { return rows_; }
  [[nodiscard]] const std::vector<Column>& columns() const override { return columns_; }

  Result<void> visit(const Column& /*column*/, const Block& block) override {
    return each_block(block);
  }

 private:
  explicit EmbeddingSource(EmbeddingStore store) : store_(std::move(store)) {}

  Result<void> each_block(const Block& block) {
    const auto dim = static_cast<std::size_t>(store_.dim());
    const std::size_t width = dim + static_cast<std::size_t>(store_.state_floats());
    return store_.scan([&](std::span<const std::int64_t> ids, std::span<const std::uint32_t>,
                           std::span<const float> values) -> Result<void> {
      ids_.assign(ids.begin(), ids.end());
      weights_.resize(ids.size() * dim);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(i * width), dim,
                    weights_.begin() + static_cast<std::ptrdiff_t>(i * dim));
      }
      PLIMSOLL_TRY_VOID(keep_changed(dim));
      if (ids_.empty()) {
        return {};
      }
      if (!halves_) {
        return block(ids_, std::as_bytes(std::span(weights_)));
      }
      stored_.resize(weights_.size());
      std::transform(weights_.begin(), weights_.end(), stored_.begin(), nearest_bfloat16);
      return block(ids_, std::as_bytes(std::span(stored_)));
    });
  }

  // Takes the rows out of the block whose bits are those of the older commit.
  Result<void> keep_changed(std::size_t dim) {
    if (!older_) {
      return {};
    }
    before_.resize(weights_.size());
    PLIMSOLL_TRY_VOID(gather_older(dim));
    std::size_t kept = 0;
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      if (is_new_[i] != 0 ||
          std::memcmp(&before_[i * dim], &weights_[i * dim], dim * sizeof(float)) != 0) {
        ids_[kept] = ids_[i];
        std::memmove(&weights_[kept * dim], &weights_[i * dim], dim * sizeof(float));
        ++kept;
      }
    }
    ids_.resize(kept);
    weights_.resize(kept * dim);
    return {};
  }

  // The older commit's rows of the block, and which it has none of: they were inserted since.
  Result<void> gather_older(std::size_t dim) {
    is_new_.assign(ids_.size(), 0);
    auto all = older_->gather(ids_, before_);
    if (all || all.error().code != ErrorCode::kNotFound) {
      return all;
    }
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      const auto one = older_->gather({&ids_[i], 1}, {&before_[i * dim], dim});
      if (!one && one.error().code != ErrorCode::kNotFound) {
        return one;
      }
      is_new_[i] = one ? 0 : 1;
    }
    return {};
  }

  EmbeddingStore store_;
  std::optional<EmbeddingStore> older_;
  std::int64_t rows_{0};
  bool halves_{false};  // Shows bfloat16.
  std::vector<Column> columns_;
  std::vector<std::int64_t> ids_;  // One block of the scan, as are those below.
  std::vector<float> weights_;
  std::vector<float> before_;
  std::vector<std::uint16_t> stored_;
  std::vector<std::uint8_t> is_new_;
};

class FeatureSource final : public Source {
 public:
  static Result<std::unique_ptr<Source>> open(Governor governor, const fs::path& directory,
                                              const std::string& only) {
    PLIMSOLL_TRY(auto store, FeatureStore::open(governor, {.directory = directory}));
    std::unique_ptr<FeatureSource> source(new FeatureSource(std::move(store)));
    if (!only.empty()) {
      PLIMSOLL_TRY(const int index, source->store_.column(only));
      source->columns_ = {source->columns_[0],
                          source->columns_[static_cast<std::size_t>(index) + 1]};
    }
    for (const Column& column : source->columns_) {
      if (column.index >= 0 &&
          source->store_.info().columns[static_cast<std::size_t>(column.index)].ragged()) {
        return fail(ErrorCode::kInvalidArgument,
                    fmt::format("{}: column '{}' is ragged, which no form of export holds",
                                directory.string(), column.spec.name),
                    "name a column of fixed shape with --column");
      }
    }
    return std::unique_ptr<Source>(std::move(source));
  }
  [[nodiscard]] std::int64_t rows() const override { return store_.info().rows; }
  [[nodiscard]] const std::vector<Column>& columns() const override { return columns_; }

  Result<void> visit(const Column& column, const Block& block) override {
    const std::int64_t step =
        std::max<std::int64_t>(1, kExportBytes / std::max<std::int64_t>(1, column.bytes));
    std::vector<std::int64_t> ordinals;
    std::vector<std::int64_t> ids;
    std::vector<std::byte> bytes;
    for (std::int64_t first = 0; first < rows(); first += step) {
      const auto count = static_cast<std::size_t>(std::min(step, rows() - first));
      ordinals.resize(count);
      ids.resize(count);
      std::iota(ordinals.begin(), ordinals.end(), first);
      PLIMSOLL_TRY_VOID(store_.ids_of(ordinals, ids));
      bytes.resize(column.index < 0 ? 0 : count * static_cast<std::size_t>(column.bytes));
      if (column.index >= 0) {
        const std::span<std::byte> out{bytes};
        PLIMSOLL_TRY_VOID(store_.read_ordinals(ordinals, {&column.index, 1}, {&out, 1}));
      }
      PLIMSOLL_TRY_VOID(block(ids, bytes));
    }
    return {};
  }

 private:
  explicit FeatureSource(FeatureStore store) : store_(std::move(store)) {
    const FeatureInfo& info = store_.info();
    columns_ = {ids_column(info.rows)};
    for (std::size_t k = 0; k < info.columns.size(); ++k) {
      const ColumnSpec& spec = info.columns[k];
      std::vector<std::int64_t> shape{info.rows};
      shape.insert(shape.end(), spec.shape.begin(), spec.shape.end());
      columns_.push_back({{spec.name, spec.dtype, shape}, spec.bytes(), static_cast<int>(k)});
    }
  }
  FeatureStore store_;
  std::vector<Column> columns_;
};

/// Counts bytes over all passes for the caller's progress.
class Meter {
 public:
  Meter(const std::function<bool(std::int64_t, std::int64_t)>& report, std::int64_t total)
      : report_(report), total_(total) {}
  Result<void> add(std::size_t bytes) {
    done_ += static_cast<std::int64_t>(bytes);
    if (report_ && !report_(done_, total_)) {
      return fail(ErrorCode::kInvalidArgument, "cancelled");
    }
    return {};
  }

 private:
  const std::function<bool(std::int64_t, std::int64_t)>& report_;
  std::int64_t done_{0};
  std::int64_t total_;
};

/// One pass over the rows, giving the bytes of `column` to `write`.
template <class Write>
Result<void> pass(Source& source, const Column& column, Meter& meter, Write&& write) {
  return source.visit(
      column,
      [&](std::span<const std::int64_t> ids, std::span<const std::byte> bytes) -> Result<void> {
        const auto chosen = &column == &source.columns()[0] ? std::as_bytes(ids) : bytes;
        PLIMSOLL_TRY_VOID(write(chosen));
        return meter.add(chosen.size());
      });
}

std::int64_t total_bytes(const Source& source) {
  std::int64_t total = 0;
  for (const Column& column : source.columns()) {
    total += source.rows() * column.bytes;
  }
  return total;
}

Result<void> to_safetensors(Source& source, const fs::path& out, Meter& meter) {
  std::vector<TensorSpec> specs;
  for (const Column& column : source.columns()) {
    specs.push_back(column.spec);
  }
  PLIMSOLL_TRY(auto writer, SafetensorsWriter::create(out, specs));
  for (const Column& column : source.columns()) {
    const auto write = [&](std::span<const std::byte> bytes) { return writer.write(bytes); };
    PLIMSOLL_TRY_VOID(pass(source, column, meter, write));
  }
  return writer.finish();
}

Result<void> to_npy(Source& source, const fs::path& out, Meter& meter) {
  const Column& payload = source.columns().at(1);
  if (*npy_descriptor(payload.spec.dtype) == '\0') {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("NumPy has no {}", dtype_name(payload.spec.dtype)),
                "export to .safetensors");
  }
  auto ids_path = out;
  ids_path.replace_extension(".ids.npy");
  if (std::error_code status; fs::exists(ids_path, status)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} exists", ids_path.string()),
                "name a new file with --out");
  }
  PLIMSOLL_TRY(auto ids_file, NewFile::create(ids_path));
  PLIMSOLL_TRY(auto file, NewFile::create(out));
  PLIMSOLL_TRY_VOID(ids_file.write(npy_header(source.columns()[0].spec)));
  PLIMSOLL_TRY_VOID(file.write(npy_header(payload.spec)));
  const auto write_block = [&](std::span<const std::int64_t> ids,
                               std::span<const std::byte> bytes) -> Result<void> {
    PLIMSOLL_TRY_VOID(ids_file.write(std::as_bytes(ids)));
    PLIMSOLL_TRY_VOID(file.write(bytes));
    return meter.add(bytes.size() + ids.size() * sizeof(std::int64_t));
  };
  PLIMSOLL_TRY_VOID(source.visit(payload, write_block));
  PLIMSOLL_TRY_VOID(ids_file.finish());
  return file.finish();
}

template <class T>
void print_numbers(std::string& line, std::span<const std::byte> bytes) {
  for (std::size_t at = 0; at + sizeof(T) <= bytes.size(); at += sizeof(T)) {
    T value{};
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    fmt::format_to(std::back_inserter(line), ",{}", value);
  }
}

void print_row(std::string& line, DType dtype, std::span<const std::byte> row) {
  switch (dtype) {
    case DType::kFloat32:
      return print_numbers<float>(line, row);
    case DType::kFloat64:
      return print_numbers<double>(line, row);
    case DType::kInt64:
      return print_numbers<std::int64_t>(line, row);
    case DType::kInt32:
      return print_numbers<std::int32_t>(line, row);
    default:
      return print_numbers<std::uint8_t>(line, row);
  }
}

Result<void> to_csv(Source& source, const fs::path& out, Meter& meter) {
  const Column& payload = source.columns().at(1);
  const DType dtype = payload.spec.dtype;
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("column '{}' is {}, which .csv export does not print",
                            payload.spec.name, dtype_name(dtype)),
                "export to .safetensors");
  }
  PLIMSOLL_TRY(auto file, NewFile::create(out));
  std::string header = "id";
  for (std::int64_t k = 0; k < payload.bytes / dtype_bytes(dtype); ++k) {
    header += fmt::format(",{}_{}", payload.spec.name, k);
  }
  PLIMSOLL_TRY_VOID(file.write(header + "\n"));
  std::string text;
  const auto write_block = [&](std::span<const std::int64_t> ids,
                               std::span<const std::byte> bytes) -> Result<void> {
    text.clear();
    const auto width = static_cast<std::size_t>(payload.bytes);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      fmt::format_to(std::back_inserter(text), "{}", ids[i]);
      print_row(text, dtype, bytes.subspan(i * width, width));
      text += '\n';
    }
    PLIMSOLL_TRY_VOID(file.write(text));
    return meter.add(bytes.size() + ids.size() * sizeof(std::int64_t));
  };
  PLIMSOLL_TRY_VOID(source.visit(payload, write_block));
  return file.finish();
}

Result<std::unique_ptr<Source>> open_source(Governor governor, const ExportOptions& options,
                                            bool one_column) {
  const fs::path directory = store_directory(options.directory);
  if (is_embedding_store(directory)) {
    if (!options.column.empty() && options.column != "rows") {
      return fail(ErrorCode::kInvalidArgument, "an embedding store has no columns",
                  "leave --column out");
    }
    return EmbeddingSource::open(governor, directory, options.since, options.step, !one_column);
  }
  if (!is_feature_store(directory)) {
    return tl::unexpected(no_store_at(directory));
  }
  if (options.step >= 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: features do not change, so there is one of them for all steps",
                            directory.string()),
                "leave --step out");
  }
  if (options.since >= 0) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: features do not change, so there is nothing since step {}",
                            directory.string(), options.since),
                "leave --since out");
  }
  if (one_column && options.column.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: this form takes one column", options.out.string()),
                "name it with --column, or export to .safetensors");
  }
  return FeatureSource::open(governor, directory, options.column);
}

}  // namespace

Result<std::string> store_file_form(const fs::path& file, const std::string& format) {
  const std::string extension = file.extension().string();
  const std::string form = format.empty() && !extension.empty() ? extension.substr(1) : format;
  if (form != "safetensors" && form != "npy" && form != "csv") {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: no form of export by its name", file.string()),
                "name it .safetensors, .npy or .csv, or say --format");
  }
  return form;
}

bool is_megatron(const fs::path& file, const std::string& format) {
  return format == "megatron" ||
         (format.empty() && (file.extension() == ".idx" || file.extension() == ".bin"));
}

Result<std::int64_t> export_store(Governor governor, const ExportOptions& options,
                                  const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  if (is_token_set(options.directory)) {
    if (!is_megatron(options.out, options.format)) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: a token set is written in Megatron's form", options.directory.string()),
          "name the file .idx, or say format = megatron (--format megatron)");
    }
    return export_megatron(std::move(governor), options.directory, options.out, progress);
  }
  PLIMSOLL_TRY(const std::string form, store_file_form(options.out, options.format));
  std::error_code status;
  if (fs::exists(options.out, status)) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{} exists", options.out.string()),
                "name a new file with --out");
  }
  PLIMSOLL_TRY(const auto source, open_source(governor, options, form != "safetensors"));
  Meter meter(progress, total_bytes(*source));
  if (form == "safetensors") {
    PLIMSOLL_TRY_VOID(to_safetensors(*source, options.out, meter));
  } else if (form == "npy") {
    PLIMSOLL_TRY_VOID(to_npy(*source, options.out, meter));
  } else {
    PLIMSOLL_TRY_VOID(to_csv(*source, options.out, meter));
  }
  return source->rows();
}

Result<void> verify_store(const fs::path& directory,
                          const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  const fs::path store = store_directory(directory);
  if (is_embedding_store(store)) {
    return EmbeddingStore::verify(store, progress);
  }
  if (is_feature_store(store)) {
    return FeatureStore::verify(store, progress);
  }
  if (is_graph_set(store)) {
    Governor governor = Governor::current();
    if (!governor.valid()) {
      PLIMSOLL_TRY(governor, Governor::create({}));
    }
    PLIMSOLL_TRY(const GraphSet graphs,
                 GraphSet::open(governor, {.directory = store, .cache_bytes = 0}));
    return graphs.verify(progress);
  }
  if (is_token_set(store)) {
    PLIMSOLL_TRY(const TokenSet tokens, TokenSet::open(store));
    return tokens.verify(progress);
  }
  if (is_image_set(store)) {
    PLIMSOLL_TRY(const ImageSet images, ImageSet::open(store));
    return images.verify(progress);
  }
  return tl::unexpected(no_store_at(store));
}

}  // namespace plimsoll
