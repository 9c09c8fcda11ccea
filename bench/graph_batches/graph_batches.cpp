// SPDX-License-Identifier: Apache-2.0
//
// graph_batches: graphs a second in shuffled batches of 256, on one core.
//
// A set of windows of 100 frames, in memory; batches are assembled into the same buffers over and
// over. Before that every graph of an epoch is compared with the same graph read from disk alone.
// The peer is torch_geometric's DataLoader (peers.py), where it is installed.
//
// Threads: one.   Memory: the set (about 130 MB), and one batch.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "bench/report.h"
#include "plimsoll/can_import.h"
#include "tests/support/can_traffic.h"

namespace {

namespace pl = plimsoll;
using Clock = std::chrono::steady_clock;

constexpr double kBar = 0.7e6;
constexpr double kPeerBar = 10.0;
constexpr std::uint64_t kSeed = 20240624;
constexpr std::uint32_t kIds = 26;  // About 25 nodes a graph, as in the field's sets.

struct Settings {
  bool smoke{false};
  std::int64_t graphs{40'000};
  int probes{15};
  std::int64_t batch_graphs{256};
};

// Of this thread.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

// Every graph of an epoch of `batches` is the one that is read from disk alone.
bool check_answer(const pl::GraphSet& on_disk, pl::GraphBatches& batches,
                  pl::test::GraphMemory& memory) {
  std::vector<bool> seen(static_cast<std::size_t>(on_disk.graphs()));
  bool right = true;
  for (pl::GraphBatch batch; right && !batch.ends_epoch;) {
    batch = batches.next(memory.buffers()).or_throw();
    std::size_t node = 0;
    std::size_t edge = 0;
    const auto edges_in_all = static_cast<std::size_t>(batch.counts.edges);
    for (std::int64_t i = 0; right && i < batch.counts.graphs; ++i) {
      const std::int64_t graph = memory.graphs[static_cast<std::size_t>(i)];
      pl::test::GraphMemory alone(on_disk.counts(graph));
      static_cast<void>(on_disk.gather(std::span(&graph, 1), alone.buffers()).or_throw());
      const std::size_t nodes = alone.graph_of_node.size();
      const std::size_t edges = alone.edge_index.size() / 2;
      right = std::equal(alone.x.begin(), alone.x.end(), memory.x.begin() + node * 11) &&
              std::equal(alone.edge_attr.begin(), alone.edge_attr.end(),
                         memory.edge_attr.begin() + edge * 11) &&
              alone.labels[0] == memory.labels[i] && !seen[static_cast<std::size_t>(graph)];
      for (std::size_t e = 0; right && e < edges; ++e) {
        const auto offset = static_cast<std::int64_t>(node);
        right = memory.edge_index[edge + e] == alone.edge_index[e] + offset &&
                memory.edge_index[edges_in_all + edge + e] == alone.edge_index[edges + e] + offset;
      }
      for (std::size_t n = 0; right && n < nodes; ++n) {
        right = memory.graph_of_node[node + n] == i;
      }
      seen[static_cast<std::size_t>(graph)] = true;
      node += nodes;
      edge += edges;
    }
  }
  right = right && std::all_of(seen.begin(), seen.end(), [](bool one) { return one; });
  if (!right) {
    std::cerr << "graph_batches: a batch is not made of the graphs it names\n";
  }
  return right;
}

int run(const Settings& settings, const std::filesystem::path& scratch,
        const std::string& command) {
  pl::test::spill(scratch / "train.csv", pl::test::can_csv(settings.graphs * 100 + 1, kIds, kSeed));
  pl::Governor governor = pl::Governor::create({}).or_throw();
  pl::import_can(governor,
                 {.inputs = {scratch / "train.csv"}, .out = scratch / "set", .validation = 0.0},
                 nullptr)
      .or_throw();
  const auto set =
      pl::GraphSet::open(governor, {.directory = scratch / "set", .cache_bytes = 64LL << 30})
          .or_throw();
  const auto on_disk =
      pl::GraphSet::open(governor, {.directory = scratch / "set", .cache_bytes = 0}).or_throw();
  auto batches =
      pl::GraphBatches::open(&set, {.batch_graphs = settings.batch_graphs, .seed = kSeed})
          .or_throw();
  auto from_disk =
      pl::GraphBatches::open(&on_disk, {.batch_graphs = settings.batch_graphs, .seed = kSeed})
          .or_throw();
  pl::test::GraphMemory memory(batches.most());
  const bool right = check_answer(on_disk, batches, memory);
  std::vector<double> cpu_rates;
  const auto epoch = [&](pl::GraphBatches& which) {
    const double cpu_began = cpu_seconds();
    const auto began = Clock::now();
    for (pl::GraphBatch batch; !batch.ends_epoch;) {
      batch = which.next(memory.buffers()).or_throw();
    }
    const auto graphs = static_cast<double>(set.graphs());
    cpu_rates.push_back(graphs / (cpu_seconds() - cpu_began));
    return graphs / std::chrono::duration<double>(Clock::now() - began).count();
  };
  std::vector<double> rates;
  for (int probe = 0; probe < settings.probes; ++probe) {
    rates.push_back(epoch(batches));
  }
  const double cpu_rate = bench::median(cpu_rates);
  std::vector<double> disk_rates;
  for (int probe = 0; probe < (settings.probes + 4) / 5; ++probe) {
    disk_rates.push_back(epoch(from_disk));
  }
  const double rate = bench::median(rates);
  nlohmann::json peers = nlohmann::json::parse(bench::from_environment("PLIMSOLL_PEERS", "{}"));
  const double peer = peers.value("torch_geometric_graphs_per_s", 0.0);
  if (peer > 0) {
    peers["times_torch_geometric"] = rate / peer;
  } else {
    std::printf("torch_geometric is not installed: no peer in this run\n");
  }
  peers["graphs_per_s_min"] = bench::quantile(rates, 0.0);
  peers["graphs_per_s_max"] = bench::quantile(rates, 1.0);
  peers["graphs_per_cpu_s"] = cpu_rate;
  peers["uncached_graphs_per_s"] = bench::median(disk_rates);
  peers["nodes_a_graph"] =
      static_cast<double>(set.info().nodes) / static_cast<double>(set.graphs());
  peers["edges_a_graph"] =
      static_cast<double>(set.info().edges) / static_cast<double>(set.graphs());
  const bool fast = rate >= kBar && (peer <= 0 || rate >= kPeerBar * peer);
  return bench::Report{.name = "graph_batches",
                       .value = rate,
                       .unit = "graphs/s on one core",
                       .bar = kBar,
                       .pass = right && (settings.smoke || fast),
                       .peers = peers,
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings = {.smoke = true, .graphs = 1'000, .probes = 1};
    } else if (words.is("--graphs")) {
      settings.graphs = words.number(10, 10'000'000);
    } else if (words.is("--batch-graphs")) {
      settings.batch_graphs = words.number(1, 1'000'000);
    } else if (words.is("--probes")) {
      settings.probes = static_cast<int>(words.number(1, 1000));
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_in_scratch<Settings>(argc, argv, "graph_batches",
                                         "[--smoke] [--graphs N] [--batch-graphs N] [--probes N]",
                                         &settings_of, &run);
}
