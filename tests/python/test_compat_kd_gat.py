# SPDX-License-Identifier: Apache-2.0
"""plimsoll.compat.from_kd_gat: KD-GAT's configurations, presets and flags as options of can-kd."""
import json
import re
import subprocess
import sys

import pytest

from plimsoll.compat import PipelineConfig, _kd_gat, from_kd_gat

# As KD-GAT writes it: every field of its flat configuration, with another value than can-kd's default where
# the value means something here.
FLAT = {
    "dataset": "set_01", "modality": "automotive", "model_size": "student", "seed": 43, "lr": 0.005,
    "max_epochs": 31, "batch_size": 4096, "patience": 32, "weight_decay": 0.0002, "gradient_clip": 2.0,
    "precision": "16-mixed", "use_scheduler": True, "scheduler_type": "step", "scheduler_t_max": -1,
    "scheduler_step_size": 51, "scheduler_gamma": 0.2, "gradient_checkpointing": False, "use_teacher_cache": False,
    "clear_cache_every_n": 101, "offload_teacher_to_cpu": True, "optimize_batch_size": True, "safety_factor": 0.5,
    "batch_size_mode": "binsearch", "max_batch_size_trials": 10, "accumulate_grad_batches": 2,
    "find_unused_parameters": False, "save_top_k": 0, "monitor_metric": "val_loss", "monitor_mode": "min",
    "log_every_n_steps": 51, "test_every_n_epochs": 6, "deterministic": False, "cudnn_benchmark": True,
    "gat_hidden": 25, "gat_layers": 3, "gat_heads": 5, "gat_dropout": 0.1, "gat_embedding_dim": 9,
    "vgae_hidden_dims": [81, 41, 17], "vgae_latent_dim": 18, "vgae_heads": 2, "vgae_embedding_dim": 5,
    "vgae_dropout": 0.25, "dqn_hidden": 160, "dqn_layers": 2, "dqn_gamma": 0.99, "dqn_epsilon": 0.1,
    "dqn_epsilon_decay": 0.99, "dqn_min_epsilon": 0.02, "dqn_buffer_size": 50000, "dqn_batch_size": 64,
    "dqn_target_update": 50, "use_kd": False, "teacher_path": None, "kd_temperature": 3.0, "kd_alpha": 0.6,
    "kd_vgae_latent_weight": 0.4, "kd_vgae_recon_weight": 0.3, "log_teacher_student_comparison": True,
    "curriculum_start_ratio": 2.0, "curriculum_end_ratio": 11.0, "difficulty_percentile": 70.0,
    "use_vgae_mining": False, "difficulty_cache_update": 9, "curriculum_memory_multiplier": 1.0,
    "fusion_episodes": 400, "fusion_max_samples": 150000, "max_val_samples": 30000, "episode_sample_size": 20000,
    "training_step_interval": 32, "gpu_training_steps": 16, "fusion_lr": 0.002, "alpha_steps": 21, "run_test": False,
    "experiment_root": "experimentruns", "device": "cuda", "num_workers": 8, "mp_start_method": "spawn"}
NESTED = {
    "dataset": "hcrl_ch", "model_type": "gat", "scale": "small", "seed": 44,
    "vgae": {"hidden_dims": [80, 40, 16], "latent_dim": 15, "dropout": 0.1},
    "gat": {"hidden": 26, "fc_layers": 2, "embedding_dim": 8},
    "dqn": {"hidden": 161, "min_epsilon": 0.03, "layers": 2},
    "training": {"lr": 0.004, "max_epochs": 33, "batch_size": 100, "memory_estimation": "static"},
    "auxiliaries": [{"type": "kd", "model_path": "t.pt", "alpha": 0.2, "temperature": 5.0,
                     "vgae_latent_weight": 0.1}],
    "fusion": {"episodes": 401, "lr": 0.003, "alpha_steps": 21, "max_samples": 9},
    "preprocessing": {"window_size": 100}, "run_test": True}


def options(*arguments, config=None):
    return from_kd_gat(config, arguments).options


def refused(*arguments, config=None):
    with pytest.raises(ValueError) as raised:
        from_kd_gat(config, arguments)
    return str(raised.value)


