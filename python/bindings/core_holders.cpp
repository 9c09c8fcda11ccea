// SPDX-License-Identifier: Apache-2.0
//
// Reading order: holders.h, advance(), fill(), meet().
//
// While tp_traverse runs nothing else may: children are collected with a reference each, and met
// afterwards.
#include "holders.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "base/philox.h"
#include "os/clock.h"

namespace plimsoll::python {
namespace {

constexpr std::size_t kPart = 2048;         // Children of a list or dict that are taken at a time.
constexpr int kPartShift = 56;              // The highest bits of a hash say the part.
constexpr std::size_t kBetweenClocks = 64;  // Children between two looks at the clock.
constexpr std::size_t kPageBits = 1 << 16;
constexpr double kMostOf = 0.6;  // Share of what was found that makes a holder.
// An object may stand behind the collector's header, and pointers to its dict and weak references.
constexpr std::uintptr_t kHeaders = 48;

std::atomic<std::int64_t> held_by_searches{0};

std::size_t page_bit(std::uintptr_t address) noexcept {
  return mix64(address >> 12) % kPageBits;
}

// Elements of a container; bytes of a stream in memory. 0 of all else.
std::uint32_t size_now(PyObject* object) noexcept {
  Py_ssize_t size = 0;
  if (PyList_Check(object)) {
    size = PyList_GET_SIZE(object);
  } else if (PyDict_Check(object)) {
    size = reinterpret_cast<PyDictObject*>(object)->ma_used;
  } else if (PyAnySet_Check(object)) {
    size = PySet_GET_SIZE(object);
  } else if (std::strcmp(Py_TYPE(object)->tp_name, "collections.deque") == 0) {
    size = Py_SIZE(object);
  } else if (std::strcmp(Py_TYPE(object)->tp_name, "_io.BytesIO") == 0) {
    PyObject* const bytes = PyObject_CallMethod(object, "__sizeof__", nullptr);
    size = bytes == nullptr ? 0 : PyLong_AsSsize_t(bytes);
    Py_XDECREF(bytes);
    PyErr_Clear();
  }
  return static_cast<std::uint32_t>(std::clamp<Py_ssize_t>(size, 0, UINT32_MAX));
}

bool plain(PyObject* object) noexcept {
  return object == Py_None || PyBool_Check(object);
}

}  // namespace

HolderSearch::HolderSearch(std::vector<Piece> pieces, nb::list roots, nb::list later,
                           nb::list skipped, nb::object tensor, nb::object look_at)
    : pieces_(std::move(pieces)),
      pages_(kPageBits / 64),
      roots_(std::move(roots)),
      later_(std::move(later)),
      tensor_type_(std::move(tensor)),
      look_at_(std::move(look_at)),
      visited_(kParts) {
  nodes_.reserve(kNodesMost);  // Of the address space; what is not written to takes no memory.
  if (pieces_.size() > kPiecesMost) {
    pieces_.resize(kPiecesMost);
  }
  std::ranges::sort(pieces_, {}, &Piece::address);
  holders_.assign(pieces_.size(), kNone);
  for (const Piece& piece : pieces_) {
    for (const std::uintptr_t at : {piece.address, piece.address + kHeaders}) {
      pages_[page_bit(at) / 64] |= std::uint64_t{1} << (page_bit(at) % 64);
    }
  }
  for (const nb::list& apart : {later_, skipped}) {
    for (const nb::handle one : apart) {
      apart_.push_back(one.ptr());
    }
  }
  std::ranges::sort(apart_);
  if (PyType_Check(tensor_type_.ptr())) {
    tensor_ = reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  }
}

HolderSearch::~HolderSearch() {
  release(INT64_MAX / 2);
  held_by_searches -= accounted_;
}

std::int64_t HolderSearch::held_bytes() noexcept {
  return held_by_searches;
}

void HolderSearch::account() noexcept {
  std::size_t slots = 0;
  for (const Part& part : visited_) {
    slots += part.slots.capacity();
  }
  const auto now =
      static_cast<std::int64_t>(nodes_.capacity() * sizeof(Node) + slots * sizeof(std::uint32_t) +
                                children_.capacity() * sizeof(PyObject*));
  held_by_searches += now - accounted_;
  accounted_ = now;
}

void HolderSearch::drop_children() noexcept {
  for (std::size_t at = child_; at < children_.size(); ++at) {
    Py_DECREF(children_[at]);
  }
  children_.clear();
  child_ = 0;
}

bool HolderSearch::weigh(std::int64_t budget_ns) {
  const std::int64_t until = now_ns() + budget_ns;
  for (; weighed_ < nodes_.size(); ++weighed_) {
    const Node& node = nodes_[weighed_];
    if (const std::uint32_t size = size_now(node.object); size > node.size) {
      const std::pair one{size - node.size, static_cast<std::uint32_t>(weighed_)};
      const auto at =
          std::ranges::find_if(grown_, [&](const auto& other) { return other.first < one.first; });
      grown_.insert(at, one);
      grown_.resize(std::min(grown_.size(), kGrownMost));
    }
    if (weighed_ % kBetweenClocks == 0 && now_ns() > until) {
      return ++weighed_ >= nodes_.size();
    }
  }
  return true;
}

nb::typed<nb::list, std::pair<std::size_t, Objects>> HolderSearch::grown() const {
  nb::list all;
  for (const auto& [more, node] : grown_) {
    all.append(nb::make_tuple(more, way(node)));
  }
  return all;
}

bool HolderSearch::release(std::int64_t budget_ns) {
  const std::int64_t until = now_ns() + budget_ns;
  done_ = true;
  drop_children();
  holders_.assign(holders_.size(), kNone);
  graphs_.clear();
  while (!nodes_.empty()) {
    PyObject* const last = nodes_.back().object;
    nodes_.pop_back();
    Py_DECREF(last);
    if (nodes_.size() % kBetweenClocks == 0 && now_ns() > until) {
      return nodes_.empty();
    }
  }
  nodes_ = {};
  visited_ = {};
  children_ = {};
  account();
  return true;
}

bool HolderSearch::next_root() {
  const nb::list& list = later_now_ ? later_ : roots_;
  if (root_ < list.size()) {
    add(nb::handle(list[root_++]).ptr(), kNone);
    return true;
  }
  if (later_now_) {
    return false;
  }
  later_now_ = true;
  root_ = 0;
  return next_root();
}

// All that is new among the children of the node it is at; true while there is something to do.
bool HolderSearch::fill() {
  drop_children();
  while (true) {
    if (at_ == nodes_.size() && !next_root()) {
      return false;
    }
    if (at_ == nodes_.size()) {
      continue;  // That root was met before.
    }
    PyObject* const object = nodes_[at_].object;
    if (is_tensor(object)) {
      ++at_;
      continue;
    }
    const bool begins = cursor_ < 0;
    const auto take = [&](PyObject* child) {
      if (child != nullptr && !plain(child)) {
        children_.push_back(Py_NewRef(child));
      }
    };
    if (begins) {
      match_tables(object, static_cast<std::uint32_t>(at_));
    }
    bool ends = true;
    if (PyList_CheckExact(object)) {  // From its end, where what is new stands.
      const Py_ssize_t size = PyList_GET_SIZE(object);
      Py_ssize_t left = begins ? size : std::min(cursor_, size);
      for (; left > 0 && children_.size() < kPart; --left) {
        take(PyList_GET_ITEM(object, left - 1));
      }
      cursor_ = left;
      ends = left == 0;
    } else if (PyDict_CheckExact(object)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      cursor_ = std::max<Py_ssize_t>(cursor_, 0);
      ends = false;
      while (children_.size() < kPart) {
        if (PyDict_Next(object, &cursor_, &key, &value) == 0) {
          ends = true;
          break;
        }
        take(key);
        take(value);
      }
    } else if (Py_TYPE(object)->tp_traverse != nullptr) {
      Py_TYPE(object)->tp_traverse(object, &HolderSearch::collect, this);
    }
    if (ends) {
      cursor_ = -1;
      going_ = false;
    } else {
      going_ = true;
    }
    if (children_.empty()) {
      if (ends) {
        ++at_;
      }
      continue;
    }
    return true;
  }
}

int HolderSearch::collect(PyObject* child, void* self) {
  if (child != nullptr && !plain(child)) {
    static_cast<HolderSearch*>(self)->children_.push_back(Py_NewRef(child));
  }
  return 0;
}

bool HolderSearch::advance(std::int64_t budget_ns) {
  const bool ended = go_on(budget_ns);
  account();
  return ended;
}

bool HolderSearch::go_on(std::int64_t budget_ns) {
  const std::int64_t until = now_ns() + budget_ns;
  std::size_t met = 0;
  while (!done_) {
    if (child_ == children_.size()) {
      if (!children_.empty() && !going_) {
        ++at_;
      }
      if (enough() || !fill()) {
        done_ = true;
        drop_children();
        break;
      }
    }
    while (child_ < children_.size()) {
      PyObject* const child = children_[child_];
      meet(child, static_cast<std::uint32_t>(at_));
      children_[child_++] = nullptr;
      Py_DECREF(child);
      if (++met % kBetweenClocks == 0 && now_ns() > until) {
        return false;
      }
    }
    if (now_ns() > until) {
      return false;
    }
  }
  return true;
}

void HolderSearch::meet(PyObject* child, std::uint32_t parent) {
  if (PyUnicode_CheckExact(child) || PyLong_CheckExact(child) || PyFloat_CheckExact(child) ||
      PyBytes_CheckExact(child)) {
    match_object(child, parent);
    return;
  }
  if (is_tensor(child)) {
    meet_tensor(child, parent);
    return;
  }
  if (PyObject_IS_GC(child) == 0) {
    meet_leaf(child, parent);
    return;
  }
  if (!std::ranges::binary_search(apart_, child)) {
    add(child, parent);
  }
}

void HolderSearch::Part::widen(const std::vector<Node>& nodes) {
  std::vector<std::uint32_t> wider(slots.size() * 2);
  for (const std::uint32_t node : slots) {
    if (node != 0) {
      std::size_t at = mix64(reinterpret_cast<std::uintptr_t>(nodes[node - 1].object));
      while (wider[at % wider.size()] != 0) {
        ++at;
      }
      wider[at % wider.size()] = node;
    }
  }
  slots.swap(wider);
}

bool HolderSearch::is_tensor(PyObject* object) const noexcept {
  return tensor_ != nullptr && PyObject_TypeCheck(object, tensor_);
}

// Whether it is new.
bool HolderSearch::add(PyObject* object, std::uint32_t parent) {
  std::size_t at = mix64(reinterpret_cast<std::uintptr_t>(object));
  Part& part = visited_[at >> kPartShift];
  if (part.used * 2 >= part.slots.size()) {
    part.widen(nodes_);
  }
  std::vector<std::uint32_t>& slots = part.slots;
  for (; slots[at % slots.size()] != 0; ++at) {
    if (nodes_[slots[at % slots.size()] - 1].object == object) {
      return false;
    }
  }
  match_object(object, parent);
  if (nodes_.size() == kNodesMost) {
    return false;
  }
  nodes_.push_back({.object = Py_NewRef(object), .parent = parent, .size = size_now(object)});
  slots[at % slots.size()] = static_cast<std::uint32_t>(nodes_.size());
  ++part.used;
  return true;
}

void HolderSearch::meet_tensor(PyObject* tensor, std::uint32_t parent) {
  match_object(tensor, parent);
  try {
    const auto address = nb::cast<std::int64_t>(look_at_(nb::handle(tensor)));
    if (address < 0 && graphs_.size() < kGraphsMost && add(tensor, parent)) {
      graphs_.push_back(static_cast<std::uint32_t>(nodes_.size() - 1));
    }
    if (address != 0) {
      mark(static_cast<std::uintptr_t>(address < 0 ? -address : address), parent);
    }
  } catch (const nb::python_error&) {  // A kind of tensor that has no memory of its own.
  }
  // What hangs on it (its dict, its hooks) is its holder's.
  std::vector<PyObject*> kept;
  kept.swap(children_);
  Py_TYPE(tensor)->tp_traverse(tensor, &HolderSearch::collect, this);
  kept.swap(children_);
  for (PyObject* const child : kept) {
    if (PyObject_IS_GC(child) != 0 && !is_tensor(child) &&
        !std::ranges::binary_search(apart_, child)) {
      add(child, parent);
    }
    Py_DECREF(child);
  }
}

void HolderSearch::meet_leaf(PyObject* leaf, std::uint32_t parent) {
  match_object(leaf, parent);
  if (PyByteArray_Check(leaf)) {
    mark(reinterpret_cast<std::uintptr_t>(PyByteArray_AS_STRING(leaf)), parent);
    return;
  }
  if (PyObject_CheckBuffer(leaf) == 0) {
    return;
  }
  Py_buffer view{};
  if (PyObject_GetBuffer(leaf, &view, PyBUF_FULL_RO) != 0) {
    PyErr_Clear();
    return;
  }
  mark(reinterpret_cast<std::uintptr_t>(view.buf), parent);
  PyBuffer_Release(&view);
}

// The tables of containers are allocated apart from them.
void HolderSearch::match_tables(PyObject* object, std::uint32_t node) {
  if (PyList_Check(object)) {
    mark(reinterpret_cast<std::uintptr_t>(reinterpret_cast<PyListObject*>(object)->ob_item), node);
  } else if (PyDict_Check(object)) {
    mark(reinterpret_cast<std::uintptr_t>(reinterpret_cast<PyDictObject*>(object)->ma_keys), node);
  } else if (PyAnySet_Check(object)) {
    mark(reinterpret_cast<std::uintptr_t>(reinterpret_cast<PySetObject*>(object)->table), node);
  }
}

bool HolderSearch::marked(std::uintptr_t address) const noexcept {
  const std::size_t bit = page_bit(address);
  return (pages_[bit / 64] >> (bit % 64) & 1) != 0;
}

void HolderSearch::match_object(PyObject* object, std::uint32_t parent) {
  const auto address = reinterpret_cast<std::uintptr_t>(object);
  if (marked(address)) {
    mark(address, parent);
  }
}

bool HolderSearch::mark(std::uintptr_t address, std::uint32_t parent) {
  auto piece = std::ranges::upper_bound(pieces_, address, {}, &Piece::address);
  if (piece == pieces_.begin()) {
    return false;
  }
  --piece;
  std::uint32_t& holder = holders_[static_cast<std::size_t>(piece - pieces_.begin())];
  if (address >= piece->address + std::max<std::size_t>(piece->bytes, 1) || holder != kNone ||
      parent == kNone) {
    return false;
  }
  holder = parent;
  ++found_;
  return true;
}

std::pair<std::size_t, std::size_t> HolderSearch::found() const {
  return {found_, found_ < kFoundEnough ? pieces_.size() : found_};
}

nb::list HolderSearch::way(std::uint32_t node) const {
  nb::list up;
  for (; node != kNone; node = nodes_[node].parent) {
    up.append(nb::borrow(nodes_[node].object));
  }
  return up;
}

// The deepest container that holds most of these.
std::uint32_t HolderSearch::common(const std::vector<std::uint32_t>& ends) const {
  std::unordered_map<std::uint32_t, std::size_t> below;
  for (std::uint32_t node : ends) {
    for (; node != kNone; node = nodes_[node].parent) {
      ++below[node];
    }
  }
  const double wanted = kMostOf * static_cast<double>(ends.size());
  std::uint32_t best = kNone;
  for (const auto& [node, count] : below) {  // Children stand behind their parents.
    if (static_cast<double>(count) > wanted && (best == kNone || node > best)) {
      best = node;
    }
  }
  return best;
}

Objects HolderSearch::holder() const {
  std::vector<std::uint32_t> ends;
  std::ranges::copy_if(holders_, std::back_inserter(ends),
                       [](std::uint32_t node) { return node != kNone; });
  return way(common(ends));
}

nb::typed<nb::list, std::pair<std::size_t, nb::any>> HolderSearch::graphs(std::size_t first) const {
  nb::list all;
  for (std::size_t at = first; at < graphs_.size(); ++at) {
    all.append(nb::make_tuple(graphs_[at], nb::borrow(nodes_[graphs_[at]].object)));
  }
  return all;
}

void HolderSearch::mark_graph(std::uint32_t node, const std::vector<std::uintptr_t>& addresses) {
  for (const std::uintptr_t address : addresses) {
    mark(address, node < nodes_.size() ? node : kNone);
  }
}

nb::typed<nb::list, Objects> HolderSearch::ways(std::size_t most) const {
  nb::list all;
  for (const std::uint32_t node : holders_) {
    if (node != kNone && all.size() < most) {
      all.append(way(node));
    }
  }
  return all;
}

}  // namespace plimsoll::python
