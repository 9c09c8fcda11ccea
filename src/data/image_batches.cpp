// SPDX-License-Identifier: Apache-2.0
//
// ImageBatches: a queue of batches under way, in order. A worker takes an image of the first batch
// that has one left; where none has, it plans the next batch, if there is room for it.
//
// To plan is to read the rows' heads, which say how large the images are, and to lease a slab for
// their pixels. What is refused while other batches are ahead is tried again when one is taken.
// Reading order: include/plimsoll/image_batches.h, this file.
//
// Threads: one mutex guards the queue; nothing is read, decoded or leased under it.
// Memory:  as the header says.
#include "plimsoll/image_batches.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/core.h>

#include "base/check.h"
#include "base/mutex.h"
#include "data/image_set_format.h"
#include "memory/slab.h"
#include "os/background_thread.h"
#include "os/blocked_signals.h"
#include "plimsoll/sample_order.h"

namespace plimsoll {
namespace {

constexpr std::uint64_t kHeldOutRowsSeed = 0x68656C64ULL;  // As for rows of tokens.
constexpr int kDecodersMost = 256;
constexpr std::size_t kBatchesAhead = 64;  // However small their images are.

// A batch under way. Guarded by the queue's mutex, but for what a worker was given to fill.
struct BatchUnderWay {
  ImageBatch batch{};
  std::vector<ImagePlace> places{};  // Of all images, in order.
  std::vector<std::span<std::uint8_t>> into{};
  std::vector<std::int64_t> of_row{};
  std::int64_t bytes{0};
  std::size_t begun{0};  // Images that somebody has taken.
  std::size_t done{0};
  std::optional<Error> error{};

