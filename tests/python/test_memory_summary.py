# SPDX-License-Identifier: Apache-2.0
"""memory_summary(), and the picture of a Watch in a notebook."""
import re
import subprocess
import sys
import xml.etree.ElementTree


def summary_after(code: str) -> str:
    return subprocess.run([sys.executable, "-c", f"import plimsoll\n{code}\nprint(plimsoll.memory_summary())"], text=True,
                          capture_output=True, check=True).stdout


def test_the_owner_that_holds_most_comes_first_with_advice():
    text = summary_after("kept = bytearray(300 << 20)")
    lines = text.splitlines()
    assert re.fullmatch(r"\d+\.\d MiB held in 1 process", lines[0]), text
    assert lines[1].split()[0] == "native" and float(lines[1].split()[1]) >= 300, text
    assert any(line.startswith("  native: malloc() of libraries") for line in lines), text


def test_with_a_governor_leases_and_the_limit_are_told():
    text = summary_after("import torch\ngovernor = plimsoll.Governor('2GiB').__enter__()\nx = torch.ones(60 << 20)")
    assert "limit 2.0 GiB" in text.splitlines()[0], text
    tensors, = [line for line in text.splitlines() if line.startswith("  tensors ")]
    assert float(tensors.split()[1]) >= 240, text
    assert "leases: " in text


def test_children_are_counted():
    text = summary_after("import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import sys; "
                         "x = b\"x\" * (200 << 20); print(1, flush=True); sys.stdin.read()'], stdin=subprocess.PIPE, "
                         "stdout=subprocess.PIPE)\nchild.stdout.readline()")
    children, = [line for line in text.splitlines() if line.startswith("  children ")]
    assert float(children.split()[1]) >= 200 and "in 2 processes" in text, text
    assert "fewer of them" in text


NOTEBOOK = """
import plimsoll
kept = []
with plimsoll.Watch(window_steps=1) as watch:
    for _ in range(40):
        kept.append(bytearray(1 << 20))
        watch.step()
print(watch._repr_html_())
"""


def test_a_notebook_shows_who_held_what():
    # A process of its own: in one that has free pieces of heap, they may take all that is kept.
    shown = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True,
                           check=True).stdout
    svg = shown[shown.index("<svg"):shown.index("</svg>") + len("</svg>")]
    picture = xml.etree.ElementTree.fromstring(svg)  # It is well-formed, and has no script.
    names = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert "memory by owner over time" in names and names & {"native", "unexplained"}, names
    assert "<script" not in shown and "Watch after 40 steps" in shown
