// SPDX-License-Identifier: Apache-2.0
#include "plimsoll/result.h"

#include <system_error>

#include <fmt/core.h>

#include "base/utf8.h"
#include "plimsoll/bytes.h"

namespace plimsoll {

namespace {

constexpr std::int64_t kMebibyte = 1LL << 20;

// " (held: tensors 300.0 MiB, rows 128.0 MiB; baseline 225.0 MiB)": everything that is not free.
std::string holders(const Error& error) {
  std::string text;
  for (int i = 0; i < kTagCount; ++i) {
    const std::int64_t held = error.held_bytes[static_cast<std::size_t>(i)];
    if (held > 0) {
      text += fmt::format("{}{} {}", text.empty() ? "held: " : ", ", tag_name(static_cast<Tag>(i)),
                          format_bytes(held));
    }
  }
  if (error.orphan_bytes > 0) {
    text += fmt::format("{}closed governors {}", text.empty() ? "held: " : ", ",
                        format_bytes(error.orphan_bytes));
  }
  if (error.baseline_bytes > 0) {
    text +=
        fmt::format("{}baseline {}", text.empty() ? "" : "; ", format_bytes(error.baseline_bytes));
  }
  return text.empty() ? text : " (" + text + ")";
}

std::string refusal(const Error& error) {
  const auto wanted = format_bytes(error.requested_bytes);
  const auto free = format_bytes(error.available_bytes);
  if (error.cap_bytes > 0) {
    return fmt::format("{} wanted {}, {} free of their {} cap: raise {}", tag_name(error.tag),
                       wanted, free, format_bytes(error.cap_bytes), error.advice);
  }
  std::string text = fmt::format("{} wanted {}, {} free of the {} limit{}: ", tag_name(error.tag),
                                 wanted, free, format_bytes(error.limit_bytes), holders(error));
  if (error.smallest_limit_bytes > 0) {
    // Rounded up and without a space, so that it can be pasted as an option. At least: nobody here
    // knows what else will be wanted.
    text += fmt::format("this takes a limit of at least {}MiB; ",
                        (error.smallest_limit_bytes + kMebibyte - 1) / kMebibyte);
  }
  return text + error.advice;
}

}  // namespace

const char* tag_name(Tag tag) noexcept {
  switch (tag) {
    case Tag::kTensor:
      return "tensors";
    case Tag::kEmbedding:
      return "rows";
    case Tag::kFeature:
      return "features";
    case Tag::kLoader:
      return "loader";
    case Tag::kPinned:
      return "pinned";
    case Tag::kWeights:
      return "weights";
    case Tag::kForeign:
      return "foreign";
    case Tag::kOther:
      return "other";
  }
  return "unknown";
}

std::string Error::to_string() const {
  if (detail == nullptr && code == ErrorCode::kOverBudget) {
    return refusal(*this);
  }
  std::string text = detail == nullptr ? std::string() : *detail;
  if (*advice != '\0') {
    text += text.empty() ? "" : ": ";
    text += advice;
  }
  return text;
}

Error make_error(ErrorCode code, std::string detail, const char* advice) {
  Error error;
  error.code = code;
  error.advice = advice;
  // A path, or what a damaged file said, may be other bytes than a terminal or Python takes for
  // text.
  error.detail = std::make_shared<const std::string>(as_utf8(std::move(detail)));
  return error;
}

Error make_io_error(int os_errno, std::string detail, const char* advice) {
  detail += ": " + std::generic_category().message(os_errno);
  Error error = make_error(ErrorCode::kIo, std::move(detail), advice);
  error.os_errno = os_errno;
  return error;
}

}  // namespace plimsoll
