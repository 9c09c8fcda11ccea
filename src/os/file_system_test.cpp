// SPDX-License-Identifier: Apache-2.0
#include "os/file_system.h"

#include <gtest/gtest.h>

#include "plimsoll/embedding_store.h"

namespace plimsoll {
namespace {

TEST(FileSystemTest, NamesThoseOfNetworksByTheirNumbers) {
  EXPECT_EQ(network_file_system(std::uint64_t{0x6969}), "NFS");
  EXPECT_EQ(network_file_system(std::uint64_t{0xFF534D42}), "CIFS");
  EXPECT_EQ(network_file_system(std::uint64_t{0x0BD00BD0}), "Lustre");
  EXPECT_EQ(network_file_system(std::uint64_t{0xEF53}), "");      // ext4
  EXPECT_EQ(network_file_system(std::uint64_t{0x58465342}), "");  // XFS
  EXPECT_EQ(network_file_system(std::uint64_t{0x01021994}), "");  // tmpfs
}

TEST(FileSystemTest, AsksForTheOneThatHoldsAPath) {
  EXPECT_EQ(network_file_system(std::filesystem::path("/proc")), "");
  EXPECT_EQ(network_file_system(std::filesystem::path("/nowhere/at/all")), "");
}

TEST(FileSystemTest, IsNamedByThePlanOfATableThatIsOnANetworks) {
  const SlabPlan near{.total_bytes = 4096};
  const SlabPlan far{.total_bytes = 4096, .network = "NFS"};
  EXPECT_EQ(near.to_string().find("durable"), std::string::npos);
  EXPECT_NE(far.to_string().find("; on NFS: a commit is as durable as its server"),
            std::string::npos);
}

}  // namespace
}  // namespace plimsoll
