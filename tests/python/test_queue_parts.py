# SPDX-License-Identifier: Apache-2.0
"""The parts of `plimsoll queue`: what add() returned stays, everything has a bound, incidents are told by evidence, and what
a job comes to follows from how its start ended."""
import argparse
import contextlib
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys

import pytest

import plimsoll
from plimsoll.cli import _queue, _queue_command, _queue_rules, _queue_start
from tests.support.full_disk import fill, small_disk
from tests.support.queues import Queue, running

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "queue"


@pytest.fixture
def queue(program, folder):
    """By the program."""
    return Queue(program, folder)


def add(queue, word="true", **more):
    return queue.add({"command": [word], "directory": "/", "memory_limit": "1GiB", **more})


def many(queue, count, **more):
    """Jobs 1, 2, … in one transaction."""
    with queue._writing():
        for number in range(1, count + 1):
            queue._write({**_queue._NEW, "id": number, "command": ["true"], "directory": "/", **more})


def script(code, *words, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], text=True, stdout=subprocess.PIPE, **options)


# Hours and durations.


@pytest.mark.parametrize(("text", "held", "free"), [
    ("09:00-17:30", [540, 1049], [539, 1050]), ("22:00-6:15", [1380, 0, 374], [375, 720])])
def test_hours_hold_from_their_begin_up_to_their_end_past_midnight_too(text, held, free):
    from plimsoll.cli._queue_runner import within

    hours = _queue_command.hours_from(text)
    assert all(within(hours, minute) for minute in held) and not any(within(hours, minute) for minute in free)


@pytest.mark.parametrize("text", ["", "9", "9-17", "09:00", "09:00-", "24:00-1:00", "9:60-10:00", "9:0-10:00", "-1:00-2:00", "09:00-09:00",
                                  "09:00-17:30h", "09:00 -17:30", "009:00-1:00"])
def test_other_texts_are_no_hours(text):
    with pytest.raises(argparse.ArgumentTypeError, match="09:00-17:30"):
        _queue_command.hours_from(text)


def test_a_duration_is_in_seconds_minutes_hours_or_days():
    assert [_queue_command.seconds_from(text) for text in ("90", "90s", "15m", "2h", "1d")] == [90, 90, 900, 7200, 86400]
    for text in ("", "h", "0", "-1", "1.5h", "1w", "1 h", "99999999999999999999", "9999999d"):
        with pytest.raises(argparse.ArgumentTypeError, match="no duration"):
            _queue_command.seconds_from(text)


# The folder.


def test_a_job_comes_back_as_it_was(folder):
    queue = _queue.Queue(folder, make=True)
    job = {"format": 2, "id": 7, "state": "failed", "command": ["python", 'ü "quoted"'], "directory": "/work", "memory_limit": "24GiB",
           "timeout_seconds": 60, "restarts_most": 5, "restarts": 2, "restart_progress": "run: step 4", "cancel": True, "starts": 3,
           "deaths": 2, "added": 1, "not_before": 2, "started": 3, "ended": 4, "guard": 5, "guard_began": 6, "progress": "run: step 8",
           "why": "w", "ending": "killed_for_limit", "status": 137, "seconds": 1.5, "limit_bytes": 1000, "peak_bytes": 990,
           "stalled_seconds": 1.0, "advice": ["a higher limit"], "incidents": [{"rule": "limit", "evidence": "event x", "then": "note"}]}
    with queue._writing():
        queue._write(job)
    back = _queue.Queue(folder).read(7)
    assert back == job and list(back) == list(job)
    health, reasons = _queue.health_of(back)
    assert health == 0 and len(reasons) == 5 and reasons[1] == "died 2 times"  # 50, 20, 20, 10 and 20.


def test_s37_a_peak_above_its_limit_is_said_in_bytes():
    job = {**_queue._NEW, "state": "done", "limit_bytes": 100 * MIB, "peak_bytes": 118 * MIB}
    assert _queue.health_of(job) == (90, ["passed its limit: 118.0 MiB at its peak, of 100.0 MiB"])
    assert _queue.health_of({**job, "peak_bytes": 98 * MIB})[1] == ["came near its limit: 98.0 MiB at its peak, of 100.0 MiB"]
    assert _queue.health_of({**job, "peak_bytes": 95 * MIB}) == (100, [])
    assert _queue.health_of({**_queue._NEW, "state": "failed", "deaths": 9})[0] == 10


