// SPDX-License-Identifier: Apache-2.0
#include "recipes/cosir/summary.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace plimsoll {
namespace {

TEST(RunSummaryTest, IsOneLineOfJsonWithTheAgreedKeys) {
  RunSummary summary;
  summary.recall_json = R"({"raw": {"t2i": {"r1": 12.5, "mean_rank": 3.0}}})";
  summary.loss = std::numeric_limits<double>::infinity();
  const std::string text = summary.to_json();
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(text);
  for (const char* key : {"status", "step", "epoch", "loss", "rows_per_second", "limit_bytes",
                          "peak_resident_bytes", "leased_peak_bytes", "hit_rate", "commits",
                          "seconds", "recall", "recall_before", "state_sha256"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_EQ(json["recall"]["raw"]["t2i"]["r1"], 12.5);
  EXPECT_NE(summary.to_text().find("12.5"), std::string::npos);
}

}  // namespace
}  // namespace plimsoll
