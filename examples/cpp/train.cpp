// SPDX-License-Identifier: Apache-2.0
//
// A training program on the installed library: a small network over features on disk and trainable
// rows that are larger than the memory limit. Killed at any moment and started again, it goes on
// from its last commit and ends with the same bits. docs/how-to/cpp.md says how it is built.
//
//   train FOLDER [--memory-limit 1GiB] [--items 2000000] [--steps 200] [--commit-every 20]
#include <torch/torch.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plimsoll/bytes.h"
#include "plimsoll/embedding_store.h"
#include "plimsoll/feature_store.h"
#include "plimsoll/governor.h"
#include "plimsoll/loader.h"
#include "plimsoll/replace_file.h"
#include "plimsoll/torch.h"

namespace {

namespace fs = std::filesystem;
using plimsoll::EmbeddingStore;
using plimsoll::Governor;
using plimsoll::Result;

constexpr std::int64_t kSamples = 20'000;
constexpr std::int64_t kWidth = 32;  // Features of a sample.
constexpr std::int64_t kDim = 128;   // Weights of an item's row.
constexpr std::int64_t kBatch = 256;
constexpr int kStopped = 75;  // The exit status of a stop before memory ran out: start it again.

struct Options {
  fs::path folder{};
  std::string memory_limit{"1GiB"};
  std::int64_t items{2'000'000};
  std::int64_t steps{200};
  std::int64_t commit_every{20};
};

Options parse(std::span<char*> words) {
  Options options;
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string word = words[i];
    const auto value = [&] { return std::string(i + 1 < words.size() ? words[++i] : ""); };
    if (word == "--memory-limit") {
      options.memory_limit = value();
    } else if (word == "--items") {
      options.items = std::atoll(value().c_str());
    } else if (word == "--steps") {
      options.steps = std::atoll(value().c_str());
    } else if (word == "--commit-every") {
      options.commit_every = std::atoll(value().c_str());
    } else {
      options.folder = word;
    }
  }
  return options;
}

std::span<float> floats_of(const at::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

/// Items of a thousand samples: a sample is about one item.
std::vector<std::int64_t> items_of(std::int64_t first_sample, std::int64_t items) {
  std::vector<std::int64_t> ids(1000);
  for (std::int64_t& id : ids) {
    id = first_sample++ * (items / kSamples);
  }
  return ids;
}

/// Samples of a made-up task, written once: the store is there whole or not at all.
void write_features(const Governor& governor, const fs::path& folder, std::int64_t items) {
  plimsoll::FeatureWriterOptions options{.directory = folder};
  options.columns = {{.name = "x", .shape = {kWidth}}, {.name = "y"}};
  auto writer = plimsoll::FeatureWriter::create(governor, options).or_throw();
  for (std::int64_t begin = 0; begin < kSamples; begin += 1000) {
    const auto ids = items_of(begin, items);
    const at::Tensor x = torch::randn({1000, kWidth});
    const at::Tensor y = (x.sum(1) + 4 * torch::randn({1000}) > 0).to(at::kFloat);
    const std::vector<std::span<const std::byte>> columns{std::as_bytes(floats_of(x)),
                                                          std::as_bytes(floats_of(y))};
    writer.append(ids, columns).or_throw();
  }
  writer.finish().or_throw();
}

/// What is trained, and where it stands. A commit is the table's, then a file that names it.
struct Training {
  explicit Training(const Options& options) : file(options.folder / "model.pt") {}

  torch::nn::Sequential model{torch::nn::Linear(kWidth + kDim, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1)};
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-3)};
  std::int64_t step{0};
  plimsoll::LoaderState place{.seed = 7};  // Where the next batch begins.
  fs::path file;

  void commit(EmbeddingStore& rows) {
    rows.commit(step).or_throw();
    plimsoll::replace_file_with(file, [this](const fs::path& beside) -> Result<void> {
      torch::serialize::OutputArchive whole, of_model, of_optimizer;
      model->save(of_model);
      optimizer.save(of_optimizer);
      whole.write("model", of_model);
      whole.write("optimizer", of_optimizer);
      whole.write("place", torch::tensor({step, place.epoch, place.position}));
      whole.save_to(beside.string());
      return {};
    }).or_throw();
    std::printf("committed: step %lld\n", static_cast<long long>(step));
  }

  void restore() {
    torch::serialize::InputArchive whole, of_model, of_optimizer;
    whole.load_from(file.string());
    whole.read("model", of_model);
    whole.read("optimizer", of_optimizer);
    model->load(of_model);
    optimizer.load(of_optimizer);
    at::Tensor numbers;
    whole.read("place", numbers);
    step = numbers[0].item<std::int64_t>();
    place.epoch = numbers[1].item<std::int64_t>();
    place.position = numbers[2].item<std::int64_t>();
    std::printf("goes on at step %lld\n", static_cast<long long>(step));
  }

  void make_step(EmbeddingStore& rows, plimsoll::Batch taken) {
    const auto batch = std::make_shared<plimsoll::Batch>(std::move(taken));
    const at::Tensor x =
        plimsoll::tensor_over(batch->column(0), {batch->rows(), kWidth}, at::kFloat, batch);
    const at::Tensor y =
        plimsoll::tensor_over(batch->column(1), {batch->rows()}, at::kFloat, batch);
    at::Tensor vectors = torch::empty({batch->rows(), kDim});
    rows.gather(batch->ids(), floats_of(vectors)).or_throw();
    vectors.requires_grad_();
    const at::Tensor logits = model->forward(torch::cat({x, vectors}, 1)).squeeze(1);
    optimizer.zero_grad();
    torch::binary_cross_entropy_with_logits(logits, y).backward();
    rows.apply(batch->ids(), floats_of(vectors.grad())).or_throw();
    optimizer.step();
    ++step;
    place = batch->state_after();
  }
};

