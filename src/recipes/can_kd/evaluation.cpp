// SPDX-License-Identifier: Apache-2.0
//
// Scoring graphs with every finished model; tables, and JSON with the points of curves.
//
// Threads: single-owner.   Memory: see evaluation.h.
#include "recipes/can_kd/evaluation.h"

#include <ATen/ops/sigmoid.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/check.h"
#include "os/directories.h"
#include "os/file.h"
#include "recipes/can_kd/curves.h"
#include "recipes/can_kd/fusion.h"
#include "recipes/can_kd/models.h"
#include "recipes/can_kd/original_student.h"
#include "recipes/can_kd/scores.h"
#include "run/json_values.h"
#include "run/path_text.h"
#include "run/progress.h"
#include "torch/admission.h"

namespace plimsoll::can_kd {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Score = std::function<at::Tensor(const GraphTensors&)>;

constexpr const char* kFusion = "fusion";
constexpr const char* kFusionAdvice =
    "  A fusion has learnt whom to believe on the vehicles that it was trained on. Elsewhere use a "
    "part alone.\n\n";

// One finished model, ready to be asked.
struct Detector {
  std::string role;
  std::string name;  // "vgae", "gat_curriculum", …
  std::int64_t parameters{0};
  bool probability{true};  // Above one half means attack; else a threshold is to be found.
  bool fused{false};       // It is a part of the role's fusion.
  Score score;
  bool reads_edges{false};
};

struct Scored {
  std::vector<float> scores;
  std::vector<std::uint8_t> labels;
  std::vector<std::int32_t> files;
};

Result<Scored> score_graphs(const CanKdConfig& config, const Data& data,
                            std::span<const std::int64_t> graphs, const Detector& detector) {
  Scored all;
  all.scores.resize(graphs.size());
  for (const std::int64_t graph : graphs) {
    all.labels.push_back(static_cast<std::uint8_t>(data.set().label(graph)));
    all.files.push_back(static_cast<std::int32_t>(data.set().file(graph)));
  }
  PLIMSOLL_TRY_VOID(data.for_each(
      graphs, config.scoring_chunk,
      [&](std::int64_t first, const GraphTensors& batch) -> Result<void> {
        const at::Tensor found = detector.score(batch).contiguous();
        std::copy_n(found.data_ptr<float>(), found.numel(), all.scores.begin() + first);
        return {};
      },
      detector.reads_edges));
  return all;
}

// The detectors of one role that are there, in the order of the stages.
Result<std::vector<Detector>> detectors_of(const CanKdConfig& config, const Data& data,
                                           const fs::path& run, Role role) {
  const std::int64_t ids = data.set().info().table_rows();
  std::vector<Detector> found;
  std::shared_ptr<const Vgae> vgae;
  std::shared_ptr<const GatClassifier> fused;
  const Task autoencoder{role, Stage::kAutoencoder};
  if (const fs::path file = model_file(run, autoencoder); fs::exists(file)) {
    PLIMSOLL_TRY(Vgae model, load_vgae(config, role, ids, file));
    vgae = std::make_shared<Vgae>(std::move(model));
    found.push_back({role_name(role), "vgae", parameter_count(vgae->parameters()), false,
                     /*fused=*/true,
                     [vgae](const GraphTensors& batch) { return errors_of(*vgae, batch); }});
  }
  for (const Stage stage : {Stage::kCurriculum, Stage::kNormal}) {
    const Task task{role, stage};
    if (const fs::path file = model_file(run, task); fs::exists(file)) {
      PLIMSOLL_TRY(GatClassifier model, load_classifier(config, role, ids, file));
      const auto kept = std::make_shared<GatClassifier>(std::move(model));
      found.push_back({role_name(role),
                       stage == Stage::kCurriculum ? "gat_curriculum" : "gat_normal",
                       parameter_count(kept->parameters()), true,
                       /*fused=*/task == classifier_task(role, config),
                       [kept](const GraphTensors& batch) { return chances_of(*kept, batch); }});
      fused = found.back().fused ? kept : fused;
    }
  }
  if (const fs::path file = model_file(run, {role, Stage::kFusion});
      fs::exists(file) && vgae && fused) {
    PLIMSOLL_TRY(FusionModel model, FusionModel::load(config, file));
    const auto kept = std::make_shared<FusionModel>(std::move(model));
    found.push_back({role_name(role), kFusion, parameter_count(kept->network.parameters()), true,
                     /*fused=*/false, [vgae, fused, kept](const GraphTensors& batch) {
                       return kept->scores(fusion_states(*vgae, *fused, batch));
                     }});
  }
  return found;
}

// The published students that the options name, by their files' names.
Result<std::vector<Detector>> original_detectors(const CanKdConfig& config, const Data& data) {
  std::vector<Detector> found;
  if (config.original_students.empty()) {
    return found;
  }
  const fs::path named = config.original_students;
  std::vector<fs::path> files;
  std::error_code status;
  if (fs::is_directory(named, status)) {
    PLIMSOLL_TRY(const auto names, names_in(named));
    for (const std::string& name : names) {
      if (name.ends_with(".safetensors")) {
        files.push_back(named / name);
      }
    }
  } else {
    files.push_back(named);
  }
  for (const fs::path& file : files) {
    if (!is_path_text(file.native())) {  // Its name is part of evaluation.json.
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("original_students: the name of a file in {} is not UTF-8",
                              file.parent_path().string()),
                  "rename it");
    }
    PLIMSOLL_TRY(OriginalStudent model, OriginalStudent::load(file));
    const auto kept = std::make_shared<OriginalStudent>(std::move(model));
    found.push_back({"original", file.stem().string(), kept->parameter_count(), true,
                     /*fused=*/false,
                     [kept, &data](const GraphTensors& batch) {
                       const at::Tensor features =
                           original_features(batch, batch.edge_attr, data.set().vocabulary());
                       return at::sigmoid(kept->forward(features, make_adjacency(batch)));
                     },
                     /*reads_edges=*/true});
  }
  return found;
}