def test_jobs_are_numbered_and_stay_through_a_power_failure(folder):
    queue = _queue.Queue(folder, make=True)
    assert (add(queue, "a"), add(queue, "b")) == (1, 2)
    again = _queue.Queue(folder)
    assert again.numbers() == [1, 2] and again.read(2)["command"] == ["b"]
    with pytest.raises(plimsoll.NotFoundError, match="no job 3"):
        again.read(3)
    # A rollback journal, whose end is synced: what SQLite calls EXTRA.
    assert again._db.execute("PRAGMA synchronous").fetchone() == (3,) and again._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_so_many_may_wait_and_so_many_that_ended_are_kept(folder):
    queue = _queue.Queue(folder, make=True)
    many(queue, _queue.ENDED_MOST + 5, state="done")
    for number in (5, 6):
        pathlib.Path(queue.log_of(number)).write_text("words")
    assert add(queue) == _queue.ENDED_MOST + 6
    assert queue.numbers() == [*range(6, _queue.ENDED_MOST + 7)]
    assert not os.path.exists(queue.log_of(5)) and os.path.exists(queue.log_of(6))
    with pytest.raises(ValueError, match="write a long command as a script"):
        add(queue, "x" * (_queue.COMMAND_BYTES_MOST + 1))
    many(queue, _queue.WAITING_MOST)
    with pytest.raises(ValueError, match="1000 jobs wait already"):
        add(queue)
    assert queue.cancel(4)
    assert add(queue) == _queue.WAITING_MOST + 1


def test_cancelled_once_and_not_again(folder):
    queue = _queue.Queue(folder, make=True)
    add(queue)
    assert queue.cancel(1) and queue.read(1)["state"] == "cancelled" and not queue.cancel(1)
    add(queue)
    queue.change(2, lambda job: job.update(state="running"))
    assert queue.cancel(2)
    assert (queue.read(2)["state"], queue.read(2)["cancel"]) == ("running", True)


def test_two_that_change_jobs_at_once_are_never_refused(folder):
    queue = _queue.Queue(folder, make=True)
    code = ("import sys; from plimsoll.cli._queue import Queue\n"
            "for _ in range(40): Queue(sys.argv[1]).change(int(sys.argv[2]), lambda job: job.update(starts=job['starts'] + 1))")
    others = [script(code, folder, add(queue)) for _ in range(3)]
    assert [other.wait(timeout=300) for other in others] == [0] * 3
    assert [queue.read(number)["starts"] for number in (1, 2, 3)] == [40] * 3


def test_what_was_added_outlives_a_kill(folder):
    """Three processes add at once, and each is killed in the middle of it."""
    _queue.Queue(folder, make=True)
    code = ("import sys; from plimsoll.cli._queue import Queue; queue = Queue(sys.argv[1]); print('ready', flush=True); sys.stdin.readline()\n"
            "for _ in range(80): print(queue.add({'command': ['true'], 'directory': '/'}), flush=True)\n"
            "sys.stdin.readline()")
    told = []
    for jobs in range(1, 5):
        writers = [script(code, folder, stdin=subprocess.PIPE) for _ in range(3)]
        assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 3
        for writer in writers:
            print(file=writer.stdin, flush=True)
        for writer in writers:
            told += [int(writer.stdout.readline()) for _ in range(jobs)]
            writer.kill()
            told += [int(line) for line in writer.communicate()[0].splitlines()]
    queue = _queue.Queue(folder)
    assert len(set(told)) == len(told) >= 30
    assert all(queue.read(number)["command"] == ["true"] for number in told)
    assert add(queue) > max(told)  # Nobody holds a lock.


# Incidents.