def config_file(program, *words) -> dict:
    """All options with their values, by the program."""
    done = subprocess.run([program, "config", "can-kd", *map(str, words)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"^(\w+) = (.+)$", done.stdout, re.MULTILINE)
    return {key: json.loads(literal) for key, literal in pairs}  # Scalars alone: TOML has them as JSON does.


def test_a_flat_configuration_becomes_a_file_that_the_program_reads(program, tmp_path):
    (tmp_path / "flat.json").write_text(json.dumps(FLAT))
    found = from_kd_gat(tmp_path / "flat.json")
    assert {note.split()[1] for note in found.notes} == {key for key in FLAT if key in _kd_gat._IGNORED}
    assert f"ignored: num_workers = 8: {_kd_gat._IGNORED['num_workers']}" in found.notes
    (tmp_path / "own.toml").write_text(found.toml)
    defaults, now = config_file(program), config_file(program, "--config", tmp_path / "own.toml")
    changed = {key: value for key, value in now.items() if value != defaults[key]}
    same = {key: (",".join(map(str, value)) if isinstance(value, list) else value) for key, value in FLAT.items()
            if key in _kd_gat._SAME and key not in ("batch_size", "teacher_path", "fusion_lr")}
    assert changed == {
        **same, "model_size": "student", "vgae_lr": 0.005, "gat_lr": 0.005, "fusion_lr": 0.002, "batch_size": "auto",
        "batch_size_max": 4096,
        "student_gat_hidden": 25, "student_gat_layers": 3, "student_gat_heads": 5, "student_gat_embedding_dim": 9,
        "student_vgae_hidden_dims": "81,41,18", "student_vgae_heads": 2, "student_vgae_embedding_dim": 5,
        "fusion_hidden": 160, "fusion_gamma": 0.99, "fusion_epsilon": 0.1, "fusion_epsilon_decay": 0.99,
        "fusion_epsilon_min": 0.02, "fusion_replay": 50000, "fusion_batch": 64, "fusion_target_update": 50}
    assert f"# {tmp_path}/flat.json: gat_heads\n" in found.toml


def test_s46_the_batch_size_bounds_what_is_chosen_by_itself():
    assert options(config={"optimize_batch_size": True, "batch_size": 2048}) == {
        "batch_size": "auto", "batch_size_max": "2048"}
    assert options("--optimize-batch-size", "true") == {"batch_size": "auto", "batch_size_max": "4096"}
    assert options("--optimize-batch-size", "false", "--batch-size", "300") == {"batch_size": "300"}
    config = PipelineConfig(batch_size=1024, lr=0.001)
    assert config.optimize_batch_size and config.memory_estimation == "measured" and config.batch_size == 1024
    found = config.converted().options
    assert (found["batch_size"], found["batch_size_max"], found["vgae_lr"]) == ("auto", "1024", "0.001")
    for wrong in (lambda: PipelineConfig(batchsize=1), lambda: setattr(config, "batchsize", 1)):
        with pytest.raises(ValueError, match="has no key 'batchsize'; did you mean 'batch_size'"):
            wrong()


def test_a_nested_configuration_means_the_same_keys():
    found = from_kd_gat(NESTED)
    assert found.options == {
        "stage": "curriculum", "model_size": "student", "seed": "44", "student_vgae_hidden_dims": "80,40,15",
        "vgae_dropout": "0.1", "student_gat_hidden": "26", "student_gat_fc_layers": "2",
        "student_gat_embedding_dim": "8", "fusion_hidden": "161", "fusion_epsilon_min": "0.03", "vgae_lr": "0.004",
        "gat_lr": "0.004", "fusion_lr": "0.003", "max_epochs": "33", "batch_size": "100", "use_kd": "true",
        "teacher_path": "t.pt", "kd_alpha": "0.2", "kd_temperature": "5.0", "kd_vgae_latent_weight": "0.1",
        "fusion_episodes": "401", "run_test": "true"}
    assert {note.split()[1] for note in found.notes} == {
        "dataset", "dqn_layers", "memory_estimation", "alpha_steps", "fusion_max_samples",
        "preprocessing_window_size"}
    assert options(config={"auxiliaries": [], "teacher_path": None}) == {}


def test_a_command_line_means_the_same_keys(tmp_path):
    words = {"vgae": "autoencoder", "gat": "curriculum", "fusion": "fusion", "dqn": "fusion"}
    for word, stage in words.items():
        for size in ("teacher", "student"):
            assert options("--preset", f"{word},{size}") == {"stage": stage, "model_size": size}
            assert options("--preset", f"{size},{word}") == {"stage": stage, "model_size": size}
    assert options("normal", "--preset", "gat,student", "--gat-heads=5", "--use_kd", "False") == {
        "stage": "normal", "model_size": "student", "student_gat_heads": "5", "use_kd": "false"}
    assert options("--model-type", "dqn", "--scale", "large") == {"stage": "fusion", "model_size": "teacher"}
    (tmp_path / "c.json").write_text('{"lr": 0.5, "seed": 1}')
    assert options("--seed", "2", "--config", str(tmp_path / "c.json")) == {
        "vgae_lr": "0.5", "gat_lr": "0.5", "fusion_lr": "0.5", "seed": "2"}


def test_architecture_keys_mean_whom_model_size_names_whatever_the_order():
    given = ["--gat-hidden", "11", "--vgae-latent-dim", "17"]
    both = {"teacher_gat_hidden": "11", "teacher_vgae_hidden_dims": "1024,512,17",
            "student_gat_hidden": "11", "student_vgae_hidden_dims": "80,40,17"}
    assert options(*given) == both
    for size in ("teacher", "student"):
        assert options(*given, "--model-size", size) == {
            "model_size": size, **{key: value for key, value in both.items() if key.startswith(size)}}


def test_a_key_of_one_model_wins_over_lr_and_a_planned_batch_over_its_number():
    assert options("--fusion-lr", "0.25", "--lr", "0.5")["fusion_lr"] == "0.25"
    assert options("--optimize-batch-size", "true", "--batch-size", "512")["batch_size"] == "auto"
    assert options("--optimize-batch-size", "false", "--batch-size", "512")["batch_size"] == "512"


@pytest.mark.parametrize("arguments, words", [
    (["--gat-head", "3"], ["--gat-head: KD-GAT has no key 'gat_head'; did you mean 'gat_heads'?"]),
    (["--gat-heads", "0"], ["--gat-heads: teacher_gat_heads must be a whole number from 1 to 256, not '0'"]),
    (["--lr", "fast"], ["--lr: vgae_lr must be a number from 0 to 1000, not 'fast'"]),
    (["--vgae-hidden-dims", "90"], ["--vgae-hidden-dims: ", "2 to 8 whole numbers"]),
    (["--optimize-batch-size", "maybe"], ["--optimize-batch-size: must be true or false, not 'maybe'"]),
    (["--preset", "gat,studnet"], ["--preset studnet: the words of a preset are vgae, gat, fusion"]),
    (["--preset", "vgae,gat"], ["--preset gat: one model and one of teacher and student"]),
    (["--kd-type", "mimic"], ["--kd-type: can-kd knows the type kd, not 'mimic'"]),
    (["--model-size", "huge"], ["--model-size: 'huge' is none of teacher, student"]),
    (["training"], ["the first argument: 'training' is none of autoencoder"]),
    (["--seed"], ["--seed: the value is missing"]),
    (["gat", "3"], ["3: an option of KD-GAT begins with --"])])
def test_what_is_wrong_is_named(arguments, words):
    text = refused(*arguments)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("content, words", [
    ({"gat": {"heads": 0}}, ["c.json: gat.heads: teacher_gat_heads must be"]),
    ({"gat": {"head": 4}}, ["c.json: gat.head: KD-GAT has no key 'gat_head'; did you mean 'gat_heads'?"]),
    ({"label_dim": 3}, ["c.json: label_dim: KD-GAT has no key 'label_dim'"]),
    ({"seed": {"a": 1}}, ["c.json: seed: {'a': 1} is neither text, a number"]),
    ({"auxiliaries": [3]}, ["c.json: auxiliaries must be an object"]), ([1], ["c.json: the outermost value"])])
def test_a_wrong_file_is_named_with_its_key(tmp_path, content, words):
    (tmp_path / "c.json").write_text(json.dumps(content))
    text = refused(config=tmp_path / "c.json")
    for word in words:
        assert word in text, text
    (tmp_path / "c.json").write_text('{"seed": ')
    assert "c.json: not JSON" in refused(config=tmp_path / "c.json")
    with pytest.raises(OSError):
        from_kd_gat(tmp_path / "nothing.json")


def test_every_key_is_one_of_can_kd_or_means_nothing(program):
    known = config_file(program) | dict.fromkeys(["data", "out", "memory_limit", "teacher_path"])
    for key in _kd_gat._SAME:
        assert key in known, key
    for ours in _kd_gat._OTHER.values():
        assert set(ours) <= known.keys(), ours
    for key in _kd_gat._SIZED:
        for size, widths in _kd_gat._WIDTHS.items():
            assert f"{size}_{key}" in known
            assert known[f"{size}_vgae_hidden_dims"] == widths
    for key, reason in _kd_gat._IGNORED.items():
        found = from_kd_gat({key: "whatever"})
        assert found.options == {} and found.notes == [f"ignored: {key} = whatever: {reason}"]


def module(*words):
    return subprocess.run([sys.executable, "-m", "plimsoll.compat", *map(str, words)], text=True, capture_output=True,
                          timeout=120, check=False)


def test_the_command_prints_a_file_and_says_what_means_nothing(program, tmp_path):
    done = module("kd-gat", "curriculum", "--lr", "0.01", "--num-workers", "4")
    assert done.returncode == 0
    assert done.stderr == "plimsoll.compat: ignored: num_workers = 4: no process loads graphs beside this one\n"
    (tmp_path / "own.toml").write_text(done.stdout)
    now = config_file(program, "--config", tmp_path / "own.toml")
    assert (now["stage"], now["gat_lr"]) == ("curriculum", 0.01)
    wrong = module("kd-gat", "--lr", "fast")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.startswith("plimsoll.compat: error: --lr: vgae_lr must be a number"), wrong.stderr
    assert module().returncode == 2 and "Example" in module("--help").stdout
