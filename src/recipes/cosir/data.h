// SPDX-License-Identifier: Apache-2.0
//
// The data of a `cosir` run: features, split, rows and batches, opened within the limit.
//
// Reading order: this file, cosir.cpp. Each part states its own memory; open_data() decides the
// sizes that the options leave open.
//
// Threads: single-owner; the parts run their own.
// Memory:  the features' slab, the rows' slab, the loader's ring.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plimsoll/embedding_store.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/loader.h"
#include "recipes/cosir/config.h"
#include "recipes/cosir/eval.h"

namespace plimsoll::cosir {

/// Bytes given to each part: as the options say, or shares of what is free.
struct DataBytes {
  std::int64_t store{0};
  std::int64_t cache{0};
  std::int64_t queue{0};
};

/// What the parts take of what is free when they are opened: as the options say, or shares of it.
struct DataShares {
  std::int64_t cache_set{0};    ///< By its option; 0: a share. As store_set.
  std::int64_t cache_whole{0};  ///< More than everything is never used.
  std::int64_t store_set{0};
  std::int64_t store_least{0};
  std::int64_t store_useful{0};  ///< With every row in RAM.
  std::int64_t split{0};
  std::int64_t queue{0};

  [[nodiscard]] std::int64_t cache(std::int64_t free_bytes) const noexcept;
  [[nodiscard]] std::int64_t store(std::int64_t free_bytes) const noexcept;
  /// What is left of `free_bytes` for tensors once all are open.
  [[nodiscard]] std::int64_t left(std::int64_t free_bytes) const noexcept;
  /// The fewest free bytes, in whole MiB, that leave `tensor_bytes`.
  [[nodiscard]] std::int64_t free_for(std::int64_t tensor_bytes) const noexcept;
};

/// What a run of these options will take, told before anything of it is open; from above.
/// Errors: as FeatureStore::inspect() and EmbeddingStore::plan(); kOverBudget when store_bytes,
/// cache_bytes or queue_bytes is too small whatever the limit.
Result<DataShares> shares_of(const CosirConfig& config);

/// Bytes of tensors.
struct TensorNeeds {
  std::int64_t step{0};
  std::int64_t evaluation{0};
};

/// What a step and an evaluation of these options may need; from above.
/// Errors: as FeatureStore::inspect().
Result<TensorNeeds> tensors_at_most(const CosirConfig& config);

/// How the data is opened: for a new run, from a commit, or to look at alone.
struct DataOptions {
  std::filesystem::path embeddings{};
  std::int64_t at_step{-1};  ///< −1: a new table, or the newest commit.
  bool loader{true};         ///< False: evaluation alone. No batches, and nothing is written.
};

class Data {
 public:
  /// Errors: kInvalidArgument for data that is no set of image-text pairs; those of the parts.
  static Result<std::unique_ptr<Data>> open(const Governor& governor, const CosirConfig& config,
                                            const DataOptions& options);
  ~Data();

  [[nodiscard]] FeatureStore& features() { return *features_; }
  [[nodiscard]] EmbeddingStore& rows() { return *rows_; }
  [[nodiscard]] Loader& loader() { return *loader_; }
  [[nodiscard]] const Split& split() const { return *split_; }
  [[nodiscard]] const DataBytes& bytes() const { return bytes_; }
  [[nodiscard]] const DataShares& shares() const { return shares_; }
  [[nodiscard]] std::int64_t image_dim() const { return dims_[0]; }
  [[nodiscard]] std::int64_t text_dim() const { return dims_[1]; }

  /// The batch's features as float32; of float32 columns without copying.
  struct BatchTensors {
    at::Tensor image, text, groups;
  };
  BatchTensors tensors(const std::shared_ptr<Batch>& batch) const;

  /// Rows of a batch, [n, label_dim], not yet requiring grad.
  Result<at::Tensor> conditions(std::span<const std::int64_t> ids);

  /// The held-out pairs, at most `pairs_max`; borrows this.
  PairSource held_out(std::int64_t pairs_max);
  /// The training rows; borrows this.
  TrainedRows trained();

 private:
  Data() = default;
  Result<void> open_features(const Governor& governor, const CosirConfig& config);
  Result<void> open_rows(const Governor& governor, const CosirConfig& config,
                         const DataOptions& options);
  Result<at::Tensor> read(int side, const std::vector<std::int64_t>& ordinals);

  std::int64_t label_dim_{0};
  DataBytes bytes_{};
  DataShares shares_{};
  std::array<int, 2> columns_{};  // Indices of "image" and "text".
  std::array<DType, 2> dtypes_{};
  std::array<std::int64_t, 2> dims_{};
  std::unique_ptr<FeatureStore> features_;
  std::unique_ptr<Split> split_;
  std::unique_ptr<EmbeddingStore> rows_;
  std::unique_ptr<Loader> loader_;
};

/// Groups held out: the option's number, or 5,000 pairs' worth, at most a fifth of the groups.
[[nodiscard]] std::int64_t held_out_groups(const FeatureInfo& info, const CosirConfig& config);

/// The rows' table as the options describe it.
[[nodiscard]] EmbeddingStoreOptions row_options(const CosirConfig& config);

}  // namespace plimsoll::cosir
