// SPDX-License-Identifier: Apache-2.0
//
// synth_cosir: threads fill chunks of rows, the caller's thread writes them in order.
//
// Reading order: include/plimsoll/synth.h, synth_model.h, this file.
//
// Threads: names pl-synth-0, …. Chunk c goes into buffer c mod (threads + 1) once the chunk that
//          was there has been written; a row does not depend on who computes it.
// Memory:  as the header says, plus the model's matrices.
#include "plimsoll/synth.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <numeric>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "base/mutex.h"
#include "data/disk_room.h"
#include "data/synth_model.h"
#include "memory/slab.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kRowsAtOnceBytes = 4 << 20;
constexpr std::int64_t kDimMax = 65'536;
constexpr std::int64_t kClassesMax = 1 << 20;

Result<void> check_options(const CosirSynthOptions& options) {
  const auto inside = [](std::int64_t value, std::int64_t low, std::int64_t high) {
    return value >= low && value <= high;
  };
  if (inside(options.rows, 1, 1LL << 32) && inside(options.image_dim, 2, kDimMax) &&
      inside(options.text_dim, 2, kDimMax) && inside(options.classes, 0, kClassesMax) &&
      inside(options.threads, 1, 64)) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              fmt::format("rows = {} must be positive, image_dim = {} and text_dim = {} 2 to {}, "
                          "classes = {} 0 to {}, threads = {} 1 to 64",
                          options.rows, options.image_dim, options.text_dim, kDimMax,
                          options.classes, kClassesMax, options.threads));
}

// Hands chunks to the filling threads and, in order, to the writer.
class ChunkRing {
 public:
  struct Buffer {
    std::span<float> image{};
    std::span<float> text{};
    std::int64_t ready{-1};  // The chunk it holds, complete.
  };

  ChunkRing(Slab& slab, std::int64_t buffers, std::int64_t chunks, std::int64_t image_floats,
            std::int64_t text_floats)
      : chunks_(chunks) {
    for (std::int64_t b = 0; b < buffers; ++b) {
      buffers_.push_back({slab.take<float>(image_floats), slab.take<float>(text_floats), -1});
    }
  }

