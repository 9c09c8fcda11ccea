// SPDX-License-Identifier: Apache-2.0
//
// A stack machine without the one instruction that makes pickle dangerous: to call what is named.
//
// Threads: see pickle_reader.h.   Memory: see pickle_reader.h.
#include "data/pickle_reader.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "data/pickle_opcodes.h"

namespace plimsoll {
namespace {

constexpr std::int64_t kPickleLeaseStep = 1 << 20;
constexpr std::int64_t kOpsBetweenChecks = 256;
constexpr std::int64_t kOpsBetweenSteps = 1 << 16;
// What a node takes beside its text and items: with its reference counts and the allocator's own.
constexpr auto kPickleNodeBytes = static_cast<std::int64_t>(sizeof(PickleNode) + 32);
constexpr auto kItemBytes = static_cast<std::int64_t>(2 * sizeof(PickleValue));  // They double.
constexpr std::int64_t kMemoBytes = kItemBytes + 64;

constexpr std::array<std::pair<std::string_view, TorchType>, 10> kStorages{
    {{"torch FloatStorage", TorchType::kFloat32},
     {"torch DoubleStorage", TorchType::kFloat64},
     {"torch HalfStorage", TorchType::kFloat16},
     {"torch BFloat16Storage", TorchType::kBFloat16},
     {"torch LongStorage", TorchType::kInt64},
     {"torch IntStorage", TorchType::kInt32},
     {"torch ShortStorage", TorchType::kInt16},
     {"torch CharStorage", TorchType::kInt8},
     {"torch ByteStorage", TorchType::kUint8},
     {"torch BoolStorage", TorchType::kBool}}};

// Globals that may be "called", as we do it, beside the storages and records.
constexpr std::string_view kOrderedDict = "collections OrderedDict";
constexpr std::string_view kRebuildTensor = "torch._utils _rebuild_tensor";
constexpr std::string_view kRebuildTensor2 = "torch._utils _rebuild_tensor_v2";
constexpr std::string_view kNumpyDtype = "numpy dtype";
constexpr std::string_view kNumpyScalar = "numpy.core.multiarray scalar";
constexpr std::string_view kNumpyScalar2 = "numpy._core.multiarray scalar";

bool is_known(std::string_view name) {
  for (const auto known :
       {kOrderedDict, kRebuildTensor, kRebuildTensor2, kNumpyDtype, kNumpyScalar, kNumpyScalar2}) {
    if (name == known) {
      return true;
    }
  }
  return std::any_of(kStorages.begin(), kStorages.end(),
                     [name](const auto& storage) { return storage.first == name; });
}

}  // namespace

std::int64_t torch_type_bytes(TorchType type) noexcept {
  switch (type) {
    case TorchType::kFloat64:
    case TorchType::kInt64:
      return 8;
    case TorchType::kFloat32:
    case TorchType::kInt32:
      return 4;
    case TorchType::kFloat16:
    case TorchType::kBFloat16:
    case TorchType::kInt16:
      return 2;
    case TorchType::kInt8:
    case TorchType::kUint8:
    case TorchType::kBool:
      break;
  }
  return 1;
}

std::int64_t TorchTensor::elements() const noexcept {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < dims; ++i) {
    count *= shape[i];
  }
  return count;
}

std::string_view PickleValue::text() const noexcept {
  return node ? std::string_view{node->text} : std::string_view{};
}

const std::vector<PickleValue>& PickleValue::items() const noexcept {
  static const std::vector<PickleValue> kNothing;
  return node ? node->items : kNothing;
}

const TorchTensor& PickleValue::tensor() const noexcept {
  static const TorchTensor kNothing;
  return node && node->tensor ? *node->tensor : kNothing;
}

const PickleValue* PickleValue::find(std::string_view key) const noexcept {
  if (kind != PickleKind::kDict) {
    return nullptr;
  }
  const auto& all = items();
  for (std::size_t i = 0; i + 1 < all.size(); i += 2) {
    if (all[i].kind == PickleKind::kText && all[i].text() == key) {
      return &all[i + 1];
    }
  }
  return nullptr;
}