THREE = """
[[rule]]
name = "oom"
pattern = "OOM|out of memory"
then = "fail"
[[rule]]
name = "away"
status = [75, 69]
then = "retry"
[[rule]]
name = "limit"
event = "killed_for_limit"
"""


def rules_of(text):
    return _queue_rules.parse_rules("rules.toml", text)


def test_t10_patterns_are_of_whole_words_and_case_counts():
    pattern = rules_of(THREE)[0].pattern
    for line in ("OOM", "torch: OOM!", "CUDA out of memory.", "(OOM)", "an OOM\tkill"):
        assert pattern.search(line.encode()), line
    for line in ("classroom", "see the CLASSROOM", "ROOM", "oom", "OOMs", "OOM_score", "without of memory", "Out of memory", ""):
        assert not pattern.search(line.encode()), line


def test_t10_a_kill_for_memory_is_told_by_the_kernel_and_not_by_words():
    find = _queue_rules.find_incident
    assert find(_queue_rules.USUAL, 137, "killed_for_limit", []) == {
        "rule": "killed at its memory limit", "evidence": "event killed_for_limit", "then": "note"}
    assert find(_queue_rules.USUAL, 137, "killed", []) is None  # By somebody's SIGKILL.
    assert find(_queue_rules.USUAL, 1, "done", []) is None
    assert find(_queue_rules.USUAL, 143, "timeout", [])["then"] == "fail"


def test_the_first_rule_that_matches_is_told_with_its_evidence():
    rules, find = rules_of(THREE), _queue_rules.find_incident
    assert find(rules, 75, "done", ["line 3: OOM", "", ""])["evidence"] == "line 3: OOM"
    assert find(rules, 75, "done", ["", "", ""])["evidence"] == "status 75"
    assert find(rules, 75, "done", [])["then"] == "retry"
    assert find(rules, 137, "killed_for_limit", [])["rule"] == "limit"
    assert find(rules, 1, "done", ["", "", ""]) is None


@pytest.mark.parametrize(("text", "said"), [
    ("[[rule]\n", "rules.toml:1"),
    ('\n[[rule]]\nname = "a"\n', "rules.toml:2: a rule has one of pattern, status and event"),
    ('[[rule]]\nname = "a"\nstatus = 1\nevent = "killed"\n', "one of pattern"),
    ("[[rule]]\nstatus = 1\n", "needs a name"),
    ('[[rule]]\nname = "a"\npattern = "("\n', 'pattern "("'),
    ('[[rule]]\nname = "a"\npattern = "x)|(y"\n', 'pattern "x)|(y"'),
    ('[[rule]]\nname = "a"\npattern = "[[:digit:]]"\n', "written as \\d"),
    (f'[[rule]]\nname = "a"\npattern = "{"x" * 257}"\n', "at most 256 bytes"),
    ('[[rule]]\nname = "a"\nstatus = 300\n', "from 0 to 255"),
    ('[[rule]]\nname = "a"\nstatus = "1"\n', "from 0 to 255"),
    ('[[rule]]\nname = "a"\nstatus = true\n', "from 0 to 255"),
    ('[[rule]]\nname = "a"\nevent = "oom"\n', "killed_for_limit"),
    ('[[rule]]\nname = "a"\nstatus = 1\nthen = "stop"\n', "note, retry, fail"),
    ('[[rule]]\nname = "a"\nstatus = 1\nwhen = 2\n', "no key of a rule: when"),
    ('[[rule]]\nname = "a"\nstatus = 1\n\n[[rule]]\nname = "b"\n', "rules.toml:5: a rule has one of"),
    ("rule = 3\n", "tables [[rule]]"),
    ("[other]\n", "tables [[rule]]"),
    ("[[rule]]\nname = 3\nstatus = 1\n", "name is a text"),
    ('[[rule]]\nname = "a"\nstatus = 1\n' * 65, "65 rules, and there may be 64"),
])
def test_a_file_of_rules_that_is_wrong_is_named_with_its_line(text, said):
    with pytest.raises(ValueError) as wrong:
        rules_of(text)
    assert str(wrong.value).startswith("rules.toml:") and said in str(wrong.value)


