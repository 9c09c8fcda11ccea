# SPDX-License-Identifier: Apache-2.0
"""docs/guide (test_docs.py has all of docs): its programs run as printed, its links lead somewhere, and the error texts it explains are ours."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
PROGRAMS = [pytest.param(page, block, id=f"{page.stem}-{number}")
            for page in sorted(GUIDE.glob("*.md"))
            for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))]


def start(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_there_are_programs():
    assert {page.values[0].stem for page in PROGRAMS} == {"batch", "features", "ranks", "recipes", "trainers", "tutorial", "watch"}


@pytest.mark.parametrize("page, block", PROGRAMS)
def test_the_program_runs_as_printed(page, block, tmp_path):
    for module in ("accelerate", "lightning", "transformers"):
        if f"import {module}" in block:
            pytest.importorskip(module)
    done = start(block, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_run_of_the_tutorial_has_the_same_bits_after_a_kill(tmp_path):
    """Killed where it has made 40 of 48 steps, with a commit at 31."""
    last = [one.values[1] for one in PROGRAMS if one.values[0].stem == "tutorial"][-1]
    program = last.replace("commit_every_minutes=5", "commit_every_steps=31")
    killed = program.replace("        schedule.step()\n", "        schedule.step()\n"
                             "        if run.steps_made == 40: import os; run._life.end_writing(); os.kill(os.getpid(), 9)\n")
    bits = []
    for folder, programs in (("undisturbed", [program]), ("killed", [killed, program])):
        (tmp_path / folder).mkdir()
        for code in programs:
            done = start(code, tmp_path / folder)
            assert done.returncode == (-9 if code is killed else 0), done.stderr
        bits.append((tmp_path / folder / "model.pt").read_bytes())
    assert "goes on at step 31" in done.stderr
    assert bits[0] == bits[1]


def test_the_error_texts_are_ours():
    """Of each text that troubleshooting.md explains, what stands between two gaps is in a source."""
    sources = "".join(path.read_text("utf-8") for folder in ("python/plimsoll", "src", "cli")
                      for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # Texts of several lines.
    page = (GUIDE / "troubleshooting.md").read_text("utf-8")
    texts = re.findall(r"^`(.*)`\n: (.*)", page, re.MULTILINE)
    assert len(texts) > 8
    for text, meaning in texts:
        for part in [] if meaning.startswith("From torch") else re.split(r"…", text):
            part = part.strip(" ():;,")
            assert part in sources, f"{text}: {part!r} is in no source"


def test_the_pages_are_made_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
                          cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "guide" / "reference.html").read_text("utf-8")
    for name in ("plimsoll.Run", "plimsoll.Governor.set_limit", "plimsoll.integrations.lightning.RunCallback"):
        assert f'id="{name}"' in reference
