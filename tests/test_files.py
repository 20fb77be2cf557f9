"""Atomic writes, files that are not read whole, and errors for unwritable paths."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvq_cli.cache.saved_cache import SavedCache
from kvq_cli.cli.line_history import LineHistory
from kvq_cli.data.local import read_rows
from kvq_cli.data.local import read_text as local_text
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.ruler.questions import read_questions
from kvq_cli.evaluation.runs import read_methods
from kvq_cli.evaluation.sample_log import read_records
from kvq_cli.figures import new_figure, save
from kvq_cli.files import check_writable, read_bytes, read_text, replacing, write_json, write_text
from kvq_cli.report.sources import read_json


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
    """Partial files of running processes, of other files and of other machines are kept."""
    code = f"""if True:
        import os, pathlib, signal
        from kvq_cli.files import write_json
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_json(pathlib.Path({str(tmp_path)!r}) / "results.json", {{}})"""
    killed = subprocess.Popen([sys.executable, "-c", code])
    assert killed.wait() == -signal.SIGKILL
    (partial,) = os.listdir(tmp_path)
    host, process = partial.removeprefix(".results.json.").removesuffix(".partial").split(".")
    assert host and process == str(killed.pid)
    kept = [f".results.json.{host}.{number}.partial" for number in (os.getppid(), 1)]
    kept += [f".other.json.{host}.{killed.pid}.partial"]
    kept += [f".results.json.{other}.{killed.pid}.partial" for other in (f"{host}-2", f"{host}.2")]
    for name in kept:
        (tmp_path / name).write_text("")
    write_json(tmp_path / "results.json", {"x": 1})
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "results.json"])


def test_an_interrupt_leaves_no_partial_file(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.json") as partial:
        partial.write_text("{")
        raise KeyboardInterrupt
    figure = new_figure(1, 1)

    def interrupted(path, **options):
        Path(path).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(figure, tmp_path / "a.png")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_extension_sets_the_format_of_a_figure(tmp_path, name, start):
    save(new_figure(1, 1), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start) and os.listdir(tmp_path) == [name]


def test_names_that_are_not_utf8_are_written(tmp_path):
    document = {"command": "a\udce9", "model": "a\u00e9"}  # as Python reads the byte E9 on the command line
    write_json(tmp_path / "a.json", document)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == document


def test_infinity_and_nan_are_written_as_null(tmp_path):
    write_json(tmp_path / "a.json", {"rows": [{"us": math.inf}, (math.nan, 1.5)]})

    def refuse(text):
        raise AssertionError(text)

    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"rows": [{"us": None}, [None, 1.5]]}


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_is_no_name_of_a_file(folder):
    with pytest.raises(UsageError, match="is a folder; give the name of a file as --page"):
        write_text(Path(folder), "", "--page")


@pytest.mark.parametrize("read", [read_bytes, read_text])
def test_files_are_read_whole_only_where_they_end_and_are_not_too_large(tmp_path, read):
    path = tmp_path / "file"
    path.write_bytes(b"one\r\ntwo")
    assert read(path, 8) in (b"one\r\ntwo", "one\ntwo")
    with pytest.raises(OSError, match=r"has 8 bytes, above the limit of 7"):
        read(path, 7)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="Not a regular file"):
            read(endless, 8)
    with pytest.raises(IsADirectoryError):
        read(tmp_path, 8)


@pytest.fixture(params=["pipe", "/dev/zero", "large"])
def unreadable(request, tmp_path) -> tuple[Path, str]:
    """A file that must not be read whole, with what is wrong with it. The large one takes no space."""
    path = tmp_path / request.param
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "large":
        path.touch()
        os.truncate(path, 1 << 40)
    return path, "bytes, above the limit of" if request.param == "large" else "Not a regular file"


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--file", "FILE"],
        ["generate", "word", "--config", "FILE"],
        ["eval", "--config", "FILE"],
    ],
    ids=" ".join,
)
def test_commands_refuse_files_that_they_would_read_for_ever(kvq, unreadable, words):
    path, why = unreadable
    result = kvq(*[str(path) if word == "FILE" else word for word in words])
    assert result.exit_code in (1, 2) and str(path) in result.stderr and why in result.stderr


def test_readers_refuse_files_that_they_would_read_for_ever(unreadable):
    path, why = unreadable
    readers = [read_rows, local_text, read_json, read_methods, read_questions]
    for reader in [*readers, *([] if why.startswith("bytes") else [SavedCache])]:
        with pytest.raises(KvqError, match=why):
            reader(path)
    with pytest.raises(OSError, match=why):
        read_records(path)
    assert LineHistory(path).load_history_strings() == []
