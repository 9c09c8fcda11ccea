// SPDX-License-Identifier: Apache-2.0
//
// Threads, Memory: see aio_transfers.h.
#include "os/aio_transfers.h"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "os/crash_point.h"
#include "os/file_faults.h"
#include "os/io_pool.h"

namespace plimsoll {
namespace {

constexpr std::size_t kLastFew = 16;  // Transfers that are waited for together.

// The kernel's calls; glibc has no wrappers for them.
long io_setup(unsigned events, aio_context_t* context) noexcept {
  return ::syscall(SYS_io_setup, events, context);
}
long io_destroy(aio_context_t context) noexcept {
  return ::syscall(SYS_io_destroy, context);
}
long io_submit(aio_context_t context, std::span<iocb*> list) noexcept {
  return ::syscall(SYS_io_submit, context, static_cast<long>(list.size()), list.data());
}
// `least` events, or those that came in `patience`.
long io_getevents(aio_context_t context, std::size_t least, std::span<io_event> events,
                  std::chrono::milliseconds patience) noexcept {
  timespec until{.tv_sec = patience.count() / 1000, .tv_nsec = patience.count() % 1000 * 1'000'000};
  return ::syscall(SYS_io_getevents, context, static_cast<long>(least),
                   static_cast<long>(events.size()), events.data(), &until);
}

std::size_t bytes_of(const IoRequest& request) noexcept {
  if (request.kind != IoKind::kReadParts) {
    return request.bytes.size();
  }
  std::size_t bytes = 0;
  for (const iovec& part : request.parts()) {
    bytes += part.iov_len;
  }
  return bytes;
}

std::uint16_t opcode_of(IoKind kind) noexcept {
  switch (kind) {
    case IoKind::kRead:
      return IOCB_CMD_PREAD;
    case IoKind::kReadParts:
      return IOCB_CMD_PREADV;
    case IoKind::kWrite:
      return IOCB_CMD_PWRITE;
    case IoKind::kSync:
    case IoKind::kWriteAndSync:
      break;
  }
  PLIMSOLL_CHECK(false, "a batch of reads and writes alone");
}

// What the kernel said of one transfer, unless a test has it said otherwise, or not at all.
struct Answer {
  bool told{true};
  bool whole{false};
};
Answer judge(const io_event& event, const IoRequest& request) noexcept {
  const bool writes = request.kind == IoKind::kWrite;
  if (writes) {
    crash_point("file.write.after");
  }
  const FaultVerdict fault = ask_file_fault(writes ? FileCall::kAioWrite : FileCall::kAioRead);
  const std::size_t asked = bytes_of(request);
  return {.told = !fault.lost,
          .whole = event.res == static_cast<std::int64_t>(asked) && !fault.fails &&
                   fault.bytes_max >= asked};
}

}  // namespace

// Transfers that the kernel has: by place, the request.
struct AioTransfers::UnderWay {
  std::array<std::size_t, kUnderWay> request{};
  std::array<bool, kUnderWay> taken{};
  std::array<std::uint8_t, kUnderWay> free{};  // A stack of places; the first `places` of it.
  std::size_t places{kUnderWay};