// {"fpr": [0, …], "recall": [0, …], "threshold": [null, …]}; a threshold that is no number is null.
Json curve_json(const std::vector<CurvePoint>& points, const char* x, const char* y) {
  Json json{{x, Json::array()}, {y, Json::array()}, {"threshold", Json::array()}};
  for (const CurvePoint& point : points) {
    json[x].push_back(point.x);
    json[y].push_back(point.y);
    json["threshold"].push_back(json_number(point.threshold));
  }
  return json;
}

Json curves_of(const Scored& tests) {
  return {{"roc", curve_json(roc_curve(tests.scores, tests.labels, kCurvePoints), "fpr", "recall")},
          {"precision_recall",
           curve_json(pr_curve(tests.scores, tests.labels, kCurvePoints), "recall", "precision")}};
}

}  // namespace

Result<std::int64_t> rehearse_evaluation(const Governor& governor, const CanKdConfig& config,
                                         const Data& data, const fs::path& run) {
  const c10::AutoGradMode off{false};
  return rehearse_step(
      governor, config.scoring_chunk, {.least_rows = 1}, [&](std::int64_t chunk) -> Result<void> {
        const auto answer = [&](const std::vector<Detector>& detectors) -> Result<void> {
          for (const Detector& detector : detectors) {
            for (const auto asked : {data.held_out(), data.set().split(GraphSplit::kTest)}) {
              const auto largest = data.largest(asked, chunk);
              PLIMSOLL_TRY_VOID(score_graphs(config, data, largest, detector));
            }
          }
          return {};
        };
        for (const Role role : {Role::kTeacher, Role::kStudent}) {
          PLIMSOLL_TRY(const auto ours, detectors_of(config, data, run, role));
          PLIMSOLL_TRY_VOID(answer(ours));
        }
        PLIMSOLL_TRY(const auto published, original_detectors(config, data));
        return answer(published);
      });
}

Result<Evaluated> evaluate(const CanKdConfig& config, const Data& data, const fs::path& run,
                           bool write) {
  const c10::AutoGradMode off{false};
  const auto held_out = data.held_out();
  const auto tests = data.set().split(GraphSplit::kTest);
  std::vector<std::string> names;
  for (const GraphFileInfo& file : data.set().info().files) {
    names.push_back(file.name);
  }
  Evaluated done;
  Json json = Json::object();
  std::vector<NamedScores> kept_rows;
  Json curves = Json::object();
  const auto evaluate_all = [&](const std::vector<Detector>& detectors) -> Result<void> {
    std::vector<NamedReport> parts;  // Of the fusion, which comes after them.
    for (const Detector& detector : detectors) {
      PLIMSOLL_TRY(const Scored kept, score_graphs(config, data, held_out, detector));
      const double threshold =
          detector.probability ? 0.5 : youden_threshold(kept.scores, kept.labels);
      const BinaryScores at_home = score(kept.scores, kept.labels, threshold);
      kept_rows.push_back({fmt::format("{} {}", detector.role, detector.name), at_home});
      Json& out = json[detector.role][detector.name];
      out["parameters"] = detector.parameters;
      out["threshold"] = to_json(at_home)["threshold"];
      out["held_out"] = to_json(at_home);
      if (tests.empty()) {
        continue;
      }
      PLIMSOLL_TRY(const Scored away, score_graphs(config, data, tests, detector));
      const ScoreReport report =
          score_by_file(away.scores, away.labels, away.files, names, threshold);
      out["test"] = report.to_json();
      done.text += fmt::format("{} {} ({} parameters, threshold {:.4g}), test files\n{}\n",
                               detector.role, detector.name, format_count(detector.parameters),
                               threshold, report.to_text());
      if (detector.fused) {
        parts.push_back({detector.name, report});
      }
      if (detector.name == kFusion) {
        const std::vector<std::string> warnings = fusion_warnings(report, parts);
        out["warnings"] = warnings;
        for (const std::string& warning : warnings) {
          done.text += fmt::format("warning: {} {} is worse than one of its parts. {}\n",
                                   detector.role, detector.name, warning);
        }
        done.text += warnings.empty() ? "" : kFusionAdvice;
      }
      if (write) {
        curves[detector.role][detector.name] = curves_of(away);
      }
    }
    return {};
  };
  for (const Role role : {Role::kTeacher, Role::kStudent}) {
    PLIMSOLL_TRY(const auto detectors, detectors_of(config, data, run, role));
    done.any = done.any || !detectors.empty();
    PLIMSOLL_TRY_VOID(evaluate_all(detectors));
  }
  PLIMSOLL_TRY(const auto published, original_detectors(config, data));
  PLIMSOLL_TRY_VOID(evaluate_all(published));
  done.text += "graphs held out\n" + score_table(kept_rows);
  done.json = json.dump();
  if (write) {
    json["curves"] = std::move(curves);
    PLIMSOLL_TRY_VOID(replace_file(run / "evaluation.json", json.dump(1) + "\n"));
    PLIMSOLL_TRY_VOID(replace_file(run / "evaluation.txt", done.text));
  }
  return done;
}

}  // namespace plimsoll::can_kd