TAKE = """
import json, os, sys
from plimsoll.cli import _queue_rules, _queue_start
found = os.memfd_create("found")
_queue_start._take(os.dup(0), sys.argv[1], _queue_rules.parse_rules("r", sys.argv[2]), os.dup(found)) if os.fork() == 0 else os.wait()
sys.stdout.buffer.write(os.pread(found, 1 << 20, 0))
"""


def taken(path, text: bytes, rules=THREE):
    """What the rules find in what a job printed."""
    import json

    done = subprocess.run([sys.executable, "-c", TAKE, path, rules], input=text, stdout=subprocess.PIPE, check=True, timeout=120)
    return json.loads(done.stdout)


def test_a_log_keeps_what_is_printed_and_lines_are_found(tmp_path):
    path = tmp_path / "1.log"
    text = b"a classroom\nbar 1 %\rbar 2 %\nfailed: OOM here\nOOM again"
    assert taken(path, text) == ["line 3: failed: OOM here", "", ""]
    assert path.read_bytes() == text
    assert taken(path, b"one OOM")[0] == "line 1: one OOM"  # Without an end of line.
    assert path.read_bytes() == b"one OOM" and pathlib.Path(f"{path}.old").read_bytes() == text


def test_a_log_has_a_bound_and_what_it_dropped_is_found(tmp_path):
    path = tmp_path / "1.log"
    lines = taken(path, b"OOM first\n" + (b"x" * 1000 + b"\n") * 5300 + b"y" * 2_000_000 + b" OOM\nlast\n")  # Of a long line the beginning counts.
    assert lines[0] == "line 1: OOM first"
    assert path.stat().st_size <= MIB and pathlib.Path(f"{path}.old").stat().st_size <= MIB
    assert path.read_bytes().endswith(b" OOM\nlast\n")


def test_a_full_disk_holds_nobody_up(tmp_path):
    path = tmp_path / "1.log"
    path.symlink_to("/dev/full")  # Renamed away at the start; the log is a file.
    assert taken(path, b"OOM\n")[0] == "line 1: OOM"
    assert pathlib.Path(f"{path}.old").is_symlink() and not path.is_symlink()
    # No file can be made: all is read, and found, all the same.
    assert taken(tmp_path / "none" / "1.log", b"x" * MIB + b"\nOOM\n")[0] == "line 2: OOM"


# What a job comes to.


def shell(queue, folder, text, *words):
    return queue.call("add", "--memory-limit", "1GiB", *words, "--", "sh", "-c", text, cwd=folder)


def test_jobs_run_in_order_in_their_folder_and_are_logged(queue, tmp_path):
    shell(queue, tmp_path, "echo a >> order; echo words; echo more >&2")
    shell(queue, tmp_path, "echo b >> order; exit 3")
    assert queue.run(status=1) == {"done": 1, "failed": 1, "cancelled": 0, "left": 0, "asked": False}
    assert (tmp_path / "order").read_text() == "a\nb\n"
    one, two = queue.jobs().values()
    log = pathlib.Path(one["log"]).read_text()
    assert log.startswith("words\nmore\n") and '{"command"' not in log
    assert (one["state"], two["state"], two["status"], two["deaths"]) == ("done", "failed", 3, 1)
    assert one["peak_bytes"] > 0 and one["limit_bytes"] == 1 << 30 and one["seconds"] > 0


def test_while_a_job_waits_to_start_again_the_next_one_runs(queue, tmp_path):
    shell(queue, tmp_path, "echo a >> order; test $(grep -c a order) = 3", "--restarts", 5)
    shell(queue, tmp_path, "echo b >> order")
    assert queue.run()["done"] == 2
    assert (tmp_path / "order").read_text() == "a\nb\na\na\n"
    assert (queue.jobs()[1]["restarts"], queue.jobs()[1]["starts"]) == (2, 3)


def test_a_start_that_takes_too_long_is_ended_and_killed_if_it_must(queue, tmp_path):
    shell(queue, tmp_path, "trap '' TERM; echo $$ > pid; sleep 600", "--timeout", "1s", "--restarts", 3)
    assert queue.run("--grace", "1s", status=1)["failed"] == 1
    late = queue.jobs()[1]
    assert (late["ending"], late["starts"], [one["evidence"] for one in late["incidents"]]) == ("timeout", 1, ["event timeout"])
    assert not _queue_start.began(int((tmp_path / "pid").read_text()))