  // The next chunk to fill, or −1 when there is none left. Waits for its buffer.
  std::int64_t claim() {
    MutexLock lock(mutex_);
    while (!stopped_ && claimed_ < chunks_ &&
           claimed_ >= written_ + static_cast<std::int64_t>(buffers_.size())) {
      changed_.wait(mutex_);
    }
    return stopped_ || claimed_ >= chunks_ ? -1 : claimed_++;
  }
  void filled(std::int64_t chunk) {
    {
      MutexLock lock(mutex_);
      buffer(chunk).ready = chunk;
    }
    changed_.notify_all();
  }
  const Buffer& wait_for(std::int64_t chunk) {
    MutexLock lock(mutex_);
    while (buffer(chunk).ready != chunk) {
      changed_.wait(mutex_);
    }
    return buffer(chunk);
  }
  void written(std::int64_t chunk) {
    {
      MutexLock lock(mutex_);
      written_ = chunk + 1;
    }
    changed_.notify_all();
  }
  void stop() {
    {
      MutexLock lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
  }
  // Spans never change after construction; `ready` does, under the mutex.
  Buffer& buffer(std::int64_t chunk) {
    return buffers_[static_cast<std::size_t>(chunk) % buffers_.size()];
  }

 private:
  const std::int64_t chunks_;
  std::vector<Buffer> buffers_;
  Mutex mutex_;
  CondVar changed_;
  std::int64_t claimed_ PLIMSOLL_GUARDED_BY(mutex_){0};
  std::int64_t written_ PLIMSOLL_GUARDED_BY(mutex_){0};
  bool stopped_ PLIMSOLL_GUARDED_BY(mutex_){false};
};

// The filling threads; stops and joins them when destroyed.
class Fillers {
 public:
  Fillers(const SynthModel& model, ChunkRing& ring, const CosirSynthOptions& options,
          std::int64_t chunk_rows)
      : ring_(ring) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // Signals belong to the program's own threads.
    try {
      for (int i = 0; i < options.threads; ++i) {
        threads_.emplace_back([&model, &ring, &options, chunk_rows, i] {
          fill(model, ring, options, chunk_rows, i);
        });
      }
    } catch (...) {  // Those that did start would wait for ever.
      ring.stop();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Fillers() { ring_.stop(); }
  Fillers(const Fillers&) = delete;
  Fillers& operator=(const Fillers&) = delete;

 private:
  static void fill(const SynthModel& model, ChunkRing& ring, const CosirSynthOptions& options,
                   std::int64_t chunk_rows, int number) {
    pthread_setname_np(pthread_self(), fmt::format("pl-synth-{}", number).c_str());
    for (std::int64_t chunk = ring.claim(); chunk >= 0; chunk = ring.claim()) {
      const std::int64_t first = chunk * chunk_rows;
      const std::int64_t rows = std::min(chunk_rows, options.rows - first);
      const ChunkRing::Buffer& buffer = ring.buffer(chunk);
      model.fill(first, buffer.image.first(static_cast<std::size_t>(rows * options.image_dim)),
                 buffer.text.first(static_cast<std::size_t>(rows * options.text_dim)));
      ring.filled(chunk);
    }
  }

  ChunkRing& ring_;
  std::vector<std::jthread> threads_;  // Last: joined before the rest is destroyed.
};

}  // namespace

Result<FeatureInfo> synth_cosir(Governor governor, const CosirSynthOptions& options,
                                const std::function<bool(std::int64_t, std::int64_t)>& progress) {
  PLIMSOLL_TRY_VOID(check_options(options));
  const std::int64_t row_bytes = 4 * (options.image_dim + options.text_dim);
  PLIMSOLL_TRY_VOID(check_disk_room(governor, options.out, options.rows * (row_bytes + 2)));
  PLIMSOLL_TRY(FeatureWriter writer,
               FeatureWriter::create(governor,
                                     {.directory = options.out,
                                      .columns = {{"image", DType::kFloat32, {options.image_dim}},
                                                  {"text", DType::kFloat32, {options.text_dim}}}}));
  const std::int64_t model_bytes =
      4 * (SynthModel::kLatent * (options.image_dim + options.text_dim + 32 + options.classes));
  PLIMSOLL_TRY(Lease model_lease, governor.reserve(Tag::kOther, model_bytes));
  const SynthModel model(options.seed, options.image_dim, options.text_dim, options.classes);

  const std::int64_t chunk_rows =
      std::min(options.rows, std::max<std::int64_t>(1, kRowsAtOnceBytes / row_bytes));
  const std::int64_t chunks = (options.rows + chunk_rows - 1) / chunk_rows;
  const std::int64_t buffers = std::min<std::int64_t>(options.threads + 1, chunks);
  PLIMSOLL_TRY(Slab slab, Slab::create(governor, Tag::kOther,
                                       buffers * (chunk_rows * row_bytes + 128) + chunk_rows * 8));
  const auto ids = slab.take<std::int64_t>(chunk_rows);
  ChunkRing ring(slab, buffers, chunks, chunk_rows * options.image_dim,
                 chunk_rows * options.text_dim);
  const Fillers fillers(model, ring, options, chunk_rows);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t first = chunk * chunk_rows;
    const std::int64_t rows = std::min(chunk_rows, options.rows - first);
    const ChunkRing::Buffer& buffer = ring.wait_for(chunk);
    std::iota(ids.begin(), ids.end(), first);
    const auto count = static_cast<std::size_t>(rows);
    const std::array<std::span<const std::byte>, 2> columns{
        std::as_bytes(buffer.image.first(count * static_cast<std::size_t>(options.image_dim))),
        std::as_bytes(buffer.text.first(count * static_cast<std::size_t>(options.text_dim)))};
    PLIMSOLL_TRY_VOID(writer.append(ids.first(count), columns));
    ring.written(chunk);
    if (progress && !progress(first + rows, options.rows)) {
      return fail(ErrorCode::kInvalidArgument, options.out.string() + ": cancelled");
    }
  }
  PLIMSOLL_TRY_VOID(writer.finish());
  return FeatureStore::inspect(options.out);
}

}  // namespace plimsoll