PickleNode::PickleNode(std::int64_t* total) noexcept : total_(total) {
  charge(kPickleNodeBytes);
}

void PickleNode::charge(std::int64_t bytes) noexcept {
  charged_ += bytes;
  *total_ += bytes;
}

PickleNode::~PickleNode() {
  *total_ -= charged_;
  // What this node held goes to a list that the outermost destructor works off.
  thread_local std::vector<std::vector<PickleValue>>* unfinished = nullptr;
  if (items.empty()) {
    return;
  }
  if (unfinished != nullptr) {
    unfinished->push_back(std::move(items));
    return;
  }
  std::vector<std::vector<PickleValue>> list;
  unfinished = &list;
  list.push_back(std::move(items));
  while (!list.empty()) {
    const std::vector<PickleValue> some = std::move(list.back());
    list.pop_back();
  }
  unfinished = nullptr;
}

struct Pickle::State {
  Lease lease{};
  std::int64_t held_bytes{0};
  std::unordered_map<std::uint32_t, PickleValue> memo{};
  PickleValue value{};
  ~State() {
    value = {};
    for (auto& [place, remembered] : memo) {  // Every cycle goes through what is remembered.
      if (remembered.node) {
        const auto undone = std::exchange(remembered.node->items, {});
      }
    }
    memo.clear();
  }
};

