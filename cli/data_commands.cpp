// SPDX-License-Identifier: Apache-2.0
//
// synth, import, store: making data, and looking after stores.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "plimsoll/bytes.h"
#include "plimsoll/dataset_import.h"
#include "plimsoll/synth.h"
#include "run/control.h"
#include "tables/describe.h"
#include "tables/store_compact.h"
#include "tables/store_export.h"
#include "tables/store_import.h"

namespace plimsoll {
namespace {

constexpr const char* kJsonHelp = "Result as one line of JSON instead of text";
constexpr const char* kQuietHelp = "Progress is not shown";

/// Options that all of these share.
struct Place {
  std::string directory{};
  std::string out{};
  std::string memory_limit{};
  bool json{false};
  bool quiet{false};
};

void add_place(CLI::App& command, const std::shared_ptr<Place>& place) {
  command
      .add_option("--memory-limit", place->memory_limit,
                  "Memory limit of the process: 768MiB, 6GB, 25%")
      ->type_name("SIZE");
  command.add_flag("--json", place->json, kJsonHelp);
  command.add_flag("--quiet", place->quiet, kQuietHelp);
}

Result<Governor> governor_for(const Place& place) {
  return Governor::create({.memory_limit = place.memory_limit});
}

/// A limit that cannot be read is wrong usage; one that is too small is not.
int report_governor(const Error& error) {
  return report(error, error.code == ErrorCode::kInvalidArgument ? kUsageStatus : kFailedStatus);
}

std::shared_ptr<WorkMeter> meter(const char* label, const Place& place) {
  return std::make_shared<WorkMeter>(label, ProgressOptions{.quiet = place.quiet});
}

/// Prints what now stands at `path`.
int show(const std::string& path, bool json) {
  const auto found = describe(path);
  if (!found) {
    return report(found.error());
  }
  print(json ? found->json : found->text);
  return 0;
}

int synth(const Place& place, const CosirSynthOptions& options) {
  const StopSignals signals;
  auto governor = governor_for(place);
  if (!governor) {
    return report_governor(governor.error());
  }
  if (const auto made = synth_cosir(*governor, options, metered(meter("synth", place))); !made) {
    return report(made.error());
  }
  return show(options.out.string(), place.json);
}

void add_synth(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("synth", "Make synthetic data that a recipe can learn from");
  command->require_subcommand(1);
  auto* cosir = command->add_subcommand("cosir", "Image-text pairs as features");
  auto place = std::make_shared<Place>();
  auto options = std::make_shared<CosirSynthOptions>();
  cosir
      ->add_option("--rows", options->rows,
                   "Number of pairs; 1000000 of the default width are 4 GiB")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  cosir->add_option("--out", place->out, "Folder to make")->required();
  cosir->add_option("--seed", options->seed, "Seed of every value [0]");
  cosir->add_option("--image-dim", options->image_dim, "Width of the image features [512]")
      ->check(CLI::Range(1, 65536));
  cosir->add_option("--text-dim", options->text_dim, "Width of the text features [512]")
      ->check(CLI::Range(1, 65536));
  cosir
      ->add_option("--threads", options->threads,
                   "Number of threads; the data does not depend on it [2]")
      ->check(CLI::Range(1, 256));
  add_place(*cosir, place);
  cosir->footer("\nExample:\n  plimsoll synth cosir --rows 100000 --out data/");
  cosir->callback([place, options, &status] {
    options->out = place->out;
    status = synth(*place, *options);
  });
  command->footer("\nExample:\n  plimsoll synth cosir --rows 100000 --out data/");
}

int import_pairs(const Place& place, const CosirImportOptions& options) {
  const StopSignals signals;
  auto governor = governor_for(place);
  if (!governor) {
    return report_governor(governor.error());
  }
  if (const auto made = import_cosir(*governor, options, metered(meter("import", place))); !made) {
    return report(made.error());
  }
  return show(options.out.string(), place.json);
}

/// An import that is Python's (as python/plimsoll/cli/_chat_command.py): handed over to it by
/// hand_over.h, or refused where there is none.
struct PythonImport {
  const char* name;
  const char* description;
  const char* example;
};
constexpr std::array kPythonImports{
    PythonImport{"chat", "Token set of chats in JSON (needs Python)",
                 "plimsoll import chat chats.jsonl --tokenizer models/tiny --out chats.tokens"},
    PythonImport{"vision", "Image set of messages with images (needs Python)",
                 "plimsoll import vision receipts.jsonl --out receipts.images"},
    PythonImport{"pairs", "Features of an image set, for cosir (needs Python)",
                 "plimsoll import pairs --images captions.images --model models/clip --out pairs"},
};

void add_python_imports(CLI::App& command) {
  for (const PythonImport& one : kPythonImports) {
    auto* added = command.add_subcommand(one.name, one.description);
    added->prefix_command();
    added->footer(fmt::format("\nExample:\n  {}", one.example));
  }
}

void add_import(CLI::App& app, int& status) {
  struct Typed {
    std::vector<std::string> images{};
    std::vector<std::string> texts{};
    std::string ids{};
    std::string groups{};
    std::string compression{"none"};
    bool append{false};
  };
  auto* command = app.add_subcommand("import", "Make a store from your own files");
  command->require_subcommand(1);
  auto* cosir = command->add_subcommand("cosir", "Image and text features, .npy or .safetensors");
  auto place = std::make_shared<Place>();
  auto typed = std::make_shared<Typed>();
  cosir
      ->add_option("--image-features", typed->images,
                   "Image features: files or folders of shards, [rows, width]")
      ->required();
  cosir
      ->add_option("--text-features", typed->texts,
                   "Text features: files or folders of shards, [rows, width]")
      ->required();
  cosir->add_option("--ids", typed->ids,
                    "Ids of the pairs: a file of int64 [rows], distinct, any order [0, 1, 2, …]");
  cosir->add_option(
      "--groups", typed->groups,
      "Groups of the pairs: a file of int64 [rows] that says which texts share an image");
  cosir
      ->add_option("--compression", typed->compression,
                   "Compression of the store: none, or lz4 block by block [none]")
      ->check(CLI::IsMember({"none", "lz4"}));
  cosir->add_option("--out", place->out, "Folder to make, or with --append to add to")->required();
  cosir
      ->add_flag("--append", typed->append,
                 "Add the pairs to the store in --out; what it holds is not rewritten")
      ->excludes("--compression");
  add_place(*cosir, place);
  cosir->footer(
      "\nExamples:\n  plimsoll import cosir --image-features image/ --text-features text/ "
      "--ids ids.npy --out data/\n  plimsoll import cosir --image-features new/image/ "
      "--text-features new/text/ --ids new/ids.npy --out data/ --append");
  cosir->callback([place, typed, &status] {
    const CosirImportOptions options{.image_features = {typed->images.begin(), typed->images.end()},
                                     .text_features = {typed->texts.begin(), typed->texts.end()},
                                     .ids = typed->ids,
                                     .groups = typed->groups,
                                     .out = place->out,
                                     .append = typed->append,
                                     .compression = typed->compression == "lz4"
                                                        ? BlockCompression::kLz4
                                                        : BlockCompression::kNone};
    status = import_pairs(*place, options);
  });
  add_import_can(*command, status);
  add_python_imports(*command);
  command->footer(
      "\nExamples:\n  plimsoll import cosir --image-features image/ --text-features text/ --out "
      "data/\n  plimsoll import can set_01/ --out graphs/");
}

int verify(const Place& place) {
  const StopSignals signals;
  if (const auto sound = verify_store(place.directory, metered(meter("verify", place))); !sound) {
    return report(sound.error());
  }
  print(place.json ? R"({"status": "sound"})"
                   : fmt::format("{}: every checksum matches", place.directory));
  return 0;
}

/// What `store export` may be told beside its place.
struct ExportChoice {
  std::string column{};
  std::string format{};
  std::int64_t since{-1};
  std::int64_t step{-1};
};

int export_to(const Place& place, const ExportChoice& choice) {
  const StopSignals signals;
  auto governor = governor_for(place);
  if (!governor) {
    return report_governor(governor.error());
  }
  const ExportOptions options{.directory = place.directory,
                              .out = place.out,
                              .format = choice.format,
                              .column = choice.column,
                              .since = choice.since,
                              .step = choice.step};
  const auto rows = export_store(*governor, options, metered(meter("export", place)));
  if (!rows) {
    return report(rows.error());
  }
  print(place.json ? fmt::format(R"({{"status": "exported", "rows": {}}})", *rows)
                   : fmt::format("{}: {} rows", place.out, format_count(*rows)));
  return 0;
}

int import_rows(const Place& place, const ImportOptions& options) {
  const StopSignals signals;
  auto governor = governor_for(place);
  if (!governor) {
    return report_governor(governor.error());
  }
  if (const auto rows = import_store(*governor, options, metered(meter("import", place))); !rows) {
    return report(rows.error());
  }
  return show(options.out.string(), place.json);
}

int compact(const Place& place, std::int64_t rows_max) {
  const StopSignals signals;
  auto governor = governor_for(place);
  if (!governor) {
    return report_governor(governor.error());
  }
  const auto done =
      compact_store(*governor, place.directory, metered(meter("compact", place)), rows_max);
  if (!done) {
    return report(done.error());
  }
  print(place.json ? fmt::format(R"({{"status": "compacted", "bytes_before": {}, "bytes": {}}})",
                                 done->bytes_before, done->bytes)
                   : fmt::format("{}: {}, was {}", place.directory, format_bytes(done->bytes),
                                 format_bytes(done->bytes_before)));
  return 0;
}

void add_store_import(CLI::App& command, int& status) {
  struct Typed {
    Place place{};
    std::vector<std::string> files{};
    std::string format{};
    std::string optimizer{"adamw"};
    std::string dtype{"float32"};
    bool number_rows{false};
  };
  auto typed = std::make_shared<Typed>();
  auto* sub = command.add_subcommand(
      "import", "Make a table of rows, or a token set, from other programs' files");
  sub->add_option(
         "FILE", typed->files,
         "Shards, in order: .safetensors, .npy, .csv, or the original's embeddings_chunk_*.pt; or "
         "Megatron's .idx, for a token set")
      ->required();
  sub->add_option("--out", typed->place.out, "Folder to make, or token set")->required();
  sub->add_option(
      "--format", typed->format,
      "Format of the files: safetensors, npy, csv, pt or megatron [by the file's name]");
  sub->add_option("--optimizer", typed->optimizer, "Optimizer that will train the rows [adamw]")
      ->check(CLI::IsMember(optimizers_by_name()));
  sub->add_option("--dtype", typed->dtype, "Number format of the rows [float32]")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  sub->add_flag("--number-rows", typed->number_rows,
                "Ids 0, 1, 2, … for the rows of .npy files without NAME.ids.npy");
  const std::shared_ptr<Place> place(typed, &typed->place);
  add_place(*sub, place);
  sub->footer(
      "\nExamples:\n  plimsoll store import rows.safetensors --out table/\n"
      "  plimsoll store import embeddings/embeddings_chunk_*.pt --out table/\n"
      "  plimsoll store import megatron/chats.idx --out chats.tokens");
  sub->callback([typed, &status] {
    ImportOptions options{.files = {typed->files.begin(), typed->files.end()},
                          .out = typed->place.out,
                          .format = typed->format};
    options.number_rows = typed->number_rows;
    options.optimizer = optimizers_by_name().at(typed->optimizer);
    options.dtype = typed->dtype == "bfloat16" ? RowDType::kBFloat16 : RowDType::kFloat32;
    status = import_rows(typed->place, options);
  });
}

void add_store(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("store", "Look at, check, copy or shrink a store (or a run's rows)");
  command->require_subcommand(1);
  auto place = std::make_shared<Place>();
  auto choice = std::make_shared<ExportChoice>();
  const auto add_bare = [&](const char* name, const char* help) {
    auto* sub = command->add_subcommand(name, help);
    sub->add_option("DIR", place->directory, "Folder of the store, or of a run; or a token set")
        ->required();
    return sub;
  };
  const auto add = [&](const char* name, const char* help) {
    auto* sub = add_bare(name, help);
    add_place(*sub, place);
    return sub;
  };
  auto* info = add_bare("info", "Say what a store holds");
  info->add_flag("--json", place->json, kJsonHelp);
  info->footer("\nExample:\n  plimsoll store info run/");
  info->callback(
      [place, &status] { status = show(store_directory(place->directory).string(), place->json); });
  auto* verified = add_bare("verify", "Read a whole store and compare its checksums");
  verified->add_flag("--json", place->json, kJsonHelp);
  verified->add_flag("--quiet", place->quiet, kQuietHelp);
  verified->footer("\nExample:\n  plimsoll store verify data/");
  verified->callback([place, &status] { status = verify(*place); });
  auto* exported =
      add("export", "Write a store as .safetensors, .npy or .csv, a token set as Megatron's");
  exported->add_option("--out", place->out, "File to make")->required();
  exported->add_option(
      "--format", choice->format,
      "Format of the file: safetensors, npy, csv or megatron [by the file's name]");
  exported->add_option("--column", choice->column,
                       "Column to write, for .npy and .csv of a feature store");
  exported
      ->add_option("--since", choice->since,
                   "Step of an earlier commit: only rows changed since are written")
      ->check(CLI::Range(std::int64_t{0}, kNumberMost));
  exported->add_option("--step", choice->step, "Step of the commit to write [the newest]")
      ->check(CLI::Range(std::int64_t{0}, kNumberMost));
  exported->footer(
      "\nExamples:\n  plimsoll store export data/ --column image --out image.npy\n"
      "  plimsoll store export chats.tokens --out megatron/chats.idx");
  exported->callback([place, choice, &status] { status = export_to(*place, *choice); });
  add_store_import(*command, status);
  auto* compacted =
      add("compact",
          "Shrink a table by rewriting its live rows, which no process may train in; or join the "
          "parts of a feature store");
  compacted->footer("\nExample:\n  plimsoll store compact run/ --rows-max 2000000");
  auto rows_max = std::make_shared<std::int64_t>(0);
  compacted
      ->add_option("--rows-max", *rows_max,
                   "Largest number of a table's rows from then on [as it was]")
      ->check(CLI::Range(std::int64_t{1}, kNumberMost));
  compacted->callback([place, rows_max, &status] { status = compact(*place, *rows_max); });
  command->footer(
      "\nExamples:\n  plimsoll store info run/\n  plimsoll store verify data/\n"
      "  plimsoll store export run/ --out conditions.safetensors\n"
      "  plimsoll store import conditions.safetensors --out table/\n"
      "  plimsoll store compact run/");
}

}  // namespace

bool is_python_import(std::string_view name) noexcept {
  return std::ranges::find(kPythonImports, name, &PythonImport::name) != kPythonImports.end();
}

void add_data_commands(CLI::App& app, int& status) {
  add_synth(app, status);
  add_import(app, status);
  add_store(app, status);
}

void add_look_commands(CLI::App& app, int& status) {
  auto* info = app.add_subcommand("info", "Say what a Plimsoll folder or file holds");
  auto place = std::make_shared<Place>();
  info->add_option(
          "PATH", place->directory,
          "Folder of a run, store, graph set or checkpoint, or a .safetensors or .npy file")
      ->required();
  info->add_flag("--json", place->json, "Result as one line of JSON instead of text");
  info->footer("\nExample:\n  plimsoll info data/");
  info->callback([place, &status] { status = show(place->directory, place->json); });

  auto* limits =
      app.add_subcommand("limits", "Show every bound on this process's memory, and which one wins");
  auto limit = std::make_shared<Place>();
  limits
      ->add_option("--memory-limit", limit->memory_limit,
                   "Memory limit of your own, to compare with the others")
      ->type_name("SIZE");
  limits->add_flag("--json", limit->json, "Result as one line of JSON instead of text");
  limits->footer("\nExample:\n  plimsoll limits --memory-limit 4GiB");
  limits->callback([limit, &status] {
    const auto found = find_limit({.user_limit = limit->memory_limit});
    if (!found) {
      const bool usage = found.error().code == ErrorCode::kInvalidArgument;
      status = report(found.error(), usage ? kUsageStatus : kFailedStatus);
      return;
    }
    const Description described = describe_limits(*found);
    print(limit->json ? described.json : described.text);
  });
}

}  // namespace plimsoll
