"""Fixture of finished targets of `kvq reproduce`."""

from __future__ import annotations

import pytest

from kvq_cli.files import write_json
from kvq_cli.models import REFERENCE
from kvq_cli.papers.run import DONE, RECORD, current_record, state


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """`finished(target, model, document)`: write the result of a target as if it had been run, below `tmp_path`, which
    is also the working folder; `changes` replaces values of its record, or removes those that are None."""
    monkeypatch.chdir(tmp_path)

    def write(entry, model=REFERENCE, document=None, **changes):
        write_json(entry.result(model, tmp_path), document or {})
        record = {**current_record(entry, model), **changes}
        record = {key: value for key, value in record.items() if value is not None}
        write_json(entry.folder(model, tmp_path) / RECORD, record)
        assert "results" in changes or state(entry, model, tmp_path) == DONE
        return tmp_path

    return write
