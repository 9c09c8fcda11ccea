# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the package at smoke size: the answer is right and the last line is what bench/run expects."""
import json
import pathlib
import subprocess
import sys

import pytest

from tests.support.forked import first_of_loops  # noqa: F401  Fixture.

pytest.importorskip("torch")
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def forked(first_of_loops):
    """smoke(), of a benchmark that computes in its own process."""
    def smoke(name, folder, *words):
        done = first_of_loops.run(BENCH / name / "run.py", "--smoke", "--directory", folder, *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    return smoke


def smoke(name, folder, *words):
    done = subprocess.run([sys.executable, BENCH / name / "run.py", "--smoke", "--directory", folder, *words],
                          text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_replay_gives_the_right_answer(forked, tmp_path):
    result = forked("w0_compat", tmp_path)
    assert result["name"] == "w0_compat" and result["commits"] == 4 and result["hit_rate"] == 1.0
    assert set(result["peers"]) == {f"original_{name}_ms" for name in ("before", "after", "quick")}


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_loop_in_a_run_ends_with_the_model_of_the_bare_loop(forked, tmp_path, workers):
    result = forked("run_overhead", tmp_path, "--workers", workers)
    assert result["name"] == "run_overhead" and result["peers"]["pairs"] == 2
    assert result["peers"]["bare_ms"] > 0 < result["value"]
    assert not list(tmp_path.iterdir())


def test_ranks_add_up_in_a_tree():
    done = subprocess.run([sys.executable, BENCH / "rank_sums" / "run.py", "--smoke", "--rounds", "2"], text=True,
                          capture_output=True, timeout=300, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rounds"] == 2
    assert result["name"] == "rank_sums" and list(result["peers"]) == ["2 ranks"]
    assert 0 < result["peers"]["2 ranks"]["tree_ms"] <= result["peers"]["2 ranks"]["tree_ms_worst"]


def test_ranks_exchange_rows(tmp_path):
    result = smoke("rank_rows", tmp_path, "--rounds", "2")
    assert result["name"] == "rank_rows" and list(result["peers"]) == ["2 ranks"] and result["value"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_send_over_links_what_the_model_says(tmp_path):
    result = smoke("scale", tmp_path)
    if "not measured" in result["peers"]:
        pytest.skip(result["peers"]["not measured"])
    assert result["name"] == "scale" and result["peers"]["largest error of bytes, %"] <= 10
    assert list(result["peers"]["tables"]["nodes"]) == ["1", "8", "64", "1,024"]
    checked = result["peers"]["tables"]["checked"]
    assert checked["1 ranks, 100 Mbit/s: step"]["KB that rank 0 sends: model"] == 0 < checked["2 ranks, 100 Mbit/s: tree sums"]["measured"]
    assert not list(tmp_path.iterdir())


def test_a_commit_beside_the_loop_holds_what_the_loop_had(forked, tmp_path):
    result = forked("run_commit_stall", tmp_path)
    assert result["name"] == "run_commit_stall" and result["peers"]["commits"] == 4
    assert result["peers"]["by_hand_ms_p50"] > 0 < result["value"]


@pytest.mark.slow
def test_m05_cleaning_up_every_ten_steps_is_compared_in_fresh_processes_and_ends_with_the_model_of_never(tmp_path):
    pytest.importorskip("PIL")
    result = smoke("cleanup_interval", tmp_path)
    assert result["name"] == "cleanup_interval"
    lines, = result["peers"]["table"].values()
    assert lines.keys() == {"0", "10"} and lines["0"]["x"] == 1 and lines["10"]["cleanup_ms"] > 0
    assert not list(tmp_path.iterdir())


def test_the_chunked_cross_entropy_is_as_near_to_float64_as_torchs_and_takes_less(forked, tmp_path):
    result = forked("w12_cross_entropy", tmp_path)
    assert result["name"] == "w12_cross_entropy" and 0 < result["value"] < 1
    assert 0 < result["peers"]["error_of_gradient"] <= 1.5 * result["peers"]["plain_error_of_gradient"]


def test_streamed_weights_have_the_bits_of_resident_ones(forked, tmp_path):
    result = forked("w11_streamed_weights", tmp_path)
    assert result["name"] == "w11_streamed_weights" and result["value"] > 0
    assert result["peers"]["stall_seconds_a_step"] >= 0 and not list(tmp_path.iterdir())


def test_verdicts_are_right_of_two_leaks_and_two_innocent_programs(tmp_path):
    result = smoke("verdicts", tmp_path)
    assert result["name"] == "verdicts" and result["peers"]["programs"] == 4
    for half in ("tuning", "held_out"):
        ours = result["peers"][half]["plimsoll.Watch"]
        assert ours["recall"] == "1/1" and ours["false_alarms"] == "0/1" and ours["owner"] == "1/1"
        assert ours["site"] == "1/1" and ours["holder"] == "1/1"
        assert ours["slope_error"] < 0.15  # A BytesIO grows by eighths of its size.
    assert not list(tmp_path.iterdir())


def test_another_corpus_is_played_too_and_its_mistakes_are_named(tmp_path):
    other = tmp_path / "corpus"
    other.mkdir()
    program = BENCH / "verdicts" / "corpus" / "buffer_leak.py"
    (other / "buffer_leak.py").write_text(program.read_text().replace('["native"]', '["shared"]'))
    result = smoke("verdicts", tmp_path, "--corpus", other)
    ours = result["peers"]["held_out"]["plimsoll.Watch"]
    assert ours["recall"] == "1/1" and ours["owner"] == "0/1"  # By the truth that the folder has.
    (other / "buffer_fine.py").write_text(program.read_text())
    done = subprocess.run([sys.executable, BENCH / "verdicts" / "run.py", "--smoke", "--corpus", other], text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 1 and "buffer_fine.py: its name says fine, its truth block leaks = True" in done.stderr


@pytest.mark.slow
def test_a_watched_loop_ends_with_the_model_of_the_bare_loop_and_the_program_sees_what_a_tree_holds(tmp_path):
    result = smoke("watch_cost", tmp_path)
    assert result["name"] == "watch_cost" and result["value"] > 0
    loops, tree = result["peers"]["loops"], result["peers"]["tree"]
    assert loops.keys() == {"watch, calm", "watch, leaking"} and tree["plimsoll watch"]["held_gib"] >= 0.25
    assert not list(tmp_path.iterdir())


def test_a_token_set_has_the_ids_and_masks_of_a_streaming_loop_and_the_ids_of_datasets_map(tmp_path):
    for needed in ("datasets", "transformers", "tokenizers"):
        pytest.importorskip(needed)
    result = smoke("w10_token_set", tmp_path)
    assert result["name"] == "w10_token_set" and result["value"] > 0
    assert result["peers"]["rows"] == 300 and {"ours", "loop", "map"} <= set(result["peers"]["mb_per_second"])
    assert not list(tmp_path.iterdir())


def test_fine_tuning_on_packed_chats_ends_at_the_loss_of_a_plain_loop(tmp_path):
    for needed in ("peft", "transformers", "tokenizers"):
        pytest.importorskip(needed)
    result = smoke("w13_sft", tmp_path)
    assert result["name"] == "w13_sft" and result["value"] > 0
    losses = result["peers"]["losses"]
    assert len(losses["ours"]) == len(losses["plain"]) == 3 and result["peers"]["x_peak"]["plain"] > 0
    assert not list(tmp_path.iterdir())


def test_images_have_the_pixels_of_the_decoders_and_processors_beside(tmp_path):
    for needed in ("PIL", "transformers"):
        pytest.importorskip(needed)
    result = smoke("w14_images", tmp_path)
    assert result["name"] == "w14_images" and result["value"] > 0 and result["peers"]["images"] == 12
    assert result["peers"]["x_processor"].keys() == {"clip", "siglip", "qwen2_vl"}
    assert {"plimsoll", "datasets_0", "datasets_2"} <= set(result["peers"]["fed_per_second"]) and not list(tmp_path.iterdir())


def test_shuffled_features_are_the_records_that_were_written_from_everyone(forked, tmp_path):
    result = forked("feature_reads", tmp_path)
    assert result["name"] == "feature_reads" and result["value"] > 0
    rates = result["peers"]["mib_per_second"]
    assert (len(rates["store"]), len(rates["disk"])) == (1, 2) and rates["memmap"][0]["ahead"] > 0
    assert 0.5 < result["peers"]["bytes_read_to_delivered"] < 1.2 and not list(tmp_path.iterdir())
    assert result["peers"]["records"] == 36 * 256


def test_data_gib_is_how_much_is_written_and_read(forked, tmp_path):
    result = forked("feature_reads", tmp_path, "--data-gib", "0.0625")
    assert result["peers"]["records"] == 64 * 256 and result["peers"]["data_gib"] == 0.06


@pytest.mark.parametrize("words", [("--parts", "5"), ("--ragged",)])
def test_features_in_parts_and_ragged_ones_are_read_beside_the_disk_alone(forked, tmp_path, words):
    result = forked("feature_reads", tmp_path, *words)
    rates = result["peers"]["mib_per_second"]
    assert set(rates) == {"disk", "store"} and min(turn["ahead"] for turn in rates["store"]) > 0
    assert 0.5 < result["peers"]["bytes_read_to_delivered"] < 1.5 and not list(tmp_path.iterdir())


def test_r26_the_bare_disk_is_asked_at_each_depth_and_a_byte_that_is_not_what_was_written_is_named(tmp_path):
    sys.path.insert(0, str(BENCH.parent))
    from bench import raw_disk

    def ask(**more):
        return raw_disk.speed(tmp_path, **{"file_bytes": 4 << 20, "total_bytes": 4 << 20, "read_bytes": 16 << 10,
                                           "write_bytes": 64 << 10, "read_percent": 50, **more})
    asked = ask()
    assert set(asked["by_depth"]) == {"1", "2", "4", "8", "16", "32", "64"}
    assert asked["bytes_per_second"] == max(asked["by_depth"].values()) == asked["by_depth"][str(asked["depth"])] > 0
    with open(tmp_path / "raw.from", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"\0")
    with pytest.raises(SystemExit, match="the bare disk: byte 1048576 is not what was written"):
        ask()
    assert ask(file_bytes=512 << 10, total_bytes=512 << 10, read_percent=100)["depth"] >= 1  # The first half alone.
    with pytest.raises(SystemExit, match="multiples of 4096"):
        ask(read_bytes=1000)


def test_the_recipes_curve_falls(tmp_path):
    for needed in ("peft", "transformers", "tokenizers"):
        pytest.importorskip(needed)
    result = smoke("w13_sft", tmp_path, "--curves", "--rate", "0.05", "--keep")
    curve = result["peers"]["curves"]["chat"]
    assert list(curve)[0] == "8" and len(curve) >= 3
    assert result["peers"]["ends"]["chat"] == [*curve.values()][-1] and curve["8"][0] < result["peers"]["before"]
    assert (tmp_path / "recipe-1/run/adapter/adapter_config.json").exists()


def test_a_layer_of_graph_attention_gives_the_formulas_answer():
    done = subprocess.run([sys.executable, BENCH / "gat_step" / "run.py", "--smoke"], text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == "gat_step" and result["peers"]["graphs"] == 8
    assert all(result["peers"][size]["plimsoll"]["seconds"] > 0 for size in ("student", "teacher"))
