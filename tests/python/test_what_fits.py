# SPDX-License-Identifier: Apache-2.0
"""The table of docs/guide/gpu.md is what is computed."""
import pathlib

import pytest

for name in ("torch", "transformers", "peft", "accelerate"):
    pytest.importorskip(name)

from tests.support import quantised, what_fits

quantised.needed()

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/guide/gpu.md"
PRINTED = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(tuple(f"| {name} |" for name in what_fits.SHAPES))]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "7B" else pytest.mark.slow) for name in what_fits.SHAPES])
def test_the_table_of_what_fits_is_what_is_computed(name):
    """As the page has it, model by model."""
    printed = [line for line in PRINTED if line.startswith(f"| {name} |")]
    with quantised.importable():
        assert printed == list(what_fits.table([name]))


def test_a_card_of_24_gb_has_the_figures_in_bold():
    for cell in (cell for line in PRINTED for cells in line.split("|")[3:6] for cell in cells.split("/")):
        assert (float(cell.strip(" *")) <= what_fits.CARD) == ("**" in cell), cell
