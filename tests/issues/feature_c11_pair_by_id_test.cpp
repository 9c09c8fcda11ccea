// SPDX-License-Identifier: Apache-2.0
//
// C11: image, text and trainable vector of a sample must be paired by id, never by position or by
// arithmetic on ids. The original chunked features in order of arrival and vectors by sorted id.
//
// Method: samples arrive shuffled with sparse ids; every value spells its own id; the loader's
// batches and direct reads must agree on which sample each row is.
#include <cstring>
#include <map>

#include <gtest/gtest.h>

#include "plimsoll/feature_store.h"
#include "plimsoll/loader.h"
#include "tests/support/feature_set.h"

namespace plimsoll {
namespace {

TEST(C11, FeaturesArePairedByIdWhateverTheOrderOfArrival) {
  constexpr std::int64_t kRows = 5000;
  test::ScratchDirectory scratch;
  Governor governor = test::governor_of();
  test::FeatureSet set = test::make_set(11, kRows,
                                        {{.name = "image", .dtype = DType::kInt64, .shape = {3}},
                                         {.name = "text", .dtype = DType::kInt64, .shape = {}}},
                                        test::IdKind::kSparse);
  for (std::size_t i = 0; i < static_cast<std::size_t>(kRows); ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      std::memcpy(set.values[0].data() + (i * 3 + j) * 8, &set.ids[i], 8);
    }
    std::memcpy(set.values[1].data() + i * 8, &set.ids[i], 8);
  }
  ASSERT_TRUE(test::write_set(governor, scratch / "set", set));
  auto store =
      FeatureStore::open(governor, {.directory = scratch / "set", .cache_bytes = 128 << 10})
          .or_throw();

  std::mt19937_64 random(11);
  std::vector<std::int64_t> request = set.ids;
  std::shuffle(request.begin(), request.end(), random);
  std::vector<std::int64_t> image(static_cast<std::size_t>(kRows) * 3);
  std::vector<std::int64_t> text(static_cast<std::size_t>(kRows));
  const std::vector<std::span<std::byte>> out{std::as_writable_bytes(std::span(image)),
                                              std::as_writable_bytes(std::span(text))};
  ASSERT_TRUE(store.read(request, std::vector<int>{0, 1}, out));
  EXPECT_EQ(text, request);
  for (std::size_t i = 0; i < request.size(); ++i) {
    ASSERT_EQ(image[i * 3 + 1], request[i]);
  }

  const Split split = Split::create(governor, &store, {.held_out_groups = 100}).or_throw();
  Loader loader =
      Loader::open(governor, &store, &split, {.batch_rows = 256, .threads = 2}).or_throw();
  for (Batch batch; !batch.ends_epoch();) {
    loader.next(batch).or_throw();
    for (std::size_t i = 0; i < batch.ids().size(); ++i) {
      std::int64_t in_text = 0;
      std::memcpy(&in_text, batch.column(1).data() + i * 8, 8);
      ASSERT_EQ(in_text, batch.ids()[i]);
    }
  }
}

}  // namespace
}  // namespace plimsoll