  UnderWay() {
    for (std::size_t i = 0; i < kUnderWay; ++i) {
      free[i] = static_cast<std::uint8_t>(kUnderWay - 1 - i);
    }
  }
  [[nodiscard]] std::size_t count() const { return kUnderWay - places; }
  void take(std::size_t place, std::size_t of) {
    request[place] = of;
    taken[place] = true;
    --places;
  }
  void end(std::size_t place) {
    taken[place] = false;
    free[places++] = static_cast<std::uint8_t>(place);
  }
};

// Hands requests [first, …) to the kernel, as many as there are places; returns how many it took.
std::size_t AioTransfers::submit(std::uint64_t context, std::span<const IoRequest> requests,
                                 std::size_t first, UnderWay& under_way) {
  std::array<iocb, kUnderWay> blocks{};
  std::array<iocb*, kUnderWay> list{};
  const std::size_t count = std::min(requests.size() - first, under_way.places);
  for (std::size_t i = 0; i < count; ++i) {
    const IoRequest& request = requests[first + i];
    iocb& block = blocks[i];
    block.aio_data = under_way.free[under_way.places - 1 - i];
    if (request.kind == IoKind::kWrite) {
      crash_point("file.write.before");
    }
    const bool parts = request.kind == IoKind::kReadParts;
    block.aio_lio_opcode = opcode_of(request.kind);
    block.aio_fildes = static_cast<std::uint32_t>(request.file->descriptor());
    block.aio_buf = reinterpret_cast<std::uint64_t>(request.bytes.data());
    block.aio_nbytes = parts ? request.parts().size() : request.bytes.size();
    block.aio_offset = request.offset;
    list[i] = &block;
  }
  const long answer = count == 0 ? 0 : io_submit(context, std::span(list).first(count));
  const std::size_t taken = answer < 0 ? 0 : static_cast<std::size_t>(answer);
  for (std::size_t i = 0; i < taken; ++i) {
    under_way.take(blocks[i].aio_data, first + i);
  }
  return taken;
}

AioTransfers::~AioTransfers() {
  for (const Context& context : contexts_) {
    if (context.id != 0) {
      io_destroy(context.id);
    }
  }
}

AioTransfers::Context* AioTransfers::take() {
  const MutexLock lock(mutex_);
  const auto free = std::find_if(contexts_.begin(), contexts_.end(),
                                 [](const Context& context) { return !context.taken; });
  if (refused_ || free == contexts_.end()) {
    return nullptr;
  }
  if (free->id == 0) {
    aio_context_t made = 0;
    if (io_setup(kUnderWay, &made) != 0) {
      refused_ = true;  // No such call, forbidden, or fs.aio-max-nr reached: not asked again.
      return nullptr;
    }
    free->id = made;
  }
  free->taken = true;
  return &*free;
}

void AioTransfers::give_back(Context& context) {
  const MutexLock lock(mutex_);
  context.taken = false;
}

bool AioTransfers::run(std::span<const IoRequest> requests,
                       const std::function<void(std::size_t, bool)>& ended) {
  Context* const context = take();
  if (context == nullptr) {
    return false;
  }
  std::array<io_event, kUnderWay> events;
  struct Ended {
    std::size_t request;
    bool whole;
  };
  std::array<Ended, kUnderWay> news;  // Not told yet.
  std::size_t news_count = 0;
  const auto tell = [&] {
    for (const Ended& one : std::span(news).first(std::exchange(news_count, 0))) {
      ended(one.request, one.whole);
    }
  };
  UnderWay under_way;
  for (std::size_t begun = 0; begun < requests.size() || under_way.count() > 0;) {
    begun += submit(context->id, requests, begun, under_way);
    tell();
    if (under_way.count() == 0) {
      ended(begun++, false);  // The kernel takes none at all.
      continue;
    }
    const bool last_few = begun == requests.size() && under_way.count() <= kLastFew;
    const std::size_t least = last_few ? under_way.count() : (under_way.count() + 1) / 2;
    const long came = io_getevents(context->id, least, events, patience_);
    PLIMSOLL_CHECK(came >= 0 || errno == EINTR, "events of a context that is ours");
    for (long i = 0; i < came; ++i) {
      const io_event& event = events[static_cast<std::size_t>(i)];
      const std::size_t request = under_way.request[event.data];
      const Answer answer = judge(event, requests[request]);
      if (!answer.told) {
        continue;
      }
      under_way.end(event.data);
      news[news_count++] = {request, answer.whole};
    }
    if (came == 0) {  // This waits until the kernel has ended them all, told or not.
      io_destroy(std::exchange(context->id, 0));
      for (std::size_t place = 0; place < kUnderWay; ++place) {
        if (under_way.taken[place]) {
          under_way.end(place);
          ended(under_way.request[place], false);
        }
      }
      for (; begun < requests.size(); ++begun) {
        ended(begun, false);
      }
    }
  }
  tell();
  give_back(*context);
  return true;
}

}  // namespace plimsoll
