// SPDX-License-Identifier: Apache-2.0
//
// Opening features, split, rows and loader; reading batches and samples of them as tensors.
//
// Threads: single-owner.   Memory: see cosir_data.h.
#include "recipes/cosir/data.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/npy_header.h"
#include "data/loader_ring.h"
#include "memory/admission.h"
#include "os/file.h"
#include "plimsoll/bytes.h"
#include "plimsoll/torch.h"
#include "store/embedding_format.h"
#include "store/id_index.h"

namespace plimsoll::cosir {
namespace {

constexpr std::array<const char*, 2> kColumns{"image", "text"};
constexpr std::int64_t kIdsAtOnce = 2048;
constexpr std::int64_t kRowsAtOnce = 256;  // Of a request to the rows, though batches be smaller.
constexpr std::int64_t kHeldOutPairs = 5000;
constexpr std::int64_t kStoreShare = 4;  // Of what is free: a quarter for the rows,
constexpr std::int64_t kCacheShare = 8;  // an eighth for the features.
constexpr std::int64_t kCacheLeast = 8LL << 20;
constexpr std::int64_t kMiB = 1LL << 20;
constexpr std::int64_t kPhase2Bytes = 40LL << 20;  // Its classifier and representatives.
constexpr std::int64_t kSlotsBesideThreads = 4;    // Of the loader's ring, from above.

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat64:
      return at::kDouble;
    default:
      return at::kFloat;
  }
}

