"""Tuning tables: which entry is used for a GPU and a shape class, and how measured ones are added."""

import json
from types import SimpleNamespace

import pytest
import torch
from kvq_kernels import tuning

TABLE = {
    "*": {"*": {"warps": 1}, "uniform": {"warps": 2}, "uniform/2bit": {"warps": 3}},
    "sm_90": {"uniform/2bit": {"warps": 4}, "dense": {"warps": 8}},
}


@pytest.fixture
def operation(tmp_path, monkeypatch):
    path = tmp_path / tuning.FILE
    path.write_text(json.dumps(TABLE))
    monkeypatch.setattr(tuning, "_path", lambda name: path)
    tuning._find.cache_clear()
    yield path
    tuning._find.cache_clear()


@pytest.mark.parametrize(
    ("key", "gpu", "warps"),
    [
        ("uniform/2bit", "sm_90", 4),
        ("uniform/2bit/rows8", "sm_90", 4),
        ("uniform/4bit", "sm_90", 2),
        ("uniform/2bit/rows8", "sm_80", 3),
        ("uniform/4bit", "gfx942", 2),
        ("dense", "sm_90", 8),
        ("dense", "sm_80", 1),
        ("codebook", "never seen", 1),
    ],
)
def test_special_classes_of_the_gpu_are_preferred(operation, key, gpu, warps):
    assert tuning.configuration("any", key, gpu) == {"warps": warps}


def test_family_of_a_device(operation):
    assert tuning.configuration("any", "uniform", torch.device("cpu")) == {"warps": 2}
    assert tuning.family(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("hip", "name", "expected"), [(None, "NVIDIA H200", "sm_90"), ("6.3.1", "gfx942:sramecc+:xnack-", "gfx942")]
)
def test_family_of_a_gpu(monkeypatch, hip, name, expected):
    """PyTorch for CUDA fills `gcnArchName` with the device's name."""
    properties = SimpleNamespace(name=name, gcnArchName=name, major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(tuning, "_properties", lambda index: properties)
    assert tuning.family(torch.device("cuda", 0)) == expected


def test_returned_values_are_copies(operation):
    tuning.configuration("any", "dense", "sm_90")["warps"] = 0
    assert tuning.configuration("any", "dense", "sm_90") == {"warps": 8}


def test_extending_keeps_other_classes(operation):
    assert tuning.configuration("any", "dense", "sm_90") == {"warps": 8}
    tuning.extend("any", "sm_90", {"dense": {"warps": 16, "stages": 2}})
    tuning.extend("any", "sm_120", {"uniform": {"warps": 5}})
    assert tuning.configuration("any", "dense", "sm_90") == {"warps": 16, "stages": 2}
    assert tuning.configuration("any", "uniform/2bit", "sm_90") == {"warps": 4}
    assert tuning.configuration("any", "uniform/8bit", "sm_120") == {"warps": 5}
    assert json.loads(operation.read_text())["*"] == TABLE["*"]
    assert '"dense": {"warps": 16, "stages": 2}' in operation.read_text()  # one line per class


def test_trying_replaces_values_and_records_classes(operation):
    with tuning.trying("any", {"warps": 7}) as trial:
        assert tuning.configuration("any", "uniform/2bit", "sm_90") == {"warps": 7}
        assert tuning.configuration("another", "uniform/2bit", "sm_90") == {"warps": 4}
        with tuning.trying("any", {"stages": 2}):
            assert tuning.configuration("any", "dense", "sm_90") == {"warps": 8, "stages": 2}
        assert tuning.configuration("any", "dense", "sm_80") == {"warps": 7}
    assert trial.looked_up == {"uniform/2bit": {"warps": 7}, "dense": {"warps": 7}}
    assert tuning.configuration("any", "uniform/2bit", "sm_90") == {"warps": 4}


def test_a_missing_class_names_the_table(operation):
    operation.write_text("{}")
    with pytest.raises(KeyError, match="tuning.json has no configuration 'dense' for sm_90"):
        tuning.configuration("any", "dense", "sm_90")
