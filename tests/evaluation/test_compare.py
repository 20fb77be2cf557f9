"""`--compare` with artifacts: which of them stands for which name."""

import pytest
import torch

from kvq_cli.artifact import save_artifact
from kvq_cli.cli.resolve import resolve_compared
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.compare import subjects
from kvq_cli.methods.registry import build, to_config


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    """Makes an artifact of temporalkv in a folder; it says what it is and holds no centroids."""
    monkeypatch.chdir(tmp_path)

    def make(folder, bits, **options):
        config = {"method": to_config(build("temporalkv", bits=bits, **options)), "model": {"name": "reference"}}
        save_artifact(folder, config, {"x": torch.zeros(1)}, "card")
        return tmp_path / folder

    return make


def _labels(*arguments, **options):
    return [one.label for one in subjects(resolve_compared("reference", *arguments, **options))]


def test_artifacts_below_the_current_folder_are_found(artifact):
    with pytest.raises(KvqError, match="run `kvq calibrate --method temporalkv --bits 2`"):
        _labels(["fp16", "temporalkv"], 2)
    artifact("artifacts/reference/temporalkv-2bit", 2)
    artifact("artifacts/reference/temporalkv-4bit", 4)
    assert _labels(["fp16", "temporalkv", "temporalkv-4bit"], 2) == ["fp16", "temporalkv-2bit", "temporalkv-4bit"]


def test_a_given_artifact_stands_for_its_method(artifact):
    mine = artifact("mine", 2, sinks=4)
    chosen = resolve_compared("reference", ["temporalkv", "fp16"], 2, [mine])
    assert chosen[0].path == mine and len(chosen) == 2
    assert _labels(["fp16"], None, [mine]) == ["fp16", "temporalkv-2bit"]
    assert _labels(["fp16", str(mine)]) == ["fp16", "temporalkv-2bit"]


def test_artifacts_of_one_method_are_told_apart_by_their_folders(artifact):
    both = [artifact("with-sinks", 2), artifact("without", 2, sinks=0)]
    assert _labels([], None, both) == ["with-sinks", "without"]
    with pytest.raises(UsageError, match="twice"):
        _labels([], None, [both[0], both[0]])


def test_an_artifact_changes_the_identity(artifact):
    one, other = (subjects(resolve_compared("reference", [], None, [artifact(f"a{bits}", bits)]))[0] for bits in (2, 4))
    assert one.identity["artifact"] != other.identity["artifact"]
    assert one.identity["method"]["bits"] == 2