// An .npy of int64 beside the table: the ids of the training pairs. Removed when done with.
class IdsFile {
 public:
  static Result<IdsFile> write(FeatureStore& features, const Split& split,
                               const std::filesystem::path& path) {
    IdsFile made;
    made.path_ = path;
    PLIMSOLL_TRY(File file, File::open(path, FileMode::kCreate));
    const std::int64_t rows = split.train_rows();
    const std::string header = npy_header("<i8", std::array{rows});
    PLIMSOLL_TRY_VOID(file.write_at(0, std::as_bytes(std::span(header))));
    auto at = static_cast<std::int64_t>(header.size());
    std::vector<std::int64_t> ordinals;
    std::vector<std::int64_t> ids;
    for (std::int64_t begin = 0; begin < rows; begin += kIdsAtOnce) {
      ordinals.clear();
      for (std::int64_t i = begin; i < std::min(rows, begin + kIdsAtOnce); ++i) {
        ordinals.push_back(split.train_ordinal(i));
      }
      ids.resize(ordinals.size());
      PLIMSOLL_TRY_VOID(features.ids_of(ordinals, ids));
      PLIMSOLL_TRY_VOID(file.write_at(at, std::as_bytes(std::span(ids))));
      at += static_cast<std::int64_t>(ids.size() * sizeof(ids[0]));
    }
    return made;
  }
  IdsFile() = default;
  IdsFile(IdsFile&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  IdsFile& operator=(IdsFile&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }
  ~IdsFile() {
    std::error_code ignored;
    if (!path_.empty()) {
      std::filesystem::remove(path_, ignored);
    }
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

std::int64_t DataShares::cache(std::int64_t free_bytes) const noexcept {
  return cache_set > 0 ? cache_set
                       : std::clamp(free_bytes / kCacheShare, std::min(kCacheLeast, cache_whole),
                                    std::max(kCacheLeast, cache_whole));
}

std::int64_t DataShares::store(std::int64_t free_bytes) const noexcept {
  return store_set > 0 ? store_set
                       : std::clamp(free_bytes / kStoreShare, store_least,
                                    std::max(store_least, store_useful));
}

std::int64_t DataShares::left(std::int64_t free_bytes) const noexcept {
  const std::int64_t after = free_bytes - cache(free_bytes) - split;
  return after - store(after) - queue;
}

std::int64_t DataShares::free_for(std::int64_t tensor_bytes) const noexcept {
  std::int64_t enough = kMiB;
  while (left(enough) < tensor_bytes) {
    enough *= 2;
  }
  for (std::int64_t least = 0; enough - least > kMiB;) {  // left() rises with what is free.
    const std::int64_t middle = (least + enough) / 2 / kMiB * kMiB;
    (left(middle) < tensor_bytes ? least : enough) = middle;
  }
  return enough;
}

Data::~Data() = default;

std::int64_t held_out_groups(const FeatureInfo& info, const CosirConfig& config) {
  const std::int64_t groups = info.groups > 0 ? info.groups : info.rows;
  if (config.holdout >= 0) {
    return config.holdout;
  }
  const std::int64_t worth =
      (kHeldOutPairs * groups + info.rows - 1) / std::max<std::int64_t>(1, info.rows);
  return std::min(worth, groups / 5);
}

EmbeddingStoreOptions row_options(const CosirConfig& config) {
  EmbeddingStoreOptions options;
  options.dim = config.label_dim;
  options.dtype = config.label_dtype == "bfloat16" ? RowDType::kBFloat16 : RowDType::kFloat32;
  options.optimizer.kind = config.label_optimizer == "adagrad"       ? RowOptimizer::kAdagrad
                           : config.label_optimizer == "adamw_fresh" ? RowOptimizer::kAdamWFresh
                                                                     : RowOptimizer::kAdamW;
  options.optimizer.learning_rate = static_cast<float>(config.label_lr);
  options.optimizer.weight_decay = static_cast<float>(config.label_weight_decay);
  options.init.kind = config.label_init == "zeros"     ? RowInitKind::kZeros
                      : config.label_init == "uniform" ? RowInitKind::kUniform
                                                       : RowInitKind::kNormal;
  options.init.scale = static_cast<float>(config.label_init_scale);
  options.init.seed = seed_for(static_cast<std::uint64_t>(config.seed), Purpose::kRows);
  options.order_seed = seed_for(static_cast<std::uint64_t>(config.seed), Purpose::kOrder);
  options.batch_rows = std::max(config.batch_size, kRowsAtOnce);
  options.io_threads = static_cast<int>(config.io_threads);
  options.compute_threads = static_cast<int>(std::max<std::int64_t>(1, config.compute_threads));
  return options;
}

namespace {

// What rows in any order take when all of them are in RAM, frames' own bytes included.
std::int64_t bytes_in_ram(const EmbeddingStoreOptions& options, std::int64_t rows) {
  const std::int64_t slots = options.optimizer.kind == RowOptimizer::kAdagrad ? 1 : 2;
  const std::int64_t weight = options.dtype == RowDType::kBFloat16 ? 2 : 4;
  return rows * (24 + options.dim * (weight + 4 * slots)) * 5 / 4;
}

// In any order rows that are in RAM stay there; in sample order all of them go to the disk and come
// back once an epoch, at its bandwidth. Which it is changes no bit of what is computed.
Result<RowLayout> choose_layout(const Governor& governor, const CosirConfig& config,
                                const EmbeddingStoreOptions& options) {
  if (config.label_layout != "auto") {
    return config.label_layout == "any_order" ? RowLayout::kAnyOrder : RowLayout::kSampleOrder;
  }
  PLIMSOLL_TRY(const SlabPlan any, EmbeddingStore::plan(options));
  EmbeddingStoreOptions in_order = options;
  in_order.layout = RowLayout::kSampleOrder;
  PLIMSOLL_TRY(const SlabPlan ordered, EmbeddingStore::plan(in_order));
  const std::int64_t bytes =
      config.store_bytes > 0
          ? config.store_bytes
          : std::max(governor.state().free_bytes() / kStoreShare, any.floor_bytes);
  const bool all_fit = any.floor_bytes + bytes_in_ram(options, options.rows) <= bytes;
  return all_fit || ordered.floor_bytes > bytes ? RowLayout::kAnyOrder : RowLayout::kSampleOrder;
}

// What the index of a table's ids takes at its smallest, however they are kept.
std::int64_t index_bytes_most(std::int64_t rows) {
  const IdIndexInfo pages{.rows = rows, .dense = false};
  IdIndexInfo spans = pages;
  spans.spans = rows / IdFingerprint::kSpanRowsLeast;
  return round_to_block(std::max(IdIndex::memory_bytes(pages, 2), IdIndex::memory_bytes(spans, 2)));
}

// An option's own number of bytes that is less than its part can do with: no limit mends that.
Result<void> enough_given(const CosirConfig& config, const FeatureInfo& info,
                          std::int64_t store_least) {
  BatchRingPlan ring;
  ring.batch_rows = config.batch_size;
  for (const ColumnSpec& column : info.columns) {
    if (std::find(kColumns.begin(), kColumns.end(), column.name) != kColumns.end()) {
      ring.column_row_bytes.push_back(column.bytes());
    }
  }
  const auto check = [&config](Tag tag, const char* name, const char* advice, std::int64_t given,
                               std::int64_t least) -> Result<void> {
    if (given == 0 || given >= least) {
      return {};
    }
    return tl::unexpected(below_floor(tag, config.data, name, advice, given, least));
  };
  PLIMSOLL_TRY_VOID(check(Tag::kFeature, "cache_bytes", "raise cache_bytes", config.cache_bytes,
                          info.floor_bytes));
  PLIMSOLL_TRY_VOID(
      check(Tag::kEmbedding, "store_bytes", "raise store_bytes", config.store_bytes, store_least));
  return check(Tag::kLoader, "queue_bytes", "raise queue_bytes, or lower the batch size",
               config.queue_bytes, 2 * ring.slot_bytes());
}

}  // namespace

Result<DataShares> shares_of(const CosirConfig& config) {
  PLIMSOLL_TRY(const auto info, FeatureStore::inspect(config.data));
  EmbeddingStoreOptions options = row_options(config);
  options.rows = info.rows;
  options.directory = config.out.empty() ? "." : config.out;
  PLIMSOLL_TRY(SlabPlan any, EmbeddingStore::plan(options));
  options.layout = RowLayout::kSampleOrder;
  PLIMSOLL_TRY(SlabPlan ordered, EmbeddingStore::plan(options));
  // Planned with dense ids, as nobody knows yet which pairs are held out.
  const bool all = info.dense_ids && held_out_groups(info, config) == 0;
  const std::int64_t index = all ? 0 : index_bytes_most(info.rows);
  any.floor_bytes += index;
  ordered.floor_bytes += index;
  const bool in_order = config.label_layout == "sample_order";
  PLIMSOLL_TRY_VOID(enough_given(config, info, in_order ? ordered.floor_bytes : any.floor_bytes));
  DataShares shares;
  shares.cache_set = config.cache_bytes;
  shares.cache_whole = info.disk_bytes + kMiB;
  shares.store_set = config.store_bytes;
  shares.store_least = std::max(any.floor_bytes, ordered.floor_bytes);
  shares.store_useful = shares.store_least + bytes_in_ram(options, info.rows);
  shares.split = info.rows + kMiB;
  const std::int64_t row_bytes = info.disk_bytes / std::max<std::int64_t>(1, info.rows) + 64;
  const std::int64_t slots = config.loader_threads + kSlotsBesideThreads;
  shares.queue =
      std::max(config.queue_bytes, slots * (std::max(config.batch_size, kRowsAtOnce) * row_bytes)) +
      kMiB;
  return shares;
}

Result<TensorNeeds> tensors_at_most(const CosirConfig& config) {
  PLIMSOLL_TRY(const auto info, FeatureStore::inspect(config.data));
  std::int64_t features = 0;
  std::int64_t widest = 0;
  for (const ColumnSpec& column : info.columns) {
    const std::int64_t width = column.shape.size() == 1 ? column.shape[0] : 0;
    features += width;
    widest = std::max(widest, width);
  }
  const std::int64_t dim = config.dim > 0 ? config.dim : std::max<std::int64_t>(widest, 256);
  const std::int64_t widths = features + 2 * dim;
  const bool planned = config.batch_size == 0;  // "auto" traces steps of some hundred rows.
  const std::int64_t rows = std::min(planned ? kRowsAtOnce : config.batch_size, info.rows);
  TensorNeeds needs;
  // Of every row its features, outputs and their gradients as float32, and the [B, B] table.
  needs.step =
      (planned ? 36 : 14) * kMiB + rows * 4 * (3 * widths + 8 * config.label_dim) + 5 * rows * rows;
  needs.step += config.projections == "true" || config.dim > 0 ? features * dim * 4 * 5 : 0;
  needs.step += config.phase2_epochs > 0 ? kPhase2Bytes : 0;
  needs.evaluation =
      14 * kMiB + std::min(config.eval_pairs, info.rows) * widths * 4 + rows * widths * 4;
  return needs;
}

Result<void> Data::open_features(const Governor& governor, const CosirConfig& config) {
  PLIMSOLL_TRY(const auto info, FeatureStore::inspect(config.data));
  if (info.rows < 2) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} pairs; training compares at least two", config.data, info.rows),
                "choose another --data");
  }
  shares_.cache_set = config.cache_bytes;
  shares_.cache_whole = info.disk_bytes + kMiB;
  bytes_.cache = shares_.cache(governor.state().free_bytes());
  PLIMSOLL_TRY(auto store,
               FeatureStore::open(governor, {.directory = config.data,
                                             .cache_bytes = bytes_.cache,
                                             .io_threads = static_cast<int>(config.io_threads)}));
  features_ = std::make_unique<FeatureStore>(std::move(store));
  for (std::size_t side = 0; side < 2; ++side) {
    PLIMSOLL_TRY(columns_[side], features_->column(kColumns[side]));
    const ColumnSpec& spec = features_->info().columns[static_cast<std::size_t>(columns_[side])];
    dtypes_[side] = spec.dtype;
    const bool real = spec.dtype == DType::kFloat32 || spec.dtype == DType::kFloat16 ||
                      spec.dtype == DType::kBFloat16 || spec.dtype == DType::kFloat64;
    if (!real || spec.shape.size() != 1) {
      return fail(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: column '{}' is {} with {} dimensions; cosir wants one vector of "
                      "floats per pair",
                      config.data, kColumns[side], dtype_name(spec.dtype), spec.shape.size()),
          "write it with plimsoll import cosir");
    }
    dims_[side] = spec.shape[0];
  }
  return {};
}

