// SPDX-License-Identifier: Apache-2.0
//
// W6: whole training steps with the arena and the governor on, against plain LibTorch.
//
// Two children train the same model from the same seed, one plain and one governed; the parent
// lets them take single steps in turn, in alternating order, so that both meet the same noise.
// Losses must agree bit for bit at every step before any time is believed.
//
// Reading order: main, measure, Steps, child_main.
//
// Threads: as many as --threads in each child, of which one computes at a time.
// Memory:  two models; a figure per step.
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "bench/report.h"
#include "bench/turns.h"
#include "plimsoll/torch.h"

namespace {

constexpr double kBar = 1.03;              // Slowdown, upper 95 % bound.
constexpr double kPeakBar = 0.85;          // Governed / plain peak resident above the baseline.
constexpr std::uint64_t kSeed = 20240607;  // Of weights, inputs and dropout.

struct Settings {
  bool smoke{false};
  int pairs{40};
  int warm{4};
  int threads{1};
  std::string cbwr{"AUTO"};
};

// ---- The models ----

struct Transformer : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear head{nullptr};
  explicit Transformer(int layers) {
    auto layer = torch::nn::TransformerEncoderLayerOptions(256, 4).dim_feedforward(1024);
    embed = register_module("embed", torch::nn::Embedding(8000, 256));
    encoder = register_module(
        "encoder", torch::nn::TransformerEncoder(
                       torch::nn::TransformerEncoderOptions(layer.dropout(0.1), layers)));
    head = register_module("head", torch::nn::Linear(256, 100));
  }
  at::Tensor forward(const at::Tensor& ids) {
    return head(encoder(embed(ids).transpose(0, 1)).mean(0));
  }
};

struct ConvNet : torch::nn::Module {
  torch::nn::Sequential body{nullptr};
  ConvNet() {
    auto conv = [](int in, int out, int stride) {
      return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).stride(stride));
    };
    body = register_module(
        "body", torch::nn::Sequential(
                    conv(3, 32, 1), torch::nn::BatchNorm2d(32), torch::nn::ReLU(), conv(32, 64, 2),
                    torch::nn::BatchNorm2d(64), torch::nn::ReLU(), conv(64, 128, 2),
                    torch::nn::BatchNorm2d(128), torch::nn::ReLU(), torch::nn::AdaptiveAvgPool2d(1),
                    torch::nn::Flatten(), torch::nn::Linear(128, 1024), torch::nn::GELU(),
                    torch::nn::Dropout(0.1), torch::nn::Linear(1024, 1024), torch::nn::ReLU(),
                    torch::nn::Linear(1024, 100)));
  }
  at::Tensor forward(const at::Tensor& pixels) { return body->forward(pixels); }
};

// ---- The child: one step per line it reads ----

std::int64_t status_kib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key, 0) == 0) {
      return std::atoll(line.c_str() + key.size());
    }
  }
  return -1;
}

// Of all threads: what a step costs, whoever else uses the machine.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <class Model, class Inputs>
void serve(std::shared_ptr<Model> model, Inputs inputs, std::int64_t rows,
           const plimsoll::Governor& governor, std::int64_t baseline_kib) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  plimsoll::Governor steering = governor;
  for (std::string line; std::getline(std::cin, line) && line == "step";) {
    const double cpu_begin = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    float loss_value = 0;
    {
      const auto x = inputs(rows);
      const auto y = torch::randint(0, 100, {rows});
      optimizer.zero_grad();
      auto loss = torch::nn::functional::cross_entropy(model->forward(x), y);
      loss.backward();
      optimizer.step();
      loss_value = loss.template item<float>();
    }
    if (steering.valid()) {
      steering.step_boundary();
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const double cpu = cpu_seconds() - cpu_begin;
    const auto stats = plimsoll::TensorArena::stats();
    std::printf("%.9f %.9f %08x %lld %lld %lld\n", seconds.count(), cpu,
                std::bit_cast<std::uint32_t>(loss_value),
                static_cast<long long>(status_kib("VmHWM:") - baseline_kib),
                static_cast<long long>(stats.live_peak_bytes),
                static_cast<long long>(stats.leased_peak_bytes));
    std::fflush(stdout);
  }
}