/// FNV-1a over the bits of the model and of every row that a sample has.
std::uint64_t digest(const Training& training, EmbeddingStore& rows) {
  std::uint64_t hash = 14695981039346656037ULL;
  const auto add = [&hash](std::span<const float> values) {
    for (const float value : values) {
      hash = (hash ^ std::bit_cast<std::uint32_t>(value)) * 1099511628211ULL;
    }
  };
  for (const at::Tensor& parameter : training.model->parameters()) {
    add(floats_of(parameter));
  }
  std::vector<float> values(1000 * kDim);
  for (std::int64_t begin = 0; begin < kSamples; begin += 1000) {
    rows.gather(items_of(begin, rows.rows()), values).or_throw();
    add(values);
  }
  return hash;
}

int train(const Options& options) {
  plimsoll::GovernorOptions limit{.memory_limit = options.memory_limit};
  limit.foreign_bytes = 96LL << 20;  // Code of LibTorch that is read in, and what it allocates.
  auto governor = Governor::create(limit).or_throw();
  plimsoll::TensorArena::attach(governor).or_throw();  // Tensors are leased from here on.
  plimsoll::make_deterministic(1).or_throw();
  torch::manual_seed(1);

  if (!fs::exists(options.folder / "features")) {
    write_features(governor, options.folder / "features", options.items);
  }
  torch::manual_seed(2);
  Training training(options);
  plimsoll::EmbeddingStoreOptions table{.directory = options.folder / "rows", .dim = kDim};
  table.rows = options.items;
  if (fs::exists(training.file)) {
    training.restore();
    table.at_step = training.step;
  } else {
    fs::remove_all(table.directory);  // Killed before its first commit was whole.
  }
  auto rows = EmbeddingStore::open(governor, table).or_throw();
  std::printf("rows: %s, the limit: %s\n",
              plimsoll::format_bytes(rows.rows() * (kDim + rows.state_floats()) * 4).c_str(),
              governor.limit().explain().c_str());

  auto features =
      plimsoll::FeatureStore::open(governor, {.directory = options.folder / "features"}).or_throw();
  const auto split = plimsoll::Split::create(governor, &features, {}).or_throw();
  plimsoll::LoaderOptions order{.batch_rows = kBatch, .start = training.place};
  auto loader = plimsoll::Loader::open(governor, &features, &split, order).or_throw();
  while (training.step < options.steps) {
    plimsoll::Batch batch;
    loader.next(batch).or_throw();
    training.make_step(rows, std::move(batch));
    const auto seen = governor.step_boundary();
    if (seen.stop || training.step % options.commit_every == 0 || training.step == options.steps) {
      training.commit(rows);
    }
    if (seen.stop) {
      std::fprintf(stderr, "memory is short: %s would do\n",
                   plimsoll::format_bytes(seen.needed_bytes).c_str());
      return kStopped;
    }
  }
  std::printf("digest %016llx\n", static_cast<unsigned long long>(digest(training, rows)));
  std::printf("peak %s\n",
              plimsoll::format_bytes(plimsoll::read_resident().or_throw().peak).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // What was printed before a kill is seen.
  ::setenv("MKL_CBWR", "COMPATIBLE", 0);     // The same bits wherever buffers lie.
  plimsoll::fix_heap();
  try {
    const Options options = parse({argv, static_cast<std::size_t>(argc)});
    if (options.folder.empty() || options.items < kSamples || options.commit_every < 1) {
      std::fprintf(stderr, "usage: train FOLDER [--memory-limit 1GiB] [--items N] [--steps N] …\n");
      return 2;
    }
    return train(options);
  } catch (const std::exception& error) {  // A refusal names the limit that would do.
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
