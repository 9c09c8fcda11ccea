# SPDX-License-Identifier: Apache-2.0
"""The program's small commands as functions of Python: the same answers, the same errors."""
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import plimsoll
from plimsoll.cli import _program


def test_r39_store_tools_do_what_the_program_does(program, rows, tmp_path):
    table = tmp_path / "table"
    assert plimsoll.store.import_rows(rows[0], table, optimizer="adagrad") == 500
    plimsoll.store.verify(table)
    told = json.loads(subprocess.run([program, "store", "info", table, "--json"],
                                     capture_output=True, check=True).stdout)
    assert plimsoll.store.info(table) == told and told["optimizer"] == "adagrad"
    assert plimsoll.store.export(table, tmp_path / "back.npy") == 500
    assert np.array_equal(np.load(tmp_path / "back.npy"), rows[2])
    before, after = plimsoll.store.compact(table, rows_max=800)
    assert 0 < after and 0 < before and plimsoll.store.info(table)["rows_max"] == 800


def test_rows_without_ids_are_numbered_where_the_refusal_says_so(tmp_path):
    np.save(tmp_path / "bare.npy", np.ones((5, 3), np.float32))
    with pytest.raises(ValueError, match=r"have no ids: .*\(number_rows\)"):
        plimsoll.store.import_rows(tmp_path / "bare.npy", tmp_path / "table")
    assert plimsoll.store.import_rows(tmp_path / "bare.npy", tmp_path / "table", number_rows=True) == 5


def test_r39_store_tools_name_what_is_wrong(rows, tmp_path):
    table = tmp_path / "table"
    with pytest.raises(ValueError, match="optimizer must be one of .*adamw"):
        plimsoll.store.import_rows(rows[0], table, optimizer="best")
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16"):
        plimsoll.store.import_rows(rows[0], table, dtype="int8")
    plimsoll.store.import_rows([rows[0]], table)
    with pytest.raises(plimsoll.NotFoundError, match="no commit at step 9"):
        plimsoll.store.export(table, tmp_path / "x.npy", step=9)
    data = (table / "rows.dat").read_bytes()
    (table / "rows.dat").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(plimsoll.CorruptError, match="page 0"):
        plimsoll.store.verify(table)


def test_r39_what_is_asked_of_a_run_is_a_function(program, tmp_path):
    calls = {"status": plimsoll.status, "stop": plimsoll.stop, "pause": plimsoll.pause,
             "continue": plimsoll.continue_run}
    for function in calls.values():
        with pytest.raises(plimsoll.NotFoundError, match="no run there"):
            function(tmp_path)
    (tmp_path / "run.toml").write_text("[cosir]\nseed = 1\n")
    told = json.loads(subprocess.run([program, "status", tmp_path, "--json"], capture_output=True,
                                     check=True).stdout)
    assert plimsoll.status(tmp_path) == told and told["status"] == "interrupted"
    for function in (plimsoll.stop, plimsoll.pause, plimsoll.continue_run):
        assert function(tmp_path) is False
    assert plimsoll.limit(tmp_path, "2GiB") is False
    with pytest.raises(ValueError):
        plimsoll.limit(tmp_path, "much")


def test_r39_none_of_them_needs_torch(rows, tmp_path):
    code = ("import sys, plimsoll\n"
            f"plimsoll.store.import_rows({str(rows[0])!r}, {str(tmp_path / 'table')!r})\n"
            f"plimsoll.store.verify({str(tmp_path / 'table')!r})\n"
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_r49_a_path_that_is_not_utf8_is_refused_by_its_argument(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcnchen")
    with pytest.raises(ValueError, match="out: .* is not UTF-8"):
        _program._pairs({"data": tmp_path, "out": odd})


def test_an_option_may_be_a_number_of_numpy():
    given = {"epochs": np.int64(3), "lr": np.float32(0.5), "dims": [np.int32(4), 2], "use": True}
    assert _program._pairs(given) == [("epochs", "3"), ("lr", "0.5"), ("dims", "4,2"), ("use", "true")]
    for wrong in (None, 1j, [True]):
        with pytest.raises(ValueError, match="neither text nor a number"):
            _program._pairs({"epochs": wrong})


def test_r39_can_kd_is_planned(tmp_path):
    pytest.importorskip("torch")
    if importlib.util.find_spec("plimsoll._torch") is None:
        pytest.skip("plimsoll was built without torch")
    with pytest.raises((KeyError, ValueError), match="nowhere"):  # Its data is looked for, then.
        plimsoll.plan("can-kd", data=tmp_path / "nowhere", memory_limit="2GiB")
    with pytest.raises(ValueError, match="there is no recipe"):
        plimsoll.plan("chant", data=tmp_path)