int child_main(const std::string& model, bool governed, bool small, int threads) {
  if (governed) {
    plimsoll::fix_heap();
  }
  plimsoll::make_deterministic(threads).or_throw();
  torch::manual_seed(kSeed);
  torch::randn({64, 64}).mm(torch::randn({64, 64}));  // Loads what every process loads.
  const std::int64_t baseline_kib = status_kib("VmRSS:");
  plimsoll::Governor governor;
  if (governed) {
    governor = plimsoll::Governor::create({}).or_throw();
    plimsoll::TensorArena::attach(governor).or_throw();
  }
  if (model == "transformer") {
    const auto ids = [](std::int64_t rows) { return torch::randint(0, 8000, {rows, 64}); };
    serve(std::make_shared<Transformer>(4), ids, small ? 4 : 64, governor, baseline_kib);
  } else {
    const auto pixels = [](std::int64_t rows) { return torch::randn({rows, 3, 32, 32}); };
    serve(std::make_shared<ConvNet>(), pixels, small ? 8 : 256, governor, baseline_kib);
  }
  return 0;
}

// ---- The parent ----

struct Step {
  double seconds{0};
  double cpu_seconds{0};
  std::string loss;
  std::int64_t peak_kib{0};
  std::int64_t live_peak_bytes{0};
  std::int64_t leased_peak_bytes{0};
};

class Steps {
 public:
  Steps(const std::string& model, bool governed, const Settings& settings)
      : child_({"/proc/self/exe", "--child", model, governed ? "governed" : "plain",
                settings.smoke ? "small" : "full", std::to_string(settings.threads)},
               {"MKL_CBWR=" + settings.cbwr}) {}

  Step step() {
    Step step;
    std::istringstream(child_.ask("step")) >> step.seconds >> step.cpu_seconds >> step.loss >>
        step.peak_kib >> step.live_peak_bytes >> step.leased_peak_bytes;
    return step;
  }

 private:
  bench::Child child_;
};

struct Outcome {
  bool same_bits{true};
  bench::Ratio slowdown;      // Governed / plain, in time.
  bench::Ratio cpu_slowdown;  // In processor time.
  double plain_ms{0};         // Medians.
  double governed_ms{0};
  double plain_peak_mib{0};
  double governed_peak_mib{0};
  double live_peak_mib{0};
  double leased_peak_mib{0};
  [[nodiscard]] double peak_ratio() const { return governed_peak_mib / plain_peak_mib; }
};

Outcome measure(const std::string& model, const Settings& settings) {
  Steps plain(model, false, settings);
  Steps governed(model, true, settings);
  Outcome out;
  std::vector<double> logs;
  std::vector<double> cpu_logs;
  std::vector<double> plain_ms;
  std::vector<double> governed_ms;
  for (int i = -settings.warm; i < settings.pairs && out.same_bits; ++i) {
    Step a;
    Step b;
    if (i % 2 == 0) {
      a = plain.step();
      b = governed.step();
    } else {
      b = governed.step();
      a = plain.step();
    }
    out.same_bits = a.loss == b.loss && !a.loss.empty();
    constexpr double kMiB = 1024 * 1024;
    out.plain_peak_mib = static_cast<double>(a.peak_kib) / 1024;
    out.governed_peak_mib = static_cast<double>(b.peak_kib) / 1024;
    out.live_peak_mib = static_cast<double>(b.live_peak_bytes) / kMiB;
    out.leased_peak_mib = static_cast<double>(b.leased_peak_bytes) / kMiB;
    if (i >= 0) {
      logs.push_back(std::log(b.seconds / a.seconds));
      cpu_logs.push_back(std::log(b.cpu_seconds / a.cpu_seconds));
      plain_ms.push_back(a.seconds * 1e3);
      governed_ms.push_back(b.seconds * 1e3);
    }
  }
  if (!out.same_bits || logs.empty()) {
    return out;
  }
  out.slowdown = bench::ratio_of(logs);
  out.cpu_slowdown = bench::ratio_of(cpu_logs);
  out.plain_ms = bench::median(plain_ms);
  out.governed_ms = bench::median(governed_ms);
  return out;
}

