# SPDX-License-Identifier: Apache-2.0
"""RUN/report.html, of runs that ended as runs do; and in a real browser, where there is one."""
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.ended_runs import python_run

BYTES_MOST = 1_500_000


def report(program, folder) -> pathlib.Path:
    """Draws it anew."""
    done = subprocess.run([program, "report", folder], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder / 'report.html'}\n"
    return folder / "report.html"


def words_of(page: str) -> str:
    """What a reader sees, roughly: without tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S)))


def made_run(tmp_path, kind: str, program) -> pathlib.Path:
    folder = tmp_path / kind
    if kind == "killed":
        leak = "import time\nkept = []\nwhile True: kept.append(bytearray(2 << 20)); time.sleep(.02)"
        subprocess.run([program, "run", "--memory-limit", "384MiB", "--record", folder, "--", sys.executable, "-c", leak],
                       capture_output=True, check=False)
        return folder
    words = {"fine": [], "refused": ["refuse"], "leaked": ["slow"]}[kind]
    limit = {"leaked": "640MiB"}.get(kind, "4GiB")
    run = python_run(folder, limit, 1 if kind == "leaked" else 0, *words, **{} if kind == "leaked" else {"STEPS": "300"})
    run.communicate(timeout=120)
    return folder


EXPECTED = {
    "fine": ["Finished", "finished at step 301", "Loss and throughput", "Memory by owner", "commits; the longest took",
             "Environment", "most of the rest", "there before the run"],
    "refused": ["Memory was refused", "refused memory at step", "Who held the memory", "limit 4.0 GiB"],
    "leaked": ["Memory ran short: it stopped itself, with a commit", "Who held the memory", "a worker, PID", "children",
               "worker processes and other children"],
    "killed": ["Memory ran out: the kernel killed it", "at the limit of 384.0 MiB that `plimsoll run` set",
               "the process itself, PID", "grew steadily", "What would help"],
}


@pytest.mark.parametrize("kind", ["fine", "refused"])
def test_a_run_that_ends_leaves_its_page(program, tmp_path, kind):
    folder = made_run(tmp_path, kind, program)
    left = (folder / "report.html").read_text()
    again = report(program, folder).read_text()
    for page in (left, again):
        assert len(page.encode()) < BYTES_MOST
        words = words_of(page)
        for text in EXPECTED[kind]:
            assert text in words, (text, words[:3000])
        assert not re.search(r"<script|<img|<link|<iframe|href=|src=|url\(|@import", page)


def test_a_command_that_was_killed_has_a_page(program, tmp_path):
    MemoryCgroup.needed()
    folder = made_run(tmp_path, "killed", program)
    words = words_of((folder / "report.html").read_text())
    for text in EXPECTED["killed"]:
        assert text in words, (text, words[:3000])


def test_out_names_the_file_and_errors_name_what_is_wrong(program, tmp_path):
    run = made_run(tmp_path, "fine", program)
    done = subprocess.run([program, "report", run, "--out", tmp_path / "page.html", "--trace", tmp_path / "t.json"],
                          text=True, capture_output=True, check=True)
    assert "memory by owner" in (tmp_path / "t.json").read_text()
    assert done.stdout == f"{tmp_path / 'page.html'}\n" and "finished" in (tmp_path / "page.html").read_text()
    for words, text in (([tmp_path], "neither a run nor"), ([run, "--out", tmp_path / "no" / "page.html"], "page.html")):
        done = subprocess.run([program, "report", *words], text=True, capture_output=True, check=False)
        assert done.returncode == 1 and text in done.stderr


def test_the_page_in_python(tmp_path, program):
    import plimsoll

    run = made_run(tmp_path, "fine", program)
    assert plimsoll.report(run, tmp_path / "page.html") == str(tmp_path / "page.html")
    assert plimsoll.report(run, trace=tmp_path / "trace.json") == str(run / "report.html")
    counters = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "C"]
    held = [event["args"]["bytes"] for event in counters if event["name"] == "held"]
    assert held and min(held) > 1 << 20
    with pytest.raises(plimsoll.NotFoundError):
        plimsoll.report(tmp_path)


# ---- In a browser ----

def browser() -> str:
    found = os.environ.get("PLIMSOLL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.skip("no chromium here (apt-get install chromium): the page was not opened in a browser")
    return found


def opened(page: pathlib.Path, tmp_path) -> tuple[str, list[str], pathlib.Path]:
    """(the document as the browser has it, what the page asked for, a picture of it)."""
    log, shot = tmp_path / "net.json", page.with_suffix(".png")
    words = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
             "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run([*words, f"--log-net-log={log}", "--window-size=1040,1900", f"--screenshot={shot}", page.as_uri()],
                   capture_output=True, timeout=120, check=True)
    document = subprocess.run([*words, "--dump-dom", page.as_uri()], capture_output=True, timeout=120, check=True,
                              text=True).stdout
    text = log.read_text()
    try:
        events = json.loads(text)
    except ValueError:  # It is cut short where the browser is in a hurry.
        events = json.loads(text[:text.rstrip().rstrip(",").rfind("}") + 1] + "]}")
    asked = []
    for event in events["events"]:
        given = event.get("params") or {}
        if "url" in given and given.get("initiator", "not an origin") != "not an origin":
            asked.append(given["url"])
    return document, asked, shot


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fine", "refused", "leaked", "killed"])
def test_one_look_in_a_browser(program, tmp_path, kind):
    browser()
    if kind == "killed":
        MemoryCgroup.needed()
    page = report(program, made_run(tmp_path, kind, program))
    assert page.stat().st_size < BYTES_MOST
    document, asked, shot = opened(page, tmp_path)
    words = words_of(document)
    for text in EXPECTED[kind]:
        assert text in words, (text, words[:3000])
    assert asked == []
    assert document.count("<svg") >= (2 if kind == "killed" else 4)
    assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 20_000
    if keep := os.environ.get("PLIMSOLL_SCREENSHOTS"):
        shutil.copy(shot, pathlib.Path(keep) / f"{kind}.png")


@pytest.mark.slow
def test_a_page_that_asked_for_something_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/picture.png'>")
    _, asked, _ = opened(page, tmp_path)
    assert "http://127.0.0.1:9/picture.png" in asked
