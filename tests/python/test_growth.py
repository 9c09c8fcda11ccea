# SPDX-License-Identifier: Apache-2.0
"""What a text about memory that is short says of growth, and of the function that runs."""
import types

import pytest

import plimsoll
from plimsoll.memory._growth import Growth, what_helps

MIB = 1 << 20


def test_growth_is_told_by_steps_however_many_there_were():
    for steps in (8, 100, 5000):
        growth = Growth()
        for step in range(steps):
            growth.add(step, 300 * MIB + step * 100_000)
        assert growth.bytes_per_step == pytest.approx(100_000, rel=0.01), steps
    assert len(growth._floors) <= 32


@pytest.mark.parametrize("held", [
    lambda step: 300 * MIB,
    lambda step: 300 * MIB + min(step, 50) * MIB,  # A warm-up.
    lambda step: 300 * MIB + step % 40 * MIB,  # It comes and goes.
    lambda step: 300 * MIB + (step > 150) * 80 * MIB,  # Once.
])
def test_what_does_not_grow_on_has_no_rate(held):
    growth = Growth()
    for step in range(200):
        growth.add(step, held(step))
    assert growth.bytes_per_step == 0


def test_s18_a_limit_that_would_do_says_for_how_many_steps():
    with plimsoll.Governor("4GiB", foreign_bytes="64MiB", on_pressure="warn") as governor:
        held = governor.step_boundary().resident.total
        report = types.SimpleNamespace(resident=types.SimpleNamespace(total=held), needed_bytes=governor.limit_bytes + 256 * MIB)
        governor._growth = Growth()
        assert "steps more" not in str(governor._pressure(report))
        for step in range(40):
            governor._growth.add(step, held + step * MIB)
        text = str(governor._pressure(report))
        room = governor.limit_bytes + 256 * MIB - held
        steps = int(text.partition("for some ")[2].partition(" steps more")[0].replace(",", ""))
        assert steps == pytest.approx(room / MIB, abs=2) and "grows by 1.0 MiB a step" in text, text
        assert "MiB would do just now, and for some" in text


def test_s17_s19_a_function_that_holds_much_has_advice_of_its_own(tmp_path):
    def ran(file, name):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        code = compile(f"def {name}(ask):\n    return ask()\n", str(path), "exec")
        names = {}
        exec(code, names)
        return names[name](what_helps)

    assert "preprocess_logits_for_metrics" in ran("transformers/trainer.py", "evaluation_loop")
    assert "writer_batch_size=50" in ran("datasets/arrow_dataset.py", "_map_single")
    assert ran("mine.py", "evaluation_loop") == "" == what_helps()