Settings settings_of(bench::Arguments& words) {
  Settings settings;
  while (words.next()) {
    if (words.is("--smoke")) {
      settings.smoke = true;
      settings.pairs = 4;
      settings.warm = 2;
    } else if (words.is("--pairs")) {
      settings.pairs = static_cast<int>(words.number(2, 100'000));
    } else if (words.is("--threads")) {
      settings.threads = static_cast<int>(words.number(1, 256));
    } else if (words.is("--mkl-cbwr")) {
      settings.cbwr = words.word();
    } else {
      words.refuse();
    }
  }
  return settings;
}

int run(const Settings& settings, const std::string& command) {
  nlohmann::json peers = {
      {"pairs", settings.pairs}, {"threads", settings.threads}, {"mkl_cbwr", settings.cbwr}};
  double bound = 0;
  double peak_ratio = 0;
  bool right = true;
  for (const char* model : {"transformer", "convnet"}) {
    const Outcome out = measure(model, settings);
    right = right && out.same_bits;
    std::printf("%-12s losses %s\n", model, out.same_bits ? "identical to the bit" : "DIFFER");
    std::printf("  step       plain %.1f ms, governed %.1f ms; slowdown %.4f, 95 %% bound %.4f\n",
                out.plain_ms, out.governed_ms, out.slowdown.mean, out.slowdown.bound);
    std::printf("  processor  slowdown %.4f, 95 %% bound %.4f\n", out.cpu_slowdown.mean,
                out.cpu_slowdown.bound);
    std::printf("  peak       plain %.1f MiB, governed %.1f MiB above the baseline; ratio %.3f\n",
                out.plain_peak_mib, out.governed_peak_mib, out.peak_ratio());
    std::printf("  arena      live peak %.1f MiB, leased peak %.1f MiB\n", out.live_peak_mib,
                out.leased_peak_mib);
    bound = std::max(bound, out.slowdown.bound);
    peak_ratio = std::max(peak_ratio, out.peak_ratio());
    peers[model] = {{"slowdown", out.slowdown.mean},
                    {"slowdown_bound", out.slowdown.bound},
                    {"cpu_slowdown", out.cpu_slowdown.mean},
                    {"cpu_slowdown_bound", out.cpu_slowdown.bound},
                    {"plain_ms", out.plain_ms},
                    {"governed_ms", out.governed_ms},
                    {"plain_peak_mib", out.plain_peak_mib},
                    {"governed_peak_mib", out.governed_peak_mib},
                    {"live_peak_mib", out.live_peak_mib}};
  }
  peers["peak_resident_above_baseline_ratio"] = peak_ratio;
  const bool pass = right && (settings.smoke || (bound <= kBar && peak_ratio <= kPeakBar));
  return bench::Report{.name = "w6_governor",
                       .value = bound,
                       .unit = "x of plain LibTorch's step time, upper 95 % bound",
                       .bar = kBar,
                       .pass = pass,
                       .peers = peers,
                       .seed = kSeed,
                       .command = command}
      .print();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 6 && std::string(argv[1]) == "--child") {
    return child_main(argv[2], std::string(argv[3]) == "governed", std::string(argv[4]) == "small",
                      std::atoi(argv[5]));
  }
  return bench::run_benchmark(
      argc, argv, "w6_governor", "[--smoke] [--pairs N] [--threads N] [--mkl-cbwr MODE]",
      [](bench::Arguments& words) { return run(settings_of(words), words.command()); });
}