// One row per training pair, in the order of their ranks: the loader's order is then the table's.
Result<void> Data::open_rows(const Governor& governor, const CosirConfig& config,
                             const DataOptions& how) {
  EmbeddingStoreOptions options = row_options(config);
  options.directory = how.embeddings;
  options.at_step = how.at_step;
  options.pinned = !how.loader;
  const bool create = how.at_step < 0 && how.loader;
  const bool all = split_->held_out_rows() == 0 && features_->info().dense_ids;
  IdsFile ids;
  if (create || all) {
    options.rows = split_->train_rows();
  }
  if (create && !all) {
    auto path = how.embeddings;
    path += ".ids.npy";
    PLIMSOLL_TRY(ids, IdsFile::write(*features_, *split_, path));
    options.ids_file = path;
  }
  if (create) {
    PLIMSOLL_TRY(options.layout, choose_layout(governor, config, options));
  } else {
    PLIMSOLL_TRY(const TableInfo table, EmbeddingStore::inspect(options.directory));
    options.layout = table.layout;
  }
  shares_.store_set = config.store_bytes;
  if (shares_.store_set == 0) {
    PLIMSOLL_TRY(const SlabPlan plan, EmbeddingStore::plan(options));
    shares_.store_least = plan.floor_bytes;
    shares_.store_useful = plan.floor_bytes + bytes_in_ram(options, split_->train_rows());
  }
  options.store_bytes = shares_.store(governor.state().free_bytes());
  bytes_.store = options.store_bytes;
  PLIMSOLL_TRY(auto rows, EmbeddingStore::open(governor, options));
  rows_ = std::make_unique<EmbeddingStore>(std::move(rows));
  return {};
}

