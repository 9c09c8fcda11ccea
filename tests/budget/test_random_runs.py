# SPDX-License-Identifier: Apache-2.0
"""Thirty random runs, each in a cgroup of its limit: completed, or refused with a limit that does."""
import pytest

from tests.budget.random_runs import make_data, one
from tests.support.cgroup import MemoryCgroup

SEED = 1


def test_random_runs_complete_or_are_refused_with_a_limit_that_does(program, tmp_path):
    reason = MemoryCgroup.why_not()
    if reason:
        pytest.skip(reason)
    data_of = make_data(program, tmp_path)
    outcomes = [one(program, SEED, index, tmp_path, data_of) for index in range(30)]
    assert {line["outcome"] for line in outcomes} == {"finished", "refused"}
    assert all(len(line["limits"]) <= 2 for line in outcomes)  # The first limit named is enough.
