# SPDX-License-Identifier: Apache-2.0
"""plimsoll.train(), resume(), evaluate() and the console script, on a run of seconds."""
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.cli import _program
from plimsoll.core import _torch_gate

if _torch_gate.load_if_torch_imported() is None:  # Raises if it is there and does not load.
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

SMALL = {"epochs": 1, "batch_size": 128, "eval_pairs": 100, "holdout": 100, "compute_threads": 1,
         "tensorboard": False, "progress": False, "memory_limit": "4GiB"}


def program(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The console script in a process of its own."""
    code = "import sys; from plimsoll.cli._program import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], text=True,
                          capture_output=True, timeout=300, check=False, **options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """1,000 synthetic pairs."""
    folder = tmp_path_factory.mktemp("pairs") / "data"
    done = program("synth", "cosir", "--rows", 1000, "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    """A finished run, and its summary."""
    folder = tmp_path_factory.mktemp("run") / "run"
    threads = torch.get_num_threads()
    summary = plimsoll.train("cosir", data=pairs, out=folder, **SMALL)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    return folder, summary


def test_output_that_nobody_reads_is_no_error(tmp_path):
    """`plimsoll import … | head -1`: the set is made, and nothing but the output is lost."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "response": "black"}\n')
    reads, writes = os.pipe()
    os.close(reads)
    code = "import sys; from plimsoll.cli._program import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "import", "vision", "rows.jsonl", "--out", "set"], cwd=tmp_path,
                          text=True, stdout=writes, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(writes)
    assert done.returncode == 128 + signal.SIGPIPE and "Traceback" not in done.stderr, done.stderr
    assert plimsoll.info(tmp_path / "set")["kind"] == "image_set"


@pytest.mark.parametrize("words", [["queue", "list", "queue"], ["recipes"]])
@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_streams_are_no_error(closed, words, tmp_path):
    """`plimsoll … >&-`: what Python prints, and what the program's own code does."""
    if words[0] == "queue":
        program("queue", "add", "queue", "--memory-limit", "1GiB", "--", "true", cwd=tmp_path)
    done = program(*words, cwd=tmp_path, preexec_fn=lambda: [os.close(one) for one in closed])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_called_within_a_process_whose_output_is_closed_it_returns_its_status(monkeypatch, tmp_path):
    with open(os.devnull, "w", encoding="ascii") as out:
        pass
    monkeypatch.setattr(sys, "stdout", out)
    assert _program.main(["info", str(tmp_path)]) == 1


def test_train_returns_the_summary_of_the_program(run):
    folder, summary = run
    assert summary["status"] == "finished" and summary["epoch"] == 1
    assert summary["step"] > 0 and summary["loss"] > 0
    assert 0 < summary["peak_resident_bytes"]
    assert summary["limit_bytes"] == 4 << 30
    assert summary["recall"] and len(summary["state_sha256"]) == 64
    info = plimsoll.info(folder)
    assert info["kind"] == "run" and info["tables"][0]["tables"][0]["rows"] > 0


def test_the_program_trains_to_the_same_bits(pairs, tmp_path):
    flags = [f"--{key.replace('_', '-')}={str(value).lower() if value is False else value}"
             for key, value in SMALL.items() if key != "progress"]
    done = program("train", "cosir", "--data", pairs, "--out", tmp_path / "run", "--json",
                   "--quiet", *flags)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.strip().splitlines()[-1])
    # In a process of its own: this one has multiplied matrices before MKL_CBWR could be set.
    code = ("import json, sys, torch, plimsoll; options = json.loads(sys.argv[1]); "
            "print(json.dumps(plimsoll.train('cosir', **options)))")
    options = dict(SMALL, data=str(pairs), out=str(tmp_path / "other"))
    done = subprocess.run([sys.executable, "-c", code, json.dumps(options)], text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["state_sha256"] == expected["state_sha256"]


def test_evaluate_repeats_what_training_found(run):
    folder, summary = run
    answer = plimsoll.evaluate(folder)
    assert answer["step"] == summary["step"]
    assert answer["recall"]["pairs"] == summary["recall"]["pairs"]


def test_an_interrupt_checkpoints_and_resume_goes_on(pairs, tmp_path):
    """Ctrl-C while torch is busy; the resumed run ends where an undisturbed one does."""
    before = signal.getsignal(signal.SIGINT)  # Ignored, where a script runs the tests behind itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    many = {**SMALL, "epochs": 20, "eval_every_n_epochs": 0, "checkpoint_every_n_steps": 100_000}
    undisturbed = plimsoll.train("cosir", data=pairs, out=tmp_path / "undisturbed", **many)
    events = tmp_path / "run" / "events.jsonl"

    def interrupt():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if events.exists() and '"event":"step"' in events.read_text().replace(" ", ""):
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="resume"):
        plimsoll.train("cosir", data=pairs, out=tmp_path / "run", **many)
    thread.join()
    stopped = plimsoll.info(tmp_path / "run")
    assert stopped["status"] == "stopped" and 0 < stopped["step"] < undisturbed["step"]
    with pytest.raises(ValueError, match="batch_size"):
        plimsoll.resume(tmp_path / "run", progress=False, batch_size=64)
    resumed = plimsoll.resume(tmp_path / "run", progress=False)
    assert resumed["status"] == "finished"
    assert resumed["state_sha256"] == undisturbed["state_sha256"]
    with pytest.raises(KeyboardInterrupt):  # The handlers are Python's own again.
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("options, error, text", [
    ({"epochs": "several"}, ValueError, "epochs"), ({"bathc_size": 3}, ValueError, "batch_size"),
    ({"memory_limit": "a lot"}, ValueError, "memory_limit|memory-limit"),
    ({"epochs": [1, 2]}, ValueError, "epochs"), ({"data": "nowhere"}, KeyError, "nowhere"),
    ({"config": "nothing.toml"}, KeyError, "nothing.toml")])