  [[nodiscard]] bool ready() const noexcept { return error || done == places.size(); }
};

// What f() gives, or what it throws as an error: a thread has nobody to throw to.
template <class F>
auto caught(F&& f) noexcept -> decltype(f()) {
  try {
    return f();
  } catch (const Exception& exception) {
    return tl::unexpected(exception.error());
  } catch (const std::exception& exception) {
    return fail(ErrorCode::kInternal, exception.what());
  }
}

Error of_row(Error error, std::int64_t row) {
  if (error.detail) {
    error.detail =
        std::make_shared<const std::string>(fmt::format("row {}: {}", row, *error.detail));
  }
  return error;
}

}  // namespace

class ImageBatches::Impl {
 public:
  Impl(Governor governor, const ImageSet* set, const ImageBatchesOptions& options)
      : governor_(std::move(governor)), set_(set), options_(options), planned_(options.place) {}
  ~Impl() {
    {
      const MutexLock lock(mutex_);
      stopped_ = true;
    }
    work_.notify_all();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> start();
  Result<ImageBatch> next();
  Result<void> seek(const ImagesPlace& place);
  [[nodiscard]] ImagesPlace place() const noexcept { return options_.place; }

 private:
  [[nodiscard]] std::int64_t rows() const noexcept {
    return options_.only_held_out ? options_.held_out : set_->rows() - options_.held_out;
  }
  [[nodiscard]] std::int64_t row(std::int64_t i) const;
  [[nodiscard]] ImagesPlace behind(const ImagesPlace& place) const noexcept;
  Result<std::shared_ptr<BatchUnderWay>> plan(const ImagesPlace& place, std::int64_t room);
  Result<void> decode(const ImagePlace& place, std::span<std::uint8_t> pixels,
                      std::vector<std::byte>& encoded) const;
  [[nodiscard]] bool may_plan() const PLIMSOLL_REQUIRES(mutex_);
  void put(Result<std::shared_ptr<BatchUnderWay>> made, bool alone) PLIMSOLL_REQUIRES(mutex_);
  void work();

  Governor governor_;
  const ImageSet* set_;
  ImageBatchesOptions options_;
  Lease work_lease_;

  mutable Mutex mutex_;
  CondVar work_;   // There may be something to do.
  CondVar ready_;  // A batch may be ready.
  std::deque<std::shared_ptr<BatchUnderWay>> queue_ PLIMSOLL_GUARDED_BY(mutex_);
  std::int64_t queued_bytes_ PLIMSOLL_GUARDED_BY(mutex_){0};
  ImagesPlace planned_ PLIMSOLL_GUARDED_BY(mutex_);         // Of the batch that is planned next.
  std::int64_t generation_ PLIMSOLL_GUARDED_BY(mutex_){0};  // Counts seeks.
  bool planning_ PLIMSOLL_GUARDED_BY(mutex_){false};
  bool refused_ PLIMSOLL_GUARDED_BY(mutex_){false};  // Until a batch is taken.
  bool stopped_ PLIMSOLL_GUARDED_BY(mutex_){false};
  std::vector<std::jthread> threads_;
};

std::int64_t ImageBatches::Impl::row(std::int64_t i) const {
  if (options_.held_out == 0) {
    return i;
  }
  const SampleOrder order(set_->rows(), kHeldOutRowsSeed, 0);  // The last of it are held out.
  return order.at(options_.only_held_out ? set_->rows() - options_.held_out + i : i);
}

ImagesPlace ImageBatches::Impl::behind(const ImagesPlace& place) const noexcept {
  const std::int64_t position = place.position + options_.batch_size;
  return position < rows() ? ImagesPlace{place.epoch, position} : ImagesPlace{place.epoch + 1, 0};
}

// Errors: kOverBudget, too, where its pixels are more than `room`.
Result<std::shared_ptr<BatchUnderWay>> ImageBatches::Impl::plan(const ImagesPlace& place,
                                                                std::int64_t room) {
  auto made = std::make_shared<BatchUnderWay>();
  ImageBatch& batch = made->batch;
  batch.place = place;
  batch.ends_epoch = behind(place).epoch != place.epoch;
  const SampleOrder order(rows(), options_.seed, place.epoch);
  const std::int64_t end = std::min(rows(), place.position + options_.batch_size);
  for (std::int64_t at = place.position; at < end; ++at) {
    ImageBatchRow& out = batch.rows.emplace_back();
    out.row = row(options_.shuffle ? order.at(at) : at);
    PLIMSOLL_TRY(ImageRow found, set_->row(out.row));
    out.messages = std::move(found.messages);
    for (const ImagePlace& image : found.images) {
      out.sizes.push_back({.width = image.width, .height = image.height});
      made->bytes += out.sizes.back().pixel_bytes();
      made->places.push_back(image);
      made->of_row.push_back(out.row);
    }
  }
  if (made->bytes == 0) {
    return made;
  }
  if (made->bytes > room) {
    return fail(ErrorCode::kOverBudget, "no room in the queue");  // Nobody is told.
  }
  PLIMSOLL_TRY(Slab slab, Slab::create(governor_, Tag::kLoader, made->bytes));
  const auto held = std::make_shared<Slab>(std::move(slab));  // Shared by whoever has pixels of it.
  for (ImageBatchRow& out : batch.rows) {
    for (const ImageSize& size : out.sizes) {
      made->into.push_back(held->take<std::uint8_t>(size.pixel_bytes(), 1));
      out.pixels.push_back(made->into.back());
    }
  }
  batch.pixels = held;
  return made;
}

Result<void> ImageBatches::Impl::decode(const ImagePlace& place, std::span<std::uint8_t> pixels,
                                        std::vector<std::byte>& encoded) const {
  resize_anew(encoded, place.bytes);
  PLIMSOLL_TRY_VOID(set_->read(place, encoded));
  PLIMSOLL_TRY(const ImageInfo info, read_image_info(encoded, INT64_MAX));
  if (info.width != place.width || info.height != place.height) {
    return fail(ErrorCode::kCorrupt, "an image of another size than its row says",
                "import the files again");
  }
  return decode_image(encoded, info, pixels);
}

bool ImageBatches::Impl::may_plan() const {
  return !planning_ && !refused_ &&
         (queue_.empty() || (!queue_.back()->error && queued_bytes_ < options_.queue_bytes &&
                             queue_.size() < kBatchesAhead));
}

// Takes what was planned while the queue was unlocked. A refusal is an error only where no batch
// is ahead, and none was when it was planned.
void ImageBatches::Impl::put(Result<std::shared_ptr<BatchUnderWay>> made, bool alone) {
  if (!made && made.error().code == ErrorCode::kOverBudget && !alone) {
    refused_ = !queue_.empty();
    return;
  }
  if (made) {
    queued_bytes_ += (*made)->bytes;
    queue_.push_back(std::move(*made));
  } else {
    queue_.push_back(std::make_shared<BatchUnderWay>());
    queue_.back()->error = std::move(made).error();
  }
  planned_ = behind(planned_);
}

void ImageBatches::Impl::work() {
  enter_background("pl-image");
  std::vector<std::byte> encoded;
  MutexLock lock(mutex_);
  while (!stopped_) {
    const auto with_work = std::find_if(queue_.begin(), queue_.end(), [](const auto& one) {
      return !one->error && one->begun < one->places.size();
    });
    if (with_work != queue_.end()) {
      const auto under_way = *with_work;
      const std::size_t image = under_way->begun++;
      lock.unlock();
      auto done =
          caught([&] { return decode(under_way->places[image], under_way->into[image], encoded); });
      lock.lock();
      ++under_way->done;
      if (!done && !under_way->error) {
        under_way->error = of_row(std::move(done).error(), under_way->of_row[image]);
      }
      ready_.notify_all();
    } else if (may_plan()) {
      planning_ = true;
      const bool alone = queue_.empty();
      const std::int64_t room = alone ? INT64_MAX : options_.queue_bytes - queued_bytes_;
      const std::int64_t generation = generation_;
      const ImagesPlace place = planned_;
      lock.unlock();
      auto made = caught([&] { return plan(place, room); });
      lock.lock();
      planning_ = false;
      if (generation == generation_) {
        put(std::move(made), alone);
      }
      ready_.notify_all();  // It may have failed, or have no images.
      work_.notify_all();
    } else {
      work_.wait(mutex_);
    }
  }
}

Result<void> ImageBatches::Impl::start() {
  PLIMSOLL_TRY(work_lease_,
               governor_.reserve(Tag::kLoader, options_.threads * set_->info().work_bytes_max));
  const BlockedSignals blocked;
  for (int i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
  return {};
}

Result<ImageBatch> ImageBatches::Impl::next() {
  std::optional<Error> failed;
  {
    MutexLock lock(mutex_);
    while (queue_.empty() || !queue_.front()->ready()) {
      ready_.wait(mutex_);
    }
    const auto first = queue_.front();
    if (!first->error) {
      queue_.pop_front();
      queued_bytes_ -= first->bytes;
      refused_ = false;
      options_.place = behind(first->batch.place);
      lock.unlock();
      work_.notify_all();
      return std::move(first->batch);
    }
    failed = first->error;
  }
  PLIMSOLL_TRY_VOID(seek(options_.place));  // Tried again when it is asked for again.
  return tl::unexpected(std::move(*failed));
}

Result<void> ImageBatches::Impl::seek(const ImagesPlace& place) {
  if (place.epoch < 0 || place.position < 0 || place.position >= rows()) {
    return fail(ErrorCode::kInvalidArgument,
                fmt::format("place: there is no position {} of {} rows", place.position, rows()),
                "give what state said, with the same options");
  }
  {
    const MutexLock lock(mutex_);
    queue_.clear();  // Whoever decodes into one of them holds it.
    queued_bytes_ = 0;
    planned_ = options_.place = place;
    refused_ = false;
    ++generation_;
  }
  work_.notify_all();
  return {};
}

ImageBatches::ImageBatches(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
ImageBatches::ImageBatches(ImageBatches&&) noexcept = default;
ImageBatches& ImageBatches::operator=(ImageBatches&&) noexcept = default;
ImageBatches::~ImageBatches() = default;

Result<ImageBatches> ImageBatches::open(Governor governor, const ImageSet* set,
                                        const ImageBatchesOptions& options) {
  const auto wrong = [](const char* option, std::int64_t value, const char* why) {
    return fail(ErrorCode::kInvalidArgument, fmt::format("{}: {} {}", option, value, why));
  };
  if (set->rows() == 0) {
    return fail(ErrorCode::kInvalidArgument, "the image set has no rows");
  }
  if (options.batch_size < 1) {
    return wrong("batch_size", options.batch_size, "is below 1");
  }
  if (options.threads < 1 || options.threads > kDecodersMost) {
    return wrong("threads", options.threads, "is not 1 to 256");
  }
  if (options.queue_bytes < 0) {
    return wrong("queue_bytes", options.queue_bytes, "is below 0");
  }
  if (options.held_out < 0 || options.held_out >= set->rows() ||
      (options.only_held_out && options.held_out == 0)) {
    return wrong("held_out", options.held_out, "rows leave none, or none to hold out");
  }
  auto impl = std::make_unique<Impl>(std::move(governor), set, options);
  PLIMSOLL_TRY_VOID(impl->seek(options.place));
  PLIMSOLL_TRY_VOID(impl->start());
  return ImageBatches(std::move(impl));
}

Result<ImageBatch> ImageBatches::next() {
  return impl_->next();
}
ImagesPlace ImageBatches::place() const noexcept {
  return impl_->place();
}
Result<void> ImageBatches::seek(const ImagesPlace& place) {
  return impl_->seek(place);
}

}  // namespace plimsoll
