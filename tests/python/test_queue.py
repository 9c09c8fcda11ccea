# SPDX-License-Identifier: Apache-2.0
"""`plimsoll queue`: jobs in children whose memory goes back, through kill -9 of the runner, cancelled, timed, told of."""
import contextlib
import json
import os
import pathlib
import resource
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.queues import Queue, running


@pytest.fixture
def queue(program, tmp_path):
    return Queue(program, tmp_path / "queue")


def below(pid) -> set[int]:
    """The descendants of a process."""
    found, more = set(), {pid}
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            parents[int(stat.parent.name)] = int(text[text.rindex(")") + 2:].split()[1])
    while more:
        more = {one for one, parent in parents.items() if parent in more}
        found |= more
    return found


def gone(pid) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def resident(pid) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))


def test_m8_ten_jobs_leave_the_runner_as_small_as_it_was(queue, tmp_path):
    big = f"x = bytearray(200 << 20); open({str(tmp_path / 'order')!r}, 'a').write('x')"
    queue.add("pass")
    with running(queue.start("--wait")) as runner:
        queue.until(lambda: queue.jobs()[1]["state"] == "done")
        before = resident(runner.pid)
        for _ in range(10):
            queue.add(big)
        queue.until(lambda: all(job["state"] == "done" for job in queue.jobs().values()))
        assert (tmp_path / "order").read_text() == "x" * 10
        assert all(job["peak_bytes"] >= 200 << 20 for number, job in queue.jobs().items() if number > 1)
        assert abs(resident(runner.pid) - before) <= 1 << 20
        assert not below(runner.pid)