Result<std::unique_ptr<Data>> Data::open(const Governor& governor, const CosirConfig& config,
                                         const DataOptions& options) {
  std::unique_ptr<Data> data{new Data};
  data->label_dim_ = config.label_dim;
  PLIMSOLL_TRY_VOID(data->open_features(governor, config));
  const auto seed = static_cast<std::uint64_t>(config.seed);
  const std::int64_t free = governor.state().free_bytes();
  PLIMSOLL_TRY(auto split,
               Split::create(governor, data->features_.get(),
                             {.held_out_groups = held_out_groups(data->features_->info(), config),
                              .seed = seed_for(seed, Purpose::kSplit)}));
  data->split_ = std::make_unique<Split>(std::move(split));
  data->shares_.split = free - governor.state().free_bytes();
  PLIMSOLL_TRY_VOID(data->open_rows(governor, config, options));
  if (options.loader) {
    LoaderOptions how;
    how.columns = {kColumns[0], kColumns[1]};
    how.batch_rows = config.batch_size;
    how.queue_bytes = config.queue_bytes;
    how.threads = static_cast<int>(config.loader_threads);
    how.drop_last = config.drop_last;
    how.start.seed = seed_for(seed, Purpose::kOrder);
    PLIMSOLL_TRY(auto loader,
                 Loader::open(governor, data->features_.get(), data->split_.get(), how));
    data->loader_ = std::make_unique<Loader>(std::move(loader));
    data->bytes_.queue = data->loader_->slots() * data->loader_->slot_bytes();
    data->shares_.queue = data->bytes_.queue + kMiB;  // And a batch of ordinals.
  }
  return data;
}

