// SPDX-License-Identifier: Apache-2.0
//
// Reads what pickle wrote as plain values. Nothing is imported and nothing is called: a class that
// is known by name becomes a record, every other is refused with its name.
//
// What torch.save and pickle.dump write is understood: opcodes of protocols 2 to 5 without their
// rare ones. The text is gone through twice: once for the places that are asked for again, so that
// what is not can be let go at once, and once for the values.
// Source: Python's pickletools, which documents every opcode; torch/_utils.py for tensors.
// Reading order: this file, torch_archive.h, graph_import.cpp.
//
// Threads: single-owner.
// Memory:  a buffer of 256 KiB, and the values that are held, counted in a lease as they grow.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "os/file.h"
#include "plimsoll/governor.h"
#include "plimsoll/result.h"

namespace plimsoll {

/// An element type of torch's storages.
enum class TorchType : std::uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUint8,
  kBool
};
[[nodiscard]] std::int64_t torch_type_bytes(TorchType type) noexcept;

/// Where a tensor's elements are: in the storage of that name, as torch counts (in elements).
struct TorchTensor {
  static constexpr std::size_t kDimsMost = 4;
  std::uint64_t storage{0};  ///< The decimal number that is its name in the archive.
  TorchType type{TorchType::kFloat32};
  std::uint8_t dims{0};
  std::int64_t offset{0};
  std::array<std::int64_t, kDimsMost> shape{};
  std::array<std::int64_t, kDimsMost> strides{};

  [[nodiscard]] std::int64_t elements() const noexcept;
};

enum class PickleKind : std::uint8_t {
  kNone,
  kNumber /* integers, True and False */,
  kFloat,
  kText,
  kBytes,
  kTuple,
  kList /* and sets */,
  kDict /* key, value, key, … */,
  kGlobal,
  kStorage,
  kTensor,
  kRecord
};

struct PickleNode;

/// One value. Containers are shared, as in the pickle.
struct PickleValue {
  PickleKind kind{PickleKind::kNone};
  std::int64_t number{0};
  double real{0};
  std::shared_ptr<PickleNode> node{};  // Shared: the memo and any container may hold it.

  [[nodiscard]] std::string_view text() const noexcept;  ///< Of kText, kBytes; a class's name.
  /// Of kTuple, kList, kDict; a record's state, when it was given one.
  [[nodiscard]] const std::vector<PickleValue>& items() const noexcept;
  [[nodiscard]] const TorchTensor& tensor() const noexcept;
  /// The value of a dict's text key; nullptr when it has none.
  [[nodiscard]] const PickleValue* find(std::string_view key) const noexcept;
};

/// What a value of the shared kinds holds.
struct PickleNode {
  explicit PickleNode(std::int64_t* total) noexcept;
  PickleNode(const PickleNode&) = delete;
  PickleNode& operator=(const PickleNode&) = delete;
  ~PickleNode();  ///< Takes apart what it holds one by one: any depth is no depth of calls.
  void charge(std::int64_t bytes) noexcept;

  std::string text{};
  std::vector<PickleValue> items{};
  std::unique_ptr<TorchTensor> tensor{};  ///< Of kTensor and kStorage.
  std::int64_t handle{-1};                ///< For the caller: what it has made of a record.

 private:
  std::int64_t* total_;
  std::int64_t charged_{0};
};

struct PickleOptions {
  std::string name{};      ///< What errors call the file, …
  const char* advice{""};  ///< … and what they advise; a literal.
  /// True for a class that becomes a record; tensors, storages, dicts and NumPy's numbers are known
  /// as they are. Given "module", "Name".
  std::function<bool(std::string_view, std::string_view)> is_record{};
  /// Called once a record has its state: may keep of it what is wanted and clear the rest.
  std::function<Result<void>(PickleNode& record)> on_record{};
  /// Called now and then; false cancels.
  std::function<bool()> step{};
};

/// What a pickle holds, valid while this lives. Cycles are undone when it goes.
class Pickle {
 public:
  /// Reads `bytes` bytes of `file` from `begin` on.
  /// Errors: kCorrupt (an opcode or class that is not known, by its name; damage, by its place),
  ///         kInvalidArgument when cancelled, kOverBudget, kIo.
  static Result<Pickle> read(Governor governor, const File& file, std::int64_t begin,
                             std::int64_t bytes, const PickleOptions& options);
  Pickle(Pickle&&) noexcept;
  Pickle& operator=(Pickle&&) = delete;
  ~Pickle();

  [[nodiscard]] const PickleValue& value() const noexcept;

 private:
  friend class PickleMachine;
  struct State;
  explicit Pickle(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

}  // namespace plimsoll