def test_rules_decide_by_evidence(queue, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "card"\npattern = "out of memory"\nthen = "fail"\n'
                     '[[rule]]\nname = "licence"\nstatus = 2\nthen = "retry"\n')
    shell(queue, tmp_path, "echo CUDA out of memory; exit 1", "--restarts", 9)
    shell(queue, tmp_path, "echo x >> tries; test $(wc -l < tries) = 2 || exit 2", "--restarts", 9)  # 2 is a wrong use otherwise.
    shell(queue, tmp_path, "echo in the classroom; exit 1")
    assert queue.run("--rules", rules, status=1) == {"done": 1, "failed": 2, "cancelled": 0, "left": 0, "asked": False}
    card, licence, other = queue.jobs().values()
    assert (card["starts"], card["incidents"][0]["evidence"]) == (1, "line 1: CUDA out of memory")
    assert (licence["state"], licence["incidents"][0]["evidence"], other["incidents"]) == ("done", "status 2", [])


def test_one_process_at_a_time_runs_a_queue(queue):
    queue.add("pass")
    queue.run()
    with running(queue.start("--wait")) as runner:
        queue.until(lambda: '"runs": true' in queue.call("list", "--json").stdout)
        assert f"process {runner.pid} runs this queue" in queue.call("run", status=1).stderr


