// SPDX-License-Identifier: Apache-2.0
//
// Threads, Memory: see aio_reads.h.
#include "os/aio_reads.h"

#include <algorithm>
#include <cerrno>

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "os/io_pool.h"

namespace plimsoll {
namespace {

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
long io_getevents(aio_context_t context, std::size_t least, std::span<io_event> events) noexcept {
  return ::syscall(SYS_io_getevents, context, static_cast<long>(least),
                   static_cast<long>(events.size()), events.data(), nullptr);
}

// Hands requests [first, …) to the kernel, as many as there are places; returns how many it took.
std::size_t submit(aio_context_t context, std::span<const IoRequest> requests, std::size_t first,
                   std::size_t places) {
  std::array<iocb, AioReads::kUnderWay> blocks{};
  std::array<iocb*, AioReads::kUnderWay> list{};
  const std::size_t count = std::min(requests.size() - first, places);
  for (std::size_t i = 0; i < count; ++i) {
    const IoRequest& request = requests[first + i];
    iocb& block = blocks[i];
    block.aio_data = first + i;
    block.aio_lio_opcode = IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<std::uint32_t>(request.file->descriptor());
    block.aio_buf = reinterpret_cast<std::uint64_t>(request.bytes.data());
    block.aio_nbytes = request.bytes.size();
    block.aio_offset = request.offset;
    list[i] = &block;
  }
  const long taken = count == 0 ? 0 : io_submit(context, std::span(list).first(count));
  return taken < 0 ? 0 : static_cast<std::size_t>(taken);
}

}  // namespace

AioReads::~AioReads() {
  for (const Context& context : contexts_) {
    if (context.id != 0) {
      io_destroy(context.id);
    }
  }
}

AioReads::Context* AioReads::take() {
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

void AioReads::give_back(Context& context) {
  const MutexLock lock(mutex_);
  context.taken = false;
}

bool AioReads::run(std::span<const IoRequest> requests,
                   const std::function<void(std::size_t)>& again) {
  Context* const context = take();
  if (context == nullptr) {
    return false;
  }
  std::array<io_event, kUnderWay> events;
  std::size_t begun = 0;
  std::size_t under_way = 0;
  while (begun < requests.size() || under_way > 0) {
    const std::size_t taken = submit(context->id, requests, begun, kUnderWay - under_way);
    begun += taken;
    under_way += taken;
    if (under_way == 0) {
      again(begun++);  // The kernel takes none at all.
      continue;
    }
    const std::size_t least = begun < requests.size() ? (under_way + 1) / 2 : under_way;
    const long ended = io_getevents(context->id, least, events);
    PLIMSOLL_CHECK(ended >= 0 || errno == EINTR, "events of a context that is ours");
    for (long i = 0; i < ended; ++i) {
      const io_event& event = events[static_cast<std::size_t>(i)];
      if (event.res != static_cast<std::int64_t>(requests[event.data].bytes.size())) {
        again(event.data);
      }
      --under_way;
    }
  }
  give_back(*context);
  return true;
}

}  // namespace plimsoll