def test_train_says_what_is_wrong(pairs, tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        plimsoll.train("cosir", **{"data": pairs, "out": tmp_path / "run", **SMALL, **options})
    assert not (tmp_path / "run" / "run.toml").exists()


def test_the_disk_limit_counts_rows_and_checkpoints(pairs, tmp_path):
    with pytest.raises(ValueError, match="its checkpoints, may come to fill .* disk limit is 4.0 MiB"):
        plimsoll.train("cosir", **{"data": pairs, "out": tmp_path / "run", **SMALL,
                                   "disk_limit": "4MiB"})
    assert not (tmp_path / "run" / "run.toml").exists()
    with pytest.raises(ValueError, match="the table .* may come to fill .* disk limit is 4.0 KiB"):
        plimsoll.train("cosir", **{"data": pairs, "out": tmp_path / "run", **SMALL,
                                   "disk_limit": "4KiB"})
    summary = plimsoll.train("cosir", **{"data": pairs, "out": tmp_path / "run", **SMALL,
                                         "disk_limit": "64MiB"})
    assert summary["status"] == "finished"
    held = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert held <= 64 << 20


@pytest.mark.parametrize("words", [["train", "cosir", "--data", "x", "--out", "y", "--epochs", "0"], ["plan", "can-kd", "--batchsize", "4"],
                                   ["resume", "nowhere"], ["eval", "nowhere"]])
def test_what_is_wrong_with_the_words_is_said_without_loading_torch(tmp_path, words):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "plimsoll", *words], text=True, capture_output=True, timeout=300,
                          check=False, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode in (1, 2) and "plimsoll: error: " in done.stderr
    assert "plimsoll.core._torch_gate" in imported and "torch" not in imported


def test_other_recipes_and_missing_runs_are_named(tmp_path, pairs):
    with pytest.raises(ValueError, match="there is no recipe .chant."):
        plimsoll.train("chant", data=pairs, out=tmp_path / "run")
    for call in (plimsoll.resume, plimsoll.evaluate):
        with pytest.raises(KeyError, match="no run"):
            call(tmp_path)


def test_a_limit_that_cannot_do_is_refused_before_the_first_step(pairs, tmp_path):
    resident = 300 << 20  # More than that is resident already, with torch in the process.
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        plimsoll.train("cosir", data=pairs, out=tmp_path / "run", **{**SMALL,
                                                                     "memory_limit": resident})
    assert caught.value.limit_bytes == resident and caught.value.advice


def test_an_open_governor_that_holds_memory_is_in_the_way(pairs, tmp_path, governor):
    with governor.reserve("1MiB"), pytest.raises(ValueError, match="another governor"):
        plimsoll.train("cosir", data=pairs, out=tmp_path / "run", **SMALL)


def test_the_script_has_the_programs_exit_status(tmp_path):
    assert program("--version").stdout.split() == ["plimsoll", plimsoll.__version__]
    assert program("limits").returncode == 0
    assert program("no-such-command").returncode == 2
    assert program("info", tmp_path).returncode == 1
    assert _program.main(["info", str(tmp_path)]) == 1
