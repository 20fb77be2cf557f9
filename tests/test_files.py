"""Files are whole or not there at all."""

from __future__ import annotations

import json
import os

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.files import check_writable, write_json


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KvqError, match="choose another --out"):
            check_writable(taken)
    check_writable(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
    with pytest.raises(KvqError, match="choose another --out"):
        write_json(tmp_path / "file" / "results.json", {})


def test_json_is_whole_or_not_there(tmp_path):
    write_json(tmp_path / "a" / "results.json", {"x": 1})
    (tmp_path / "a" / "folder").mkdir()
    with pytest.raises(KvqError, match="cannot write"):
        write_json(tmp_path / "a" / "folder", {})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a" / "results.json", {("tuple", "key"): 1})
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == {"x": 1}
    assert sorted(os.listdir(tmp_path / "a")) == ["folder", "results.json"]
