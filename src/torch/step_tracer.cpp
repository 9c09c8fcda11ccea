// SPDX-License-Identifier: Apache-2.0
//
// See step_tracer.h. Order here: operators' names, the tracer, planning.
#include "torch/step_tracer.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/mutex.h"
#include "plimsoll/torch.h"
#include "run/control.h"
#include "torch/tensor_arena.h"

namespace plimsoll {
namespace {

constexpr std::size_t kNamesMax = 65536;  // Further operators are told as "": index 0.
constexpr std::string_view kOptimizer = "Optimizer.step#";
constexpr std::string_view kEvaluate = "autograd::engine::evaluate_function: ";

// Names of operators, numbered in the order in which they first ran.
class OpNames {
 public:
  std::uint32_t index_of(const std::string& name) {
    MutexLock lock(mutex_);
    const auto found = indices_.find(name);
    if (found != indices_.end()) {
      return found->second;
    }
    if (names_.size() == kNamesMax) {
      return 0;
    }
    const auto index = static_cast<std::uint32_t>(names_.size());
    names_.emplace_back(name);
    indices_.emplace(name, index);
    return index;
  }
  [[nodiscard]] std::vector<std::string> names() {
    MutexLock lock(mutex_);
    return names_;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> names_ PLIMSOLL_GUARDED_BY(mutex_){""};
  std::unordered_map<std::string, std::uint32_t> indices_ PLIMSOLL_GUARDED_BY(mutex_);
};

std::atomic<OpNames*> tracing{nullptr};

// "torch::autograd::CppNode<plimsoll::(anonymous namespace)::Attend>" → "Attend": an autograd
// function of C++ by its own name.
std::string_view own_name(std::string_view name) {
  constexpr std::string_view kNode = "torch::autograd::CppNode<";
  if (name.substr(0, kNode.size()) == kNode && name.back() == '>') {
    const std::size_t last = name.rfind("::");
    name = name.substr(last + 2, name.size() - last - 3);
  }
  return name;
}

// What ran outside this operator.
struct Outer final : at::ObserverContext {
  explicit Outer(const TraceScope& scope) : before(scope) {}
  TraceScope before;
};

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  OpNames* names = tracing.load(std::memory_order_acquire);
  if (names == nullptr) {
    return nullptr;
  }
  TraceScope& scope = TraceScope::current();
  auto outer = std::make_unique<Outer>(scope);
  std::string_view name = function.name();
  if (function.scope() == at::RecordScope::USER_SCOPE) {
    if (name.substr(0, kOptimizer.size()) == kOptimizer) {
      scope.phase = StepPhase::kOptimizer;
    }
    return outer;  // What users name is no operator.
  }
  const bool evaluates = name.substr(0, kEvaluate.size()) == kEvaluate;
  if (evaluates || function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    name.remove_prefix(evaluates ? kEvaluate.size() : 0);
    scope.phase = StepPhase::kBackward;
    scope.op = 0;
  }
  if (scope.op == 0) {  // The outermost: aten::linear rather than the aten::addmm inside it.
    scope.op = names->index_of(std::string(own_name(name)));
  }
  return outer;
}

void leave(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
  if (context != nullptr) {
    TraceScope::current() = static_cast<Outer*>(context)->before;
  }
}

// Torch tells us of its operators, and the arena of its blocks, as long as this lives.
class Tracing {
 public:
  Tracing(TraceRing* ring, OpNames* names)
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback(&enter, &leave)
                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                         at::RecordScope::USER_SCOPE}))) {
    tracing.store(names, std::memory_order_release);
    tensor_arena_pages().trace(ring);
  }
  Tracing(const Tracing&) = delete;
  Tracing& operator=(const Tracing&) = delete;
  ~Tracing() {
    tensor_arena_pages().trace(nullptr);
    tracing.store(nullptr, std::memory_order_release);
    at::removeCallback(handle_);
    TraceScope::current() = {};
  }

 private:
  at::CallbackHandle handle_;
};

