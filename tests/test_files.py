"""Atomic writes, and errors for unwritable paths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.figures import new_figure, save
from kvq_cli.files import check_writable, write_json, write_text


def test_unwritable_folders_are_refused_naming_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KvqError, match="choose another --out"):
            check_writable(taken)
    with pytest.raises(KvqError, match="choose another --store"):
        check_writable(tmp_path / "file", "--store")
    check_writable(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
    with pytest.raises(KvqError, match="choose another --out"):
        write_json(tmp_path / "file" / "results.json", {})
    with pytest.raises(KvqError, match="choose another --page"):
        write_text(tmp_path / "file" / "page.md", "", "--page")
    with pytest.raises(KvqError, match="choose another --plot"):
        save(new_figure(1, 1), tmp_path / "file" / "plot.png", "--plot")


def test_json_is_written_atomically(tmp_path):
    write_json(tmp_path / "a" / "results.json", {"x": 1})
    (tmp_path / "a" / "folder").mkdir()
    with pytest.raises(KvqError, match="cannot write"):
        write_json(tmp_path / "a" / "folder", {})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a" / "results.json", {("tuple", "key"): 1})
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == {"x": 1}
    assert sorted(os.listdir(tmp_path / "a")) == ["folder", "results.json"]


def test_processes_writing_the_same_file_use_separate_partial_files(tmp_path, monkeypatch):
    """The process that finishes first must not rename the other's partial file into place."""
    file, replace = tmp_path / "results.json", os.replace

    def other_first(partial, path):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_json(file, {"other": True})
        assert json.loads(file.read_text()) == {"other": True}
        replace(partial, path)

    monkeypatch.setattr(os, "replace", other_first)
    write_json(file, {"x": 1})
    assert json.loads(file.read_text()) == {"x": 1} and os.listdir(tmp_path) == ["results.json"]


def test_next_write_removes_partial_files_of_killed_processes(tmp_path):
    """Partial files of running processes and of other files are kept."""
    code = f"""if True:
        import os, pathlib, signal
        from kvq_cli.files import write_json
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_json(pathlib.Path({str(tmp_path)!r}) / "results.json", {{}})"""
    killed = subprocess.Popen([sys.executable, "-c", code])
    assert killed.wait() == -signal.SIGKILL
    partial = [f".results.json.{killed.pid}.partial"]
    assert os.listdir(tmp_path) == partial
    kept = [f".results.json.{os.getppid()}.partial", ".results.json.1.partial", f".other.json.{killed.pid}.partial"]
    for name in kept:
        (tmp_path / name).write_text("")
    write_json(tmp_path / "results.json", {"x": 1})
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "results.json"])