Pickle::Pickle(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Pickle::Pickle(Pickle&&) noexcept = default;
Pickle::~Pickle() = default;
const PickleValue& Pickle::value() const noexcept {
  return state_->value;
}

// ---- The machine ----

class PickleMachine {
 public:
  PickleMachine(Governor governor, PickleBytes bytes, const PickleOptions& options)
      : bytes_(std::move(bytes)),
        options_(options),
        governor_(std::move(governor)),
        state_(std::make_unique<Pickle::State>()) {}

  Result<Pickle> run();

 private:
  using Op = PickleOp;
  Result<void> find_recalled();
  Result<void> execute(const PickleInstruction& op);
  Result<void> collect(const PickleInstruction& op);
  Result<void> remember(std::uint32_t place);
  Result<void> recall(std::uint32_t place);
  Result<void> global(std::string_view module, std::string_view name);
  Result<void> persistent();
  Result<void> reduce();
  Result<void> build();
  Result<void> new_object();
  Result<PickleValue> tensor(const PickleValue& arguments);
  Result<PickleValue> numpy_scalar(const PickleValue& arguments);
  Result<void> check_memory();
  Result<PickleValue> pop();
  Result<std::size_t> pop_mark();
  Result<void> add_to(PickleKind kind, std::size_t from);
  void push(PickleValue value) { stack_.push_back(std::move(value)); }
  [[nodiscard]] PickleValue make(PickleKind kind, std::string_view text = {});
  void give(PickleNode& node, PickleValue item) const;
  [[nodiscard]] tl::unexpected<Error> bad(std::string_view what) const;

  PickleBytes bytes_;
  const PickleOptions& options_;
  Governor governor_;
  std::unique_ptr<Pickle::State> state_;
  std::vector<PickleValue> stack_;
  std::vector<std::size_t> marks_;
  std::vector<std::uint32_t> recalled_;  // Places of the memo that are asked for, ascending.
  std::uint32_t memoized_{0};
};

tl::unexpected<Error> PickleMachine::bad(std::string_view what) const {
  return fail(
      ErrorCode::kCorrupt,
      fmt::format("{}: {}, at byte {} of the pickle", options_.name, what, bytes_.position()),
      options_.advice);
}

PickleValue PickleMachine::make(PickleKind kind, std::string_view text) {
  PickleValue value{.kind = kind, .node = std::make_shared<PickleNode>(&state_->held_bytes)};
  value.node->text = text;
  value.node->charge(static_cast<std::int64_t>(text.size()));
  return value;
}

void PickleMachine::give(PickleNode& node, PickleValue item) const {
  node.items.push_back(std::move(item));
  node.charge(kItemBytes);
}

Result<void> PickleMachine::check_memory() {
  const std::int64_t held =
      state_->held_bytes + static_cast<std::int64_t>(stack_.capacity() * sizeof(PickleValue)) +
      static_cast<std::int64_t>(marks_.capacity() * sizeof(std::size_t)) +
      static_cast<std::int64_t>(recalled_.capacity() * sizeof(std::uint32_t)) +
      static_cast<std::int64_t>(state_->memo.size()) * kMemoBytes;
  if (held <= state_->lease.bytes()) {
    return {};
  }
  const std::int64_t wanted = (held / kPickleLeaseStep + 1) * kPickleLeaseStep;
  if (state_->lease.bytes() == 0) {
    PLIMSOLL_TRY(state_->lease, governor_.reserve(Tag::kOther, wanted));
    return {};
  }
  return state_->lease.grow(wanted);
}

// Which places are asked for again; the values of all others need not be kept.
Result<void> PickleMachine::find_recalled() {
  std::int64_t count = 0;
  for (;;) {
    PLIMSOLL_TRY(const PickleInstruction op, bytes_.next());
    if (op.op == Op::kGet) {
      recalled_.push_back(static_cast<std::uint32_t>(op.number));
    }
    if (recalled_.size() == recalled_.capacity()) {  // Before it doubles, only once are kept.
      std::sort(recalled_.begin(), recalled_.end());
      recalled_.erase(std::unique(recalled_.begin(), recalled_.end()), recalled_.end());
      recalled_.reserve(std::max<std::size_t>(recalled_.size() * 2, 1024));
      PLIMSOLL_TRY_VOID(check_memory());
    }
    if (op.op == Op::kStop) {
      break;
    }
    if (++count % kOpsBetweenSteps == 0 && options_.step && !options_.step()) {
      return fail(ErrorCode::kInvalidArgument, options_.name + ": import cancelled");
    }
  }
  std::sort(recalled_.begin(), recalled_.end());
  recalled_.erase(std::unique(recalled_.begin(), recalled_.end()), recalled_.end());
  bytes_.rewind();
  return {};
}

Result<Pickle> PickleMachine::run() {
  PLIMSOLL_TRY_VOID(find_recalled());
  for (std::int64_t count = 1;; ++count) {
    PLIMSOLL_TRY(const PickleInstruction op, bytes_.next());
    if (op.op == Op::kStop) {
      break;
    }
    PLIMSOLL_TRY_VOID(execute(op));
    if (count % kOpsBetweenChecks == 0) {
      PLIMSOLL_TRY_VOID(check_memory());
    }
    if (count % kOpsBetweenSteps == 0 && options_.step && !options_.step()) {
      return fail(ErrorCode::kInvalidArgument, options_.name + ": import cancelled");
    }
  }
  PLIMSOLL_TRY_VOID(check_memory());
  PLIMSOLL_TRY(state_->value, pop());
  if (!stack_.empty() || !marks_.empty()) {
    return bad("something is left over");
  }
  return Pickle(std::move(state_));
}

Result<PickleValue> PickleMachine::pop() {
  if (stack_.empty() || (!marks_.empty() && marks_.back() == stack_.size())) {
    return bad("a value is missing");
  }
  PickleValue value = std::move(stack_.back());
  stack_.pop_back();
  return value;
}

Result<std::size_t> PickleMachine::pop_mark() {
  if (marks_.empty()) {
    return bad("a mark is missing");
  }
  const std::size_t mark = marks_.back();
  marks_.pop_back();
  return mark;
}

Result<void> PickleMachine::remember(std::uint32_t place) {
  if (stack_.empty()) {
    return bad("a value is missing");
  }
  if (std::binary_search(recalled_.begin(), recalled_.end(), place) &&
      !state_->memo.emplace(place, stack_.back()).second) {
    return bad("a place is used twice");
  }
  return {};
}

Result<void> PickleMachine::recall(std::uint32_t place) {
  const auto found = state_->memo.find(place);
  if (found == state_->memo.end()) {
    return bad("a value is used before it is there");
  }
  push(found->second);
  return {};
}

Result<void> PickleMachine::global(std::string_view module, std::string_view name) {
  const std::string whole = fmt::format("{} {}", module, name);
  const bool record = options_.is_record && options_.is_record(module, name);
  if (!record && !is_known(whole)) {
    return fail(ErrorCode::kCorrupt,
                fmt::format("{}: asks for {}.{}, which is not among what such a file may hold",
                            options_.name, module, name),
                options_.advice);
  }
  PickleValue value = make(PickleKind::kGlobal, whole);
  value.number = record ? 1 : 0;
  push(std::move(value));
  return {};
}

// ('storage', class, key, device, elements): where a tensor's bytes are.
Result<void> PickleMachine::persistent() {
  PLIMSOLL_TRY(const PickleValue id, pop());
  const auto& parts = id.items();
  if (id.kind != PickleKind::kTuple || parts.size() != 5 || parts[0].text() != "storage" ||
      parts[1].kind != PickleKind::kGlobal || parts[2].kind != PickleKind::kText ||
      parts[4].kind != PickleKind::kNumber) {
    return bad("a reference that is to no storage");
  }
  const auto type = std::find_if(kStorages.begin(), kStorages.end(),
                                 [&](const auto& known) { return known.first == parts[1].text(); });
  const std::string_view key = parts[2].text();
  std::uint64_t number = 0;
  const auto parsed = std::from_chars(key.data(), key.data() + key.size(), number);
  if (type == kStorages.end() || key.empty() || parsed.ec != std::errc{} ||
      parsed.ptr != key.data() + key.size()) {
    return bad("a storage of a kind or name that is not known");
  }
  PickleValue storage = make(PickleKind::kStorage);
  storage.node->tensor = std::make_unique<TorchTensor>();
  storage.node->tensor->type = type->second;
  storage.node->tensor->storage = number;
  push(std::move(storage));
  return {};
}

// (storage, offset, shape, strides, …) as torch._utils._rebuild_tensor_v2 takes them.
Result<PickleValue> PickleMachine::tensor(const PickleValue& arguments) {
  const auto& parts = arguments.items();
  if (parts.size() < 4 || parts[0].kind != PickleKind::kStorage ||
      parts[1].kind != PickleKind::kNumber || parts[2].kind != PickleKind::kTuple ||
      parts[3].kind != PickleKind::kTuple || parts[2].items().size() != parts[3].items().size() ||
      parts[2].items().size() > TorchTensor::kDimsMost) {
    return bad("a tensor that is none");
  }
  PickleValue value = make(PickleKind::kTensor);
  value.node->tensor = std::make_unique<TorchTensor>(parts[0].tensor());
  value.node->charge(sizeof(TorchTensor));
  TorchTensor& tensor = *value.node->tensor;
  tensor.offset = parts[1].number;
  tensor.dims = static_cast<std::uint8_t>(parts[2].items().size());
  // Bounded, so that no product or sum of them overflows.
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  std::int64_t elements = 1;
  bool sane = tensor.offset >= 0 && tensor.offset <= kMost;
  for (std::size_t i = 0; sane && i < tensor.dims; ++i) {
    const PickleValue& size = parts[2].items()[i];
    const PickleValue& stride = parts[3].items()[i];
    sane = size.kind == PickleKind::kNumber && stride.kind == PickleKind::kNumber &&
           size.number >= 0 && stride.number >= 0 && stride.number <= kMost &&
           size.number <= kMost / std::max<std::int64_t>(elements, 1);
    tensor.shape[i] = size.number;
    tensor.strides[i] = stride.number;
    elements *= size.number;
  }
  if (!sane) {
    return bad("a tensor of an impossible shape");
  }
  return value;
}

// (dtype, bytes): an integer of NumPy's.
Result<PickleValue> PickleMachine::numpy_scalar(const PickleValue& arguments) {
  const auto& parts = arguments.items();
  if (parts.size() != 2 || parts[0].kind != PickleKind::kRecord ||
      parts[1].kind != PickleKind::kBytes) {
    return bad("a NumPy number that is none");
  }
  const std::string_view type = parts[0].text();
  const std::string_view bytes = parts[1].text();
  const bool is_signed = type.starts_with('i');
  const std::size_t size = type.size() == 2 && (is_signed || type[0] == 'u')
                               ? static_cast<std::size_t>(type[1] - '0')
                               : 0;
  if (!(size == 1 || size == 2 || size == 4 || size == 8) || bytes.size() != size) {
    return bad("a NumPy number that is no integer");
  }
  std::uint64_t bits = 0;
  std::memcpy(&bits, bytes.data(), size);
  const auto unused = static_cast<int>(64 - 8 * size);
  const auto shifted = static_cast<std::int64_t>(bits << unused);
  return PickleValue{.kind = PickleKind::kNumber,
                     .number = is_signed ? shifted >> unused : static_cast<std::int64_t>(bits)};
}

Result<void> PickleMachine::reduce() {
  PLIMSOLL_TRY(const PickleValue arguments, pop());
  PLIMSOLL_TRY(const PickleValue callee, pop());
  if (callee.kind != PickleKind::kGlobal || arguments.kind != PickleKind::kTuple) {
    return bad("a call of what is no function");
  }
  const std::string_view name = callee.text();
  if (name == kRebuildTensor || name == kRebuildTensor2) {
    PLIMSOLL_TRY(PickleValue made, tensor(arguments));
    push(std::move(made));
    return {};
  }
  if (name == kNumpyScalar || name == kNumpyScalar2) {
    PLIMSOLL_TRY(PickleValue made, numpy_scalar(arguments));
    push(std::move(made));
    return {};
  }
  if (name == kNumpyDtype && !arguments.items().empty()) {
    push(make(PickleKind::kRecord, arguments.items()[0].text()));
    return {};
  }
  if (name == kOrderedDict && arguments.items().empty()) {
    push(make(PickleKind::kDict));
    return {};
  }
  return bad(fmt::format("a call of {} with such arguments", name));
}

Result<void> PickleMachine::new_object() {
  PLIMSOLL_TRY(const PickleValue arguments, pop());
  PLIMSOLL_TRY(const PickleValue type, pop());
  if (type.kind != PickleKind::kGlobal || type.number != 1) {
    return bad("an object of what is no class");
  }
  push(make(PickleKind::kRecord, type.text()));
  return {};
}

Result<void> PickleMachine::build() {
  PLIMSOLL_TRY(PickleValue state, pop());
  if (stack_.empty() || (!marks_.empty() && marks_.back() == stack_.size())) {
    return bad("a value is missing");
  }
  const PickleValue object = stack_.back();
  if (object.kind == PickleKind::kDict) {
    return {};  // Attributes of an OrderedDict: nothing of interest.
  }
  if (object.kind != PickleKind::kRecord || !object.node->items.empty()) {
    return bad("a state for what can have none");
  }
  if (state.kind == PickleKind::kTuple && state.items().size() == 2 &&
      state.items()[0].kind == PickleKind::kDict) {
    PickleValue first = state.items()[0];  // The other are its slots.
    state = std::move(first);
  }
  give(*object.node, std::move(state));
  return options_.on_record ? options_.on_record(*object.node) : Result<void>{};
}

Result<void> PickleMachine::add_to(PickleKind kind, std::size_t from) {
  if (from == 0 || from > stack_.size() || stack_[from - 1].kind != kind ||
      (!marks_.empty() && marks_.back() >= from) ||
      (kind == PickleKind::kDict && (stack_.size() - from) % 2 != 0)) {
    return bad("items for what takes none");
  }
  const std::shared_ptr<PickleNode> node = stack_[from - 1].node;
  for (std::size_t i = from; i < stack_.size(); ++i) {
    give(*node, std::move(stack_[i]));
  }
  stack_.resize(from);
  return {};
}

// Tuples, lists, dicts.
Result<void> PickleMachine::collect(const PickleInstruction& op) {
  switch (op.op) {
    case Op::kTuple: {
      std::size_t from = 0;
      if (op.number < 0) {  // All since the mark.
        PLIMSOLL_TRY(from, pop_mark());
      } else {
        const auto count = static_cast<std::size_t>(op.number);
        if (stack_.size() < count || (!marks_.empty() && marks_.back() + count > stack_.size())) {
          return bad("a value is missing");
        }
        from = stack_.size() - count;
      }
      PickleValue tuple = make(PickleKind::kTuple);
      for (std::size_t i = from; i < stack_.size(); ++i) {
        give(*tuple.node, std::move(stack_[i]));
      }
      stack_.resize(from);
      push(std::move(tuple));
      return {};
    }
    case Op::kAppend:
      return add_to(PickleKind::kList, stack_.empty() ? 0 : stack_.size() - 1);
    case Op::kSetItem:
      return add_to(PickleKind::kDict, stack_.size() < 2 ? 0 : stack_.size() - 2);
    default: {
      PLIMSOLL_TRY(const std::size_t from, pop_mark());
      return add_to(op.op == Op::kAppends ? PickleKind::kList : PickleKind::kDict, from);
    }
  }
}

Result<void> PickleMachine::execute(const PickleInstruction& op) {
  switch (op.op) {
    case Op::kNothing:
    case Op::kStop:
      return {};
    case Op::kMark:
      marks_.push_back(stack_.size());
      return {};
    case Op::kPop:
      PLIMSOLL_TRY_VOID(pop());
      return {};
    case Op::kPopMark: {
      PLIMSOLL_TRY(const std::size_t mark, pop_mark());
      stack_.resize(mark);
      return {};
    }
    case Op::kNone:
      push({});
      return {};
    case Op::kNumber:
      push({.kind = PickleKind::kNumber, .number = op.number});
      return {};
    case Op::kFloat:
      push({.kind = PickleKind::kFloat, .real = op.real});
      return {};
    case Op::kText:
      push(make(PickleKind::kText, op.text));
      return {};
    case Op::kBytes:
      push(make(PickleKind::kBytes, op.text));
      return {};
    case Op::kEmptyList:
      push(make(PickleKind::kList));
      return {};
    case Op::kEmptyDict:
      push(make(PickleKind::kDict));
      return {};
    case Op::kTuple:
    case Op::kAppend:
    case Op::kAppends:
    case Op::kSetItem:
    case Op::kSetItems:
      return collect(op);
    case Op::kGlobal:
      return global(op.text, op.more);
    case Op::kStackGlobal: {
      PLIMSOLL_TRY(const PickleValue name, pop());
      PLIMSOLL_TRY(const PickleValue module, pop());
      return global(module.text(), name.text());
    }
    case Op::kReduce:
      return reduce();
    case Op::kNewObject:
      return new_object();
    case Op::kBuild:
      return build();
    case Op::kPersistent:
      return persistent();
    case Op::kPut:
      return remember(static_cast<std::uint32_t>(op.number));
    case Op::kMemoize:
      return remember(memoized_++);
    case Op::kGet:
      return recall(static_cast<std::uint32_t>(op.number));
  }
  return bad("an instruction that is not known");
}

Result<Pickle> Pickle::read(Governor governor, const File& file, std::int64_t begin,
                            std::int64_t bytes, const PickleOptions& options) {
  return PickleMachine(std::move(governor), PickleBytes(file, begin, bytes, options.name), options)
      .run();
}

}  // namespace plimsoll