Data::BatchTensors Data::tensors(const std::shared_ptr<Batch>& batch) const {
  const auto side = [&](std::size_t k) {
    return tensor_over(batch->column(static_cast<int>(k)), {batch->rows(), dims_[k]},
                       scalar_type(dtypes_[k]), batch)
        .to(at::kFloat);
  };
  auto groups = at::empty({batch->rows()}, at::kLong);
  std::copy(batch->groups().begin(), batch->groups().end(), groups.data_ptr<std::int64_t>());
  return {side(0), side(1), groups};
}

Result<at::Tensor> Data::conditions(std::span<const std::int64_t> ids) {
  auto c = at::empty({static_cast<std::int64_t>(ids.size()), label_dim_}, at::kFloat);
  PLIMSOLL_TRY_VOID(rows_->gather(ids, {c.data_ptr<float>(), static_cast<std::size_t>(c.numel())}));
  return c;
}

Result<at::Tensor> Data::read(int side, const std::vector<std::int64_t>& ordinals) {
  const auto k = static_cast<std::size_t>(side);
  auto raw =
      at::empty({static_cast<std::int64_t>(ordinals.size()), dims_[k]}, scalar_type(dtypes_[k]));
  const std::span<std::byte> out{static_cast<std::byte*>(raw.data_ptr()), raw.nbytes()};
  PLIMSOLL_TRY_VOID(features_->read_ordinals(ordinals, {&columns_[k], 1}, {&out, 1}));
  return raw.to(at::kFloat);
}

PairSource Data::held_out(std::int64_t pairs_max) {
  const auto ordinals = [this](const std::vector<std::int64_t>& pairs) {
    std::vector<std::int64_t> list;
    for (const std::int64_t pair : pairs) {
      list.push_back(split_->held_out_ordinal(pair));
    }
    return list;
  };
  PairSource source;
  source.pairs = std::min(pairs_max, split_->held_out_rows());
  source.group = [this](std::int64_t pair) {
    return split_->group_of(split_->held_out_ordinal(pair));
  };
  source.images = [this, ordinals](const auto& pairs) { return read(0, ordinals(pairs)); };
  source.texts = [this, ordinals](const auto& pairs) { return read(1, ordinals(pairs)); };
  return source;
}

TrainedRows Data::trained() {
  const auto ordinals = [this](const std::vector<std::int64_t>& ranks) {
    std::vector<std::int64_t> list;
    for (const std::int64_t rank : ranks) {
      list.push_back(split_->train_ordinal(rank));
    }
    return list;
  };
  TrainedRows source;
  source.rows = split_->train_rows();
  source.conditions = [this, ordinals](const auto& ranks) -> Result<at::Tensor> {
    std::vector<std::int64_t> ids(ranks.size());
    PLIMSOLL_TRY_VOID(features_->ids_of(ordinals(ranks), ids));
    return conditions(ids);
  };
  source.read = [this, ordinals,
                 rows = source.conditions](const auto& ranks) -> Result<TrainedRows::Block> {
    TrainedRows::Block block;
    const auto list = ordinals(ranks);
    PLIMSOLL_TRY(block.image, read(0, list));
    PLIMSOLL_TRY(block.text, read(1, list));
    PLIMSOLL_TRY(block.conditions, rows(ranks));
    return block;
  };
  return source;
}

}  // namespace plimsoll::cosir