def test_m8_a_kill_for_memory_is_told_with_its_evidence(queue):
    MemoryCgroup.needed()
    queue.call("add", "--memory-limit", "96MiB", "--", sys.executable, "-c", "x = bytearray(400 << 20)")
    queue.add("print('OOM in the classroom, out of memory'); raise SystemExit(1)")
    queue.add("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert queue.run(status=1) == {"done": 0, "failed": 3, "cancelled": 0, "left": 0, "asked": False}
    killed, loud, other = (queue.jobs()[number] for number in (1, 2, 3))
    assert killed["ending"] == "killed_for_limit" and killed["status"] == 137
    assert [one["evidence"] for one in killed["incidents"]] == ["event killed_for_limit"]
    assert "would help" in queue.call("list").stdout and killed["advice"]
    assert loud["ending"] == "done" and not loud["incidents"]
    assert other["ending"] == "killed" and not other["incidents"]
    assert killed["health"] < loud["health"] and "incident: killed at its memory limit" in killed["health_reasons"]


KILLS = 1  # More in tests/budget/soak.py.
RUN = """
import os, signal, sys, time, torch, plimsoll
with plimsoll.Run(sys.argv[1] if len(sys.argv) > 1 else "run", memory_limit="1GiB", seed=3) as run:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for batch in run.steps([torch.full((2, 3), float(k)) for k in range(40)], epochs=1, commit_every_steps=5,
                           progress=False):
        run.step(lambda x: model(x).square().mean() + 0 * torch.rand(()), batch)
        time.sleep(SLOW)
        open("steps", "a").write(f"{run.steps_made}\\n")
        BODY
if run.stopped == "": open("end", "w").write(str(model.weight.tolist()))
"""


def script_of(slow=0.0, body="pass"):
    return RUN.replace("SLOW", str(slow)).replace("BODY", body)


def test_a_queue_outlives_kill_9_of_its_runner_and_a_run_goes_on(queue, tmp_path):
    pytest.importorskip("torch")
    queue.add(script_of(), cwd=tmp_path)
    queue.run()
    undisturbed = (tmp_path / "end").read_text()
    folder = tmp_path / "killed"
    folder.mkdir()
    number = queue.add(script_of(0.1), cwd=folder)
    queue.add("open('after', 'w')", cwd=folder)
    progress = set()
    for kill in range(KILLS):
        with running(queue.start()) as runner:
            queue.until(lambda: (folder / "steps").exists()
                        and len((folder / "steps").read_text().split()) >= 12 * (kill + 1))
            queue.until(lambda: "step" in queue.jobs()[number]["progress"])
            processes = below(runner.pid)
            runner.kill()
            runner.wait()
            job = queue.jobs()[number]
            assert job["state"] == "running"
            progress.add(job["progress"])
            queue.until(lambda: all(map(gone, processes)))  # They end with their runner, after a commit.
    assert queue.run()["done"] == 2
    job = queue.jobs()[number]
    assert (job["state"], job["starts"], job["deaths"]) == ("done", KILLS + 1, 0)
    assert (folder / "end").read_text() == undisturbed and (folder / "after").exists()
    assert len(progress) == KILLS and all(one.startswith("run: step ") for one in progress)


def test_a_job_that_ignores_its_runners_death_is_ended_before_it_starts_again(queue, tmp_path):
    number = queue.add("import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                       "open('pids', 'a').write(f'{os.getpid()}\\n')\n"
                       "if len(open('pids').read().split()) == 1: time.sleep(600)", cwd=tmp_path)
    with running(queue.start()) as runner:
        queue.until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
        runner.kill()
        runner.wait()
    first = int((tmp_path / "pids").read_text())
    assert not gone(first)
    assert queue.run("--grace", "1")["done"] == 1
    assert gone(first) and queue.jobs()[number]["starts"] == 2


def test_two_deaths_at_one_step_are_the_last(queue, tmp_path):
    pytest.importorskip("torch")
    number = queue.add(script_of(0, "if run.steps_made == 8: run._life.end_writing(); os.kill(os.getpid(), signal.SIGKILL)"),
                       "--restarts", 9, cwd=tmp_path)
    assert queue.run(status=1)["failed"] == 1
    job = queue.jobs()[number]
    assert (job["starts"], job["deaths"]) == (2, 2) and job["progress"].endswith("step 5")
    assert "ended twice without getting further" in job["why"]


def test_cancelled_while_it_waits_and_while_it_runs(queue, tmp_path):
    first = queue.add("import time; open('runs', 'w'); time.sleep(600)", "--restarts", 5, cwd=tmp_path)
    second = queue.add("open('second', 'w')", cwd=tmp_path)
    third = queue.add("open('third', 'w')", cwd=tmp_path)
    with running(queue.start()) as runner:
        queue.until((tmp_path / "runs").exists)
        assert "cancelled" in queue.call("cancel", second).stdout
        assert queue.jobs()[first]["state"] == "running"
        began = time.monotonic()
        assert json.loads(queue.call("cancel", first, "--json").stdout) == {"id": first, "cancelled": True}
        out, err = runner.communicate(timeout=60)
        assert time.monotonic() - began < 10 and runner.returncode == 0, err
    assert [queue.jobs()[one]["state"] for one in (first, second, third)] == ["cancelled", "cancelled", "done"]
    assert not (tmp_path / "second").exists() and (tmp_path / "third").exists()
    queue.call("cancel", first, status=4)
    queue.call("cancel", 99, status=1)


def test_t11_a_start_has_its_time(queue, tmp_path):
    number = queue.add("import time; time.sleep(600)", "--timeout", "1s", "--restarts", 3)
    began = time.monotonic()
    assert queue.run(status=1)["failed"] == 1
    assert time.monotonic() - began < 20
    job = queue.jobs()[number]
    assert (job["ending"], job["starts"]) == ("timeout", 1)
    assert job["incidents"][0]["rule"] == "ran out of time"


def test_t8_ctrl_c_of_the_runner_queues_the_job_again(queue, tmp_path):
    number = queue.add("import signal, sys, time\n"
                       "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w'), sys.exit(0)))\n"
                       "open('runs', 'a').write('x')\nwhile not open('runs').read() == 'xx': time.sleep(.05)",
                       cwd=tmp_path)
    with running(queue.start()) as runner:
        queue.until((tmp_path / "runs").exists)
        began = time.monotonic()
        runner.send_signal(signal.SIGINT)
        out, err = runner.communicate(timeout=30)
        assert runner.returncode == 0 and time.monotonic() - began < 4, err
    assert (tmp_path / "saved").exists()
    assert (queue.jobs()[number]["state"], queue.jobs()[number]["deaths"]) == ("waiting", 0)
    assert queue.run()["done"] == 1
    with running(queue.start("--wait")) as idle:
        queue.until(lambda: json.loads(queue.call("list", "--json").stdout)["runs"])
        began = time.monotonic()
        idle.send_signal(signal.SIGTERM)
        idle.communicate(timeout=30)
        assert time.monotonic() - began < 4


def test_s37_an_incident_that_comes_again_is_listed_once(queue, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "away"\npattern = "Stale file handle"\nthen = "retry"\n')
    number = queue.add("print('Stale file handle'); raise SystemExit(1)", "--restarts", 1)
    queue.run("--rules", rules, status=1)
    assert len(queue.jobs()[number]["incidents"]) == 2
    text = queue.call("list").stdout
    assert "incident: away (line 1: Stale file handle), 2 times\n" in text and text.count("Stale file handle)") == 1
    assert "lost health: failed; died 2 times; incidents\n" in text


def test_incident_rules_of_a_file(queue, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "card"\npattern = "CUDA out of memory"\nthen = "fail"\n')
    number = queue.add("print('x\\nRuntimeError: CUDA out of memory.'); raise SystemExit(1)", "--restarts", 3)
    queue.run("--rules", rules, status=1)
    job = queue.jobs()[number]
    assert job["starts"] == 1
    assert job["incidents"] == [{"rule": "card", "evidence": "line 2: RuntimeError: CUDA out of memory.", "then": "fail"}]
    text = queue.call("list").stdout
    assert "incident: card (line 2: RuntimeError: CUDA out of memory.)" in text and "lost health: failed" in text
    assert text.count("card") == 1
    rules.write_text("[[rule]]\nname = 'a'\n")
    done = queue.call("run", "--rules", rules, status=2)
    assert "rules.toml:1: a rule has one of pattern, status and event" in done.stderr


def test_in_hours_of_pause_no_job_starts(queue, tmp_path):
    number = queue.add("open('done', 'w')", cwd=tmp_path)
    now = time.localtime()
    hours = f"{now.tm_hour:02}:{now.tm_min:02}-{(now.tm_hour + 12) % 24:02}:{now.tm_min:02}"
    with running(queue.start("--pause-hours", hours)) as runner:
        assert "hours of pause: no job starts" in runner.stderr.readline()
        time.sleep(1)
        assert queue.jobs()[number]["state"] == "waiting"
        runner.send_signal(signal.SIGTERM)
        assert runner.communicate(timeout=30)[0] == "0 done, 0 failed, 0 cancelled, 1 left\n"


def test_what_a_job_prints_is_kept_and_reads_nothing(queue, tmp_path):
    number = queue.add("import os, sys; print('words', sys.stdin.read(), os.getcwd())", cwd=tmp_path)
    queue.run()
    job = queue.jobs()[number]
    assert pathlib.Path(job["log"]).read_text().splitlines()[0] == f"words  {tmp_path}"


def test_a_long_command_is_cut_between_characters(queue):
    for begins in ("#", "##"):
        queue.call("add", "--memory-limit", "1GiB", "--", "echo", begins + 60 * "ü")
    assert "ü ..." in queue.call("list").stdout  # Read as UTF-8.


def test_a_folder_that_a_record_cannot_name_is_refused(queue, tmp_path):
    odd = os.fsencode(tmp_path) + b"/M\xfcnchen"
    os.mkdir(odd)
    done = queue.call("add", "--memory-limit", "1GiB", "--", "true", status=2, cwd=odd, errors="replace")
    assert "is not UTF-8" in done.stderr and not queue.folder.exists()


@pytest.mark.parametrize(("words", "text"), [
    (["add", "q", "--", "true"], "--memory-limit"),
    (["add", "q", "--memory-limit", "much", "--", "true"], "--memory-limit"),
    (["add", "q", "--memory-limit", "1GiB", "--timeout", "soon", "--", "true"], "--timeout: 'soon' is no duration"),
    (["add", "q", "--memory-limit", "1GiB"], "COMMAND"),
    (["run", "q", "--pause-hours", "9-17"], "write them as 09:00-17:30"),
    (["run", "q", "--grace", "x"], "--grace"),
    (["cancel", "q", "0"], "JOB: Value 0 not in range 1 to 1099511627776\n"),
    (["lst", "q"], "did you mean list?"),
    (["list", "q", "--jsn"], "--jsn"),
    (["list", "q", "--", "true"], "'true' is one word too many"),
    ([], "add|list|cancel|run"),
])
def test_wrong_usage_is_explained(program, tmp_path, words, text):
    done = subprocess.run([program, "queue", *words], text=True, capture_output=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert not (tmp_path / "q").exists()


def test_a_damaged_record_is_named_with_what_helps(queue, tmp_path):
    for _ in range(3):
        queue.add("open('ran', 'a').write('x')", cwd=tmp_path)
    file = queue.folder / "queue.db"
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE job SET command = substr(command, 1, 4) WHERE id = 2")
        database.execute("UPDATE job SET state = 'Waiting' WHERE id = 1")
    done = queue.call("list", status=1)
    for number in (1, 2):
        assert f"{file}: job {number}: its checksum does not match" in done.stderr
    assert f"remove it (plimsoll queue cancel {queue.folder} 1), and add the job again" in done.stderr
    assert "train anew" not in done.stderr and "0.1.0" not in done.stderr
    assert queue.run()["done"] == 1 and (tmp_path / "ran").read_text() == "x"  # They are passed over.
    assert "cancelled" in queue.call("cancel", 1).stdout and "cancelled" in queue.call("cancel", 2).stdout
    assert list(queue.jobs()) == [3]
    file.write_bytes(b"x" * len(file.read_bytes()))
    for words in (["list"], ["run"], ["cancel", 3]):
        assert f"{file}: file is not a database\n  where it is damaged, move it away" in queue.call(*words, status=1).stderr


def test_a_queue_of_an_older_format_is_refused_by_name(queue):
    (queue.folder / "jobs").mkdir(parents=True)
    for words in (["list"], ["run"], ["cancel", 1], ["add", "--memory-limit", "1GiB", "--", "true"]):
        done = queue.call(*words, status=1)
        assert f"{queue.folder}: a queue of format 1, and this release has 2\n  run it to its end by the release that made it" in done.stderr
    assert [path.name for path in queue.folder.iterdir()] == ["jobs"]


def test_there_is_no_queue_there(program, tmp_path):
    for words in (["list"], ["run"], ["cancel"]):
        done = subprocess.run([program, "queue", *words, tmp_path / "none", *["1"] * (words == ["cancel"])], text=True,
                              capture_output=True, timeout=60)
        assert done.returncode == 1 and "none: no queue there" in done.stderr


def test_help_has_examples(program):
    for command in ([], ["add"], ["list"], ["cancel"], ["run"]):
        done = subprocess.run([program, "queue", *command, "--help"], text=True, capture_output=True, timeout=60)
        assert done.returncode == 0 and "Example" in done.stdout and "plimsoll queue" in done.stdout


def test_it_starts_soon_and_without_torch(queue):
    """Of the processor, least of five: a machine may be busy."""
    queue.add("pass")
    words = ["queue", "list", str(queue.folder), "--json"]
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "plimsoll", *words], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.15, seconds
    code = f"import sys; from plimsoll.cli._program import main; main({words}); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
