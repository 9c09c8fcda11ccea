// SPDX-License-Identifier: Apache-2.0
//
// HolderSearch: from the modules and frames of a program to who holds given pieces of memory.
//
// It goes through what can be reached, breadth first, in pieces of a given time, by the same
// tp_traverse that the garbage collector uses; so it needs neither a list of all objects nor their
// referrers, and knows the way to whatever it finds. A piece of memory is found where an object
// lies in it (an int, a list's table, a bytearray's buffer) or shows it by the buffer protocol; for
// tensors a function of Python's says where theirs is.
//
// Between two pieces the program runs on. Containers that were met are kept alive until the search
// ends, so that no address is met twice under two meanings; leaves are not, and of tensors those
// that a graph hangs on are.
//
// Threads: with Python's lock.
// Memory:  40 MiB at most (kNodesMost containers), while it searches.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

namespace plimsoll::python {

namespace nb = nanobind;

using Objects = nb::typed<nb::list, nb::object>;

/// Memory to be found: bytes at an address.
struct Piece {
  std::uintptr_t address{0};
  std::size_t bytes{0};
};

class HolderSearch {
 public:
  static constexpr std::size_t kNodesMost = 1 << 20;  ///< Containers; what lies behind is not seen.
  static constexpr std::size_t kPiecesMost = 256;
  static constexpr std::size_t kFoundEnough = 32;  ///< It ends when so many were found.
  static constexpr std::size_t kGraphsMost = 1 << 14;
  static constexpr std::size_t kGrownMost = 16;

  /// `roots`: a list of where to begin, in this order. `later`: a list of what is gone through only
  /// when all else was (modules of libraries and their dicts). `skipped`: a list of what is not
  /// gone into. `tensor`: the type of tensors, or None; of each, `look_at`(tensor) says where its
  /// memory is (0: nowhere), and, negative, that a live graph of gradients hangs on it as well.
  HolderSearch(std::vector<Piece> pieces, nb::list roots, nb::list later, nb::list skipped,
               nb::object tensor, nb::object look_at);
  ~HolderSearch();
  HolderSearch(const HolderSearch&) = delete;
  HolderSearch& operator=(const HolderSearch&) = delete;

  /// Goes on for about `budget_ns`; true when it is done.
  bool advance(std::int64_t budget_ns);

  /// Once it is done: goes through the containers it met again, for about `budget_ns`, and sees
  /// which have more elements now (of an io.BytesIO: bytes). True when it was at all.
  bool weigh(std::int64_t budget_ns);
  /// After weigh(): how much each of the containers that grew most has grown, most first, and the
  /// way from it up to its root; kGrownMost at most.
  [[nodiscard]] nb::typed<nb::list, std::pair<std::size_t, Objects>> grown() const;

  /// Lets go of what was kept alive, for about `budget_ns`; true when all is. Nothing can be asked
  /// for afterwards.
  bool release(std::int64_t budget_ns);

  /// Bytes that all searches of this process hold now: no part of what is watched.
  [[nodiscard]] static std::int64_t held_bytes() noexcept;

  /// The tensors met so far that a live graph hangs on, each the number of its node: those from
  /// `first` on. Nothing of Python's leads into a graph: who walks through it marks what it keeps.
  [[nodiscard]] nb::typed<nb::list, std::pair<std::size_t, nb::any>> graphs(
      std::size_t first) const;
  /// Memory at these addresses is kept by the graph of that node's tensor.
  void mark_graph(std::uint32_t node, const std::vector<std::uintptr_t>& addresses);
  /// Whether so many pieces were found that it ends.
  [[nodiscard]] bool enough() const noexcept {
    return found_ >= std::min(kFoundEnough, pieces_.size());
  }

  /// How many pieces were found, and of how many: of those that were met where it ended early.
  [[nodiscard]] std::pair<std::size_t, std::size_t> found() const;
  /// Containers met.
  [[nodiscard]] std::size_t visited() const noexcept { return nodes_.size(); }
  /// The way from what holds most of the pieces in common up to its root; [] where no container
  /// does.
  [[nodiscard]] Objects holder() const;
  /// The ways from each piece that was found up to its root, at most `most` of them.
  [[nodiscard]] nb::typed<nb::list, Objects> ways(std::size_t most) const;

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Node {
    PyObject* object;  // A reference.
    std::uint32_t parent;
    std::uint32_t size;  // When it was met.
  };

  static int collect(PyObject* child, void* self);
  bool go_on(std::int64_t budget_ns);
  bool next_root();
  bool fill();
  void meet(PyObject* child, std::uint32_t parent);
  void meet_tensor(PyObject* tensor, std::uint32_t parent);
  void meet_leaf(PyObject* leaf, std::uint32_t parent);
  bool add(PyObject* object, std::uint32_t parent);
  [[nodiscard]] bool is_tensor(PyObject* object) const noexcept;
  bool mark(std::uintptr_t address, std::uint32_t parent);
  void match_object(PyObject* object, std::uint32_t parent);
  void match_tables(PyObject* object, std::uint32_t node);
  [[nodiscard]] bool marked(std::uintptr_t address) const noexcept;
  [[nodiscard]] nb::list way(std::uint32_t node) const;
  [[nodiscard]] std::uint32_t common(const std::vector<std::uint32_t>& ends) const;
  void drop_children() noexcept;
  void account() noexcept;

  std::vector<Piece> pieces_;           // By address.
  std::vector<std::uint32_t> holders_;  // Of each piece, the container it was found in.
  std::size_t found_{0};
  std::vector<std::uint64_t> pages_;  // A Bloom filter of the pages that pieces begin in.
  nb::list roots_;
  nb::list later_;
  std::size_t root_{0};
  bool later_now_{false};
  PyTypeObject* tensor_{nullptr};
  nb::object tensor_type_;
  nb::object look_at_;
  std::vector<Node> nodes_;
  // Of a part of the nodes, which node an address is: open addressing; node + 1, 0 is free. Each
  // part grows by itself, so that no call waits for all of them.
  struct Part {
    std::vector<std::uint32_t> slots = std::vector<std::uint32_t>(16);
    std::size_t used{0};
    void widen(const std::vector<Node>& nodes);
  };
  static constexpr std::size_t kParts = 256;
  std::vector<Part> visited_;
  std::vector<PyObject*> apart_;       // later_ and what is skipped, by address.
  std::vector<std::uint32_t> graphs_;  // Tensors with graphs: nodes that are not gone into.
  std::vector<PyObject*> children_;    // References: of nodes_[at_], and not met yet.
  std::size_t child_{0};
  std::size_t at_{0};      // The next node to go into.
  Py_ssize_t cursor_{-1};  // In it, where it is gone through in parts; −1: it begins.
  std::int64_t accounted_{0};
  std::size_t weighed_{0};
  std::vector<std::pair<std::uint32_t, std::uint32_t>> grown_;  // By how much, and the node.
  bool going_{false};
  bool done_{false};
};

}  // namespace plimsoll::python
