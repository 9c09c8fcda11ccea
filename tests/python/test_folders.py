# SPDX-License-Identifier: Apache-2.0
"""What is written beside its name and then takes it: whole or not there, on the disk before anyone can read it."""
import os
import signal

import pytest

plimsoll = pytest.importorskip("plimsoll")

from plimsoll.core._folders import replaced


def write(path, text, folder):
    if folder:
        path.mkdir()
        path = path / "inner"
    path.write_text(text)


def read(path):
    return (path / "inner" if path.is_dir() else path).read_text()


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def folder(request):
    return request.param


def test_it_takes_the_place_of_what_was_there_and_an_error_leaves_that(tmp_path, folder):
    path = tmp_path / "name"
    for text in ("first", "second"):
        with replaced(path) as partial:
            write(partial, text, folder)
            assert not path.exists() or read(path) == "first"
        assert read(path) == text
    with pytest.raises(ZeroDivisionError), replaced(path) as partial:
        write(partial, "third", folder)
        raise ZeroDivisionError
    assert read(path) == "second" and os.listdir(tmp_path) == ["name"]


def test_what_a_kill_leaves_is_removed_by_the_next(tmp_path, folder):
    child = os.fork()
    if child == 0:
        with replaced(tmp_path / "name") as partial:
            write(partial, "half", folder)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and os.listdir(tmp_path) == ["name.partial"]
    with replaced(tmp_path / "name") as partial:
        write(partial, "whole", folder)
    assert read(tmp_path / "name") == "whole" and os.listdir(tmp_path) == ["name"]


def test_a_link_in_the_way_is_not_followed(tmp_path, folder):
    write(tmp_path / "victim", "mine", folder)
    (tmp_path / ".beside").symlink_to(tmp_path / "victim")
    with replaced(tmp_path / "name", ".beside") as partial:
        write(partial, "other", folder)
    assert (read(tmp_path / "victim"), read(tmp_path / "name")) == ("mine", "other")


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_has_it_before_its_name_and_then_the_name(tmp_path, folder, durable, monkeypatch):
    seen, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        seen.append(os.readlink(f"/proc/self/fd/{handle}").removeprefix(str(tmp_path)))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: seen.append("renamed") or replace(*names))
    with replaced(tmp_path / "name", durable=durable) as partial:
        write(partial, "text", folder)
    inner = ["/name.partial/inner"] if folder else []
    assert seen == (["/name.partial", *inner, "renamed", ""] if durable else ["renamed"])