def test_what_cannot_start_is_not_tried_again(queue, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    queue.call("add", "--memory-limit", "1GiB", "--restarts", 5, "--", "plimsoll-no-such-program")
    queue.call("add", "--memory-limit", "1GiB", "--restarts", 5, "--", "true", cwd=gone)
    gone.rmdir()
    assert queue.run(status=1)["failed"] == 2
    absent, lost = queue.jobs().values()
    assert (absent["starts"], lost["starts"]) == (1, 1)
    assert "no such program" in pathlib.Path(absent["log"]).read_text()
    assert f"{gone}: cannot be entered" in pathlib.Path(lost["log"]).read_text()


def test_a_second_signal_kills_the_job(queue, tmp_path):
    shell(queue, tmp_path, "trap '' TERM; echo $$ > pid; sleep 600")
    with running(queue.start()) as runner:
        queue.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        runner.send_signal(signal.SIGINT)
        assert any("is asked to, and queued again" in line for line in runner.stderr)
        runner.send_signal(signal.SIGINT)
        out, err = runner.communicate(timeout=60)
    assert out == "0 done, 0 failed, 0 cancelled, 1 left\n" and "asked twice: the job is killed" in err
    assert not _queue_start.began(int((tmp_path / "pid").read_text()))
    assert (queue.jobs()[1]["state"], queue.jobs()[1]["deaths"]) == ("waiting", 0)


def test_jobs_find_the_environment_as_the_runner_was_started_with_it(program, tmp_path):
    for name, value in (("none", None), ("some", "/a:/b")):
        environment = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        environment |= {"PYTHONPATH": value} if value else {}
        for words in (["add", name, "--memory-limit", "1GiB", "--", "sh", "-c", f"env > {name}.env"], ["run", name]):
            subprocess.run([program, "queue", *words], env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=60)
        found = dict(line.split("=", 1) for line in (tmp_path / f"{name}.env").read_text().splitlines() if "=" in line)
        assert found.get("PYTHONPATH") == value and not {"PYTHONSAFEPATH", "PLIMSOLL_PYTHONPATH", "PLIMSOLL_PYTHONSAFEPATH"} & set(found)


def test_a_runner_whose_input_is_closed_runs_jobs_all_the_same(queue, tmp_path):
    shell(queue, tmp_path, "cat; echo words")
    subprocess.run(["sh", "-c", 'exec "$0" -m plimsoll queue run "$1" <&-', sys.executable, queue.folder], check=True, timeout=60)
    assert pathlib.Path(queue.jobs()[1]["log"]).read_text().startswith("words\n")


HOURS = """
import os, pathlib, sys
from plimsoll.cli._queue import Queue
from plimsoll.cli._queue_runner import Runner
folder, held, told = pathlib.Path(sys.argv[1]), 0, []

def minute():
    global held
    now = int((folder / "minute").read_text())
    held += now == 600 and any("job 1 done" in text for text in told)
    if held > 3:
        (folder / "minute").write_text("0000")  # … until the hours are over.
    return now

print(Runner(Queue(folder / "queue"), pause=[(600, 660)], minute=minute, tell=told.append).run()["done"], *told, sep="|")
"""
PAUSED = """
import pathlib, time, plimsoll
minute = pathlib.Path("minute")
def until(there):
    while not there(): time.sleep(0.01)
run = plimsoll._core.RunFolder.create("run", "seed = 1\\n")
minute.write_text("0600")
until(pathlib.Path("run/.pause").exists)
minute.write_text("0000")
until(lambda: not pathlib.Path("run/.pause").exists())
minute.write_text("0600")  # The next job waits, …
pathlib.Path("order").write_text("1\\n")
run.close()
"""


def test_in_hours_of_pause_a_run_pauses_and_no_job_starts(folder, tmp_path):
    (tmp_path / "minute").write_text("0000")
    queue = _queue.Queue(folder, make=True)
    for code in (PAUSED, "open('order', 'a').write('2 ' + open('minute').read())"):
        queue.add({"command": [sys.executable, "-c", code], "directory": str(tmp_path), "memory_limit": "1GiB"})
    runner = script(HOURS, tmp_path)
    told = runner.communicate(timeout=120)[0]
    assert (tmp_path / "order").read_text() == "1\n2 0000"
    done, *told = told.split("|")
    told = [text for text in told if " runs: " not in text]
    begins = ("hours of pause: job 1 pauses its run", "job 1 goes on", "job 1 done: ", "hours of pause: no job starts", "the hours of pause are over")
    assert done == "2" and len(told) == 6 and all(text.startswith(begin) for text, begin in zip(told, begins)), told


def test_a_full_disk_costs_no_job(program, tmp_path):
    """Of job 1 the progress cannot be written down at first, of job 2 the end."""
    code = ("import os, pathlib, sys, time\n"
            "def until(name):\n    while not pathlib.Path(name).exists(): time.sleep(0.02)\n"
            "until(f'full{sys.argv[1]}')\n"
            "if sys.argv[1] == '1': open(os.environ['PLIMSOLL_PROGRESS'], 'w').write('run: step 4'); until('go')\n"
            "open('order', 'a').write(sys.argv[1])")
    with small_disk(tmp_path / "disk", 1) as disk:
        queue = Queue(program, disk / "queue")
        for number in (1, 2):
            queue.call("add", "--memory-limit", "1GiB", "--", sys.executable, "-c", code, number, cwd=tmp_path)
        full = 0
        with running(queue.start()) as runner:
            for line in runner.stderr:
                if " runs: " in line:
                    fill(disk)
                    (tmp_path / f"full{full + 1}").touch()
                elif "it is tried again" in line:
                    full += 1
                    (disk / "filler").unlink()
                    (tmp_path / "go").touch()
            assert runner.wait(timeout=60) == 0
        one, two = queue.jobs().values()
    assert full == 2 and (tmp_path / "order").read_text() == "12"
    assert (one["starts"], one["progress"], one["state"], two["state"]) == (1, "run: step 4", "done", "done")


def test_what_was_being_made_when_its_process_was_killed_is_no_queue(folder):
    folder.mkdir()
    (folder / "queue.db").touch()
    with pytest.raises(plimsoll.NotFoundError, match="no queue there"):
        _queue.Queue(folder)
    assert add(_queue.Queue(folder, make=True)) == 1
    with contextlib.closing(sqlite3.connect(folder / "queue.db")) as database:
        database.execute("PRAGMA user_version = 3")
    with pytest.raises(ValueError, match="a queue of format 3, and this release has 2"):
        _queue.Queue(folder)