std::atomic<bool> busy{false};
struct OneAtATime {
  bool got{!busy.exchange(true)};
  OneAtATime() = default;
  OneAtATime(const OneAtATime&) = delete;
  OneAtATime& operator=(const OneAtATime&) = delete;
  ~OneAtATime() {
    if (got) {
      busy = false;
    }
  }
};

}  // namespace

Result<void> without_refusal(const std::function<Result<void>()>& work, const char* advice) {
  try {
    return work();
  } catch (const c10::OutOfMemoryError& refusal) {
    Error error = make_error(ErrorCode::kOverBudget, refusal.what_without_backtrace(), advice);
    error.tag = Tag::kTensor;
    return tl::unexpected(std::move(error));
  }
}

Result<StepTrace> trace_step(const StepSize& size, const std::function<Result<void>()>& step,
                             std::int64_t events_max) {
  ArenaPages& pages = tensor_arena_pages();
  const OneAtATime alone;
  if (!alone.got || !TensorArena::installed() || !pages.attached()) {
    return fail(ErrorCode::kInvalidArgument,
                alone.got ? "a step is traced while a Governor is attached to torch"
                          : "another step is being traced",
                "create the Governor after importing torch");
  }
  if (StopSignals::asked()) {
    return given_up("a plan");
  }
  TraceRing ring(events_max);
  OpNames names;
  TracedSteps traced;
  traced.size = size;
  traced.thread = TraceRing::this_thread();
  StepTrace measured;
  {
    TensorArena::purge();
    const Tracing tracer(&ring, &names);
    // Nothing else of this thread runs meanwhile; other threads' blocks are told apart.
    traced.live_at_begin = TensorArena::stats().live_bytes;
    PLIMSOLL_TRY_VOID(without_refusal(step, "the limit, or a smaller batch"));
    traced.second_begins = static_cast<std::int64_t>(ring.events().size());
    TensorArena::purge();
    TensorArena::reset_peak();
    const auto begin = std::chrono::steady_clock::now();
    PLIMSOLL_TRY_VOID(without_refusal(step, "the limit, or a smaller batch"));
    measured.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const ArenaStats stats = TensorArena::stats();
    measured.live_peak_bytes = stats.live_peak_bytes;
    measured.leased_peak_bytes = stats.leased_peak_bytes;
  }
  if (ring.events_lost() > 0) {
    return tl::unexpected(trace_too_long(size.rows, ring.events_max()));
  }
  traced.events = ring.events();
  traced.ops = names.names();
  PLIMSOLL_TRY(StepTrace trace, build_step_trace(traced, &arena_block_bytes));
  trace.live_peak_bytes = measured.live_peak_bytes;
  trace.leased_peak_bytes = measured.leased_peak_bytes;
  trace.seconds = measured.seconds;
  return trace;
}

std::int64_t left_for_tensors(const LedgerState& state) noexcept {
  const PoolState& tensors = state.pools[static_cast<std::size_t>(Tag::kTensor)];
  return std::max<std::int64_t>(
      0, state.free_bytes() + std::max(tensors.floor_bytes, tensors.leased_bytes));
}

Result<BatchPlan> plan_batch(const Governor& governor, PlanOptions options,
                             const std::function<Result<void>(const StepSize&)>& step) {
  TensorArena::purge();
  const LedgerState state = governor.state();
  if (options.available_bytes == 0) {
    options.available_bytes = left_for_tensors(state);
  }
  options.limit_bytes = state.limit_bytes;
  options.block_bytes = &arena_block_bytes;
  options.leased_bytes = &arena_leased_bytes;
  auto plan = plan_batch(
      [&step](const StepSize& size) -> Result<StepTrace> {
        return trace_step(size, [&] { return step(size); });
      },
      options);
  TensorArena::purge();
  return plan;
}

}  // namespace plimsoll
