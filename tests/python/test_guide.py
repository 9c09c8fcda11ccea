# SPDX-License-Identifier: Apache-2.0
"""docs/guide (test_docs.py has all of docs): its programs run as printed, its links lead somewhere, and the error texts it explains are ours."""
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")
import plimsoll

from tests.support import chats
from tests.support.readme import PIECES, PLANS

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
PROGRAMS = [pytest.param(page, block, id=f"{page.stem}-{number}", marks=[pytest.mark.slow] if page.stem == "imports" else [])
            for page in sorted(GUIDE.glob("*.md"))
            for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
            if (f"docs/guide/{page.name}", number) not in (PIECES, PLANS)]  # test_readme.py has them.


def start(code, folder):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable})


def chats_to_import(folder):
    chats.make_tokenizer(folder / "MODEL")
    (folder / "chats").mkdir()
    return [chats.write_lines(folder / "chats" / f"{k:02}.jsonl", [{"messages": chats.chat(random.Random(10 * k + row))}
                                                                   for row in range(1 + k)]) for k in range(12)]


def test_there_are_programs():
    assert {page.values[0].stem for page in PROGRAMS} == {
        "batch", "features", "gpu", "imports", "limits", "ranks", "recipes", "several-losses", "trainers", "tutorial", "watch"}


@pytest.mark.parametrize("page, block", PROGRAMS)
def test_the_program_runs_as_printed(page, block, tmp_path, governor):
    for module in ("accelerate", "dask.distributed", "lightning", "pyspark", "ray", "transformers"):
        if f"import {module}" in block:
            pytest.importorskip(module, reason=f"needs {module}: tools/setup.sh --slow installs it")
    if "import pyspark" in block and shutil.which("java") is None:
        pytest.skip("Spark needs java: tools/setup.sh --slow installs it")
    if page.stem == "imports":
        files = chats_to_import(tmp_path)
    done = start(block, tmp_path)
    assert done.returncode == 0, done.stderr
    if page.stem == "imports":
        plimsoll.import_chat(files, tmp_path / "whole", tokenizer=tmp_path / "MODEL", governor=governor)
        assert (tmp_path / "chats.tokens").read_bytes() == (tmp_path / "whole").read_bytes()


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


@pytest.mark.slow
def test_the_loop_and_the_array_of_tasks_make_what_one_import_makes(tmp_path, governor):
    loop, task = (block for block in re.findall(r"```\n(.*?)```", (GUIDE / "imports.md").read_text("utf-8"), re.DOTALL)
                  if "$" in block)
    files = chats_to_import(tmp_path)
    plimsoll.import_chat(files, tmp_path / "whole", tokenizer=tmp_path / "MODEL", governor=governor)
    tasks = f"for SLURM_ARRAY_TASK_ID in 1 2 3 4 5 6 7 8; do {task.splitlines()[-1]}; done\n{loop.splitlines()[-1].replace('4', '8')}"
    program = f"plimsoll() {{ {sys.executable} -c 'import sys; from plimsoll.cli._program import main; sys.exit(main())' \"$@\"; }}\n"
    for commands in (loop, tasks):
        subprocess.run(["bash", "-ec", program + commands], cwd=tmp_path, check=True, timeout=300)
        assert (tmp_path / "chats.tokens").read_bytes() == (tmp_path / "whole").read_bytes()
        (tmp_path / "chats.tokens").unlink()
