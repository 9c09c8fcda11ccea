// SPDX-License-Identifier: Apache-2.0
//
// One GATConv layer, forward and backward, against torch_geometric's on the CPU. README.md says
// how.
//
// Threads: torch's.   Memory: a few hundred MiB.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "base/philox.h"
#include "bench/report.h"
#include "recipes/can_kd/adjacency.h"
#include "recipes/can_kd/gat_conv.h"
#include "torch/random_tensors.h"

namespace {

using plimsoll::can_kd::Adjacency;
using plimsoll::can_kd::GatConv;
using plimsoll::can_kd::GraphTensors;
using TensorList = std::vector<at::Tensor>;

constexpr std::uint64_t kSeed = 3;
constexpr std::int64_t kNodes = 26;  // Of a graph.
constexpr std::int64_t kEdges = 60;
constexpr double kTolerance = 2e-5;  // Of an answer, as a share of its largest element.
constexpr double kBar = 1.0;

struct Size {
  const char* name;
  plimsoll::can_kd::GatConvShape shape;
};
const Size kSizes[] = {{"student", {96, 24, 4, true, 0.0}}, {"teacher", {512, 64, 8, true, 0.0}}};

struct Settings {
  bool smoke{false};
  std::int64_t graphs{256};
  int threads{2};
  int probes{40};
};

// A layer's inputs: x, weight, att_source, att_target, bias, all taking gradients.
struct Inputs {
  GraphTensors graphs;
  TensorList leaves;
  at::Tensor weighting;
};

GraphTensors graphs_of(const at::Tensor& edges, std::int64_t count) {
  const auto whole = at::kLong;
  return {at::zeros({count * kNodes, 1}, at::kFloat), edges,
          at::arange(count, whole).repeat_interleave(kNodes), at::zeros({count}, whole),
          at::arange(count, whole)};
}

Inputs random_inputs(const Size& size, std::int64_t graphs) {
  auto edges = at::empty({2, graphs * kEdges}, at::kLong);
  auto* index = edges.data_ptr<std::int64_t>();
  for (std::int64_t e = 0; e < edges.numel(); ++e) {
    const auto word = plimsoll::philox(kSeed, 1, static_cast<std::uint64_t>(e))[0];
    index[e] = e % (graphs * kEdges) / kEdges * kNodes + static_cast<std::int64_t>(word % kNodes);
  }
  std::uint64_t stream = 10;
  const auto conv = GatConv::make(size.shape, kSeed, stream);
  const auto normal = [](at::IntArrayRef shape, std::uint64_t at) {
    return plimsoll::random_normal(shape, 1.0, kSeed, at);
  };
  const auto x = normal({graphs * kNodes, size.shape.in}, 2).set_requires_grad(true);
  return {graphs_of(edges, graphs),
          {x, conv.weight, conv.att_source, conv.att_target, conv.bias},
          normal({graphs * kNodes, size.shape.width()}, 3)};
}

at::Tensor read_raw(const std::filesystem::path& file, at::IntArrayRef shape,
                    at::ScalarType type = at::kFloat) {
  auto made = at::empty(shape, type);
  std::ifstream in(file, std::ios::binary);
  if (!in.read(static_cast<char*>(made.data_ptr()), static_cast<std::streamsize>(made.nbytes()))) {
    throw std::runtime_error("cannot read " + file.string());
  }
  return made;
}

TensorList read_list(const std::filesystem::path& folder, const std::string& prefix,
                     const Size& size, std::int64_t nodes) {
  const auto& s = size.shape;
  return {read_raw(folder / (prefix + "x"), {nodes, s.in}),
          read_raw(folder / (prefix + "weight"), {s.width(), s.in}),
          read_raw(folder / (prefix + "att_source"), {s.heads, s.out}),
          read_raw(folder / (prefix + "att_target"), {s.heads, s.out}),
          read_raw(folder / (prefix + "bias"), {s.width()})};
}

// Value, then gradients.
TensorList answer(const Size& size, const Inputs& in) {
  const Adjacency adjacency = plimsoll::can_kd::make_adjacency(in.graphs);
  const GatConv conv{size.shape, in.leaves[1], in.leaves[2], in.leaves[3], in.leaves[4]};
  const auto y = conv.forward(in.leaves[0], adjacency, {.training = true}, 0);
  auto made = torch::autograd::grad({y}, in.leaves, {in.weighting});
  made.insert(made.begin(), y.detach());
  return made;
}

// The formula edge by edge with plain operators in float64.
TensorList plain_answer(const Size& size, const Inputs& in) {
  TensorList leaves;
  for (const auto& leaf : in.leaves) {
    leaves.push_back(leaf.detach().to(at::kDouble).set_requires_grad(true));
  }
  const std::int64_t nodes = in.graphs.nodes();
  const auto own = at::arange(nodes, at::kLong);
  const auto given = in.graphs.edge_index;
  const auto kept = given.index({at::indexing::Slice(), given[0] != given[1]});
  const auto source = at::cat({kept[0], own});
  const auto target = at::cat({kept[1], own});
  const auto& s = size.shape;
  const auto h = at::matmul(leaves[0], leaves[1].t()).view({nodes, s.heads, s.out});
  const auto score = at::leaky_relu((h * leaves[2]).sum(2).index_select(0, source) +
                                        (h * leaves[3]).sum(2).index_select(0, target),
                                    0.2);
  const auto e = at::exp(score - score.detach().max());
  const auto sum = at::zeros({nodes, s.heads}, at::kDouble).index_add(0, target, e);
  const auto alpha = e / sum.index_select(0, target);
  const auto message = h.index_select(0, source) * alpha.unsqueeze(2);
  const auto y = at::zeros({nodes, s.heads, s.out}, at::kDouble)
                     .index_add(0, target, message)
                     .reshape({nodes, s.width()}) +
                 leaves[4];
  auto made = torch::autograd::grad({y}, leaves, {in.weighting.to(at::kDouble)});
  made.insert(made.begin(), y.detach());
  return made;
}

bool near(const TensorList& made, const TensorList& wanted, const std::string& what) {
  bool all = true;
  for (std::size_t k = 0; k < made.size(); ++k) {
    const auto exact = wanted[k].to(at::kDouble).reshape(made[k].sizes());
    const double apart =
        ((made[k].to(at::kDouble) - exact).abs().max() / exact.abs().max()).item<double>();
    if (!(apart < kTolerance)) {
      std::cout << what << ": answer " << k << " is " << apart << " apart\n";
      all = false;
    }
  }
  return all;
}

struct Times {
  double median{0};
  double least{0};
};

Times time_steps(const Size& size, const Inputs& in, int probes) {
  std::vector<double> seconds;
  for (int probe = 0; probe < probes + 3; ++probe) {
    const auto begin = std::chrono::steady_clock::now();
    (void)answer(size, in);
    if (probe >= 3) {
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  }
  return {bench::median(seconds), *std::min_element(seconds.begin(), seconds.end())};
}

int run(Settings settings, const std::string& command) {
  const auto given = nlohmann::json::parse(bench::from_environment("PLIMSOLL_PEERS", "{}"));
  const bool peer = given.contains("folder");
  const std::filesystem::path folder = peer ? given["folder"].get<std::string>() : "";
  if (peer) {  // The same graphs, the same threads.
    settings.graphs = given["graphs"];
    settings.threads = given["threads"];
  }
  at::set_num_threads(settings.threads);
  auto peers = given;
  peers.erase("folder");
  bool right = true;
  double worst = 1e9;
  for (const auto& size : kSizes) {
    Inputs in = random_inputs(size, settings.graphs);
    if (peer) {
      const auto nodes = in.graphs.nodes();
      const auto here = folder / size.name;
      in.graphs = graphs_of(read_raw(here / "edges", {2, settings.graphs * kEdges}, at::kLong),
                            settings.graphs);
      in.leaves = read_list(here, "", size, nodes);
      for (const auto& leaf : in.leaves) {
        leaf.set_requires_grad(true);
      }
      in.weighting = read_raw(here / "weighting", {nodes, size.shape.width()});
      auto wanted = read_list(here, "grad_", size, nodes);
      wanted.insert(wanted.begin(), read_raw(here / "y", {nodes, size.shape.width()}));
      right = near(answer(size, in), wanted, std::string(size.name) + ", torch_geometric") && right;
    }
    right = near(answer(size, in), plain_answer(size, in), size.name) && right;
    const Times ours = time_steps(size, in, settings.probes);
    auto& said = peers[std::string("plimsoll_") + size.name];
    said = {{"seconds", ours.median}, {"seconds_min", ours.least}};
    if (peer) {
      const double ratio = given[size.name]["seconds"].get<double>() / ours.median;
      said["ratio"] = ratio;
      worst = std::min(worst, ratio);
    }
  }
  if (peer) {
    std::filesystem::remove_all(folder);
  }
  peers["threads"] = settings.threads;
  peers["graphs"] = settings.graphs;
  return bench::Report{.name = "gat_step",
                       .value = peer ? worst : 0.0,
                       .unit = "times as fast as torch_geometric, the slower of both sizes",
                       .bar = kBar,
                       .pass = right && (settings.smoke || (peer && worst >= kBar)),
                       .peers = peers,
                       .seed = kSeed,
                       .command = command}
      .print();
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings = {.smoke = true, .graphs = 8, .probes = 1};
    } else if (words.is("--graphs")) {
      settings.graphs = words.number(1, 100'000);
    } else if (words.is("--threads")) {
      settings.threads = static_cast<int>(words.number(1, 256));
    } else if (words.is("--probes")) {
      settings.probes = static_cast<int>(words.number(1, 10'000));
    } else {
      words.refuse();
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_benchmark(
      argc, argv, "gat_step", "[--smoke] [--graphs N] [--threads N] [--probes N]",
      [](bench::Arguments& words) { return run(settings_of(words), words.command()); });
}
