"""`kvq serve` without a method: the model's artifact of klt, else kivi."""

import json
import shlex

import pytest
from random_artifacts import random_parts, tiny_model

from kvq_cli.artifact import save_artifact
from kvq_cli.methods.registry import build_parsed, to_config


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=64, hidden_size=128)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def served(result):
    """What vLLM is told of the method."""
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout)
    return json.loads(words[words.index("--additional-config") + 1])["kvq"]


@pytest.fixture
def klt(folder, model, tmp_path):
    """The model's artifact of klt in the default folder, with other bits, windows or joined streams."""

    def save(text="klt", bits=2, of=model):
        config, tensors = random_parts(build_parsed(text, bits=bits), of)
        path = tmp_path / "artifacts" / folder.name / f"{text.replace(':', '-')}-{bits}bit"
        save_artifact(path, config, tensors, "card", overwrite=True)
        return path

    return save


def test_the_default_is_the_models_artifact_of_klt(kvq, folder, klt):
    """kivi without one, with one of other weights, other bits, or other options; never another method's artifact."""
    words = ("serve", "--model", str(folder), "--dry-run")
    klt("temporalkv")
    klt(of=tiny_model(seed=1, head_dim=64, hidden_size=128))
    other = kvq(*words)
    assert served(other) == {"method": to_config(build_parsed("kivi", bits=2))}
    folder_name = f"artifacts/{folder.name}"
    assert f"skipped artifact {folder_name}/klt-2bit: its weights are not those of" in other.stderr
    assert f"method: kivi, 2 bits (default: no 2-bit artifact of klt in {folder_name})" in other.stderr
    path = klt()
    mine = kvq(*words)
    assert served(mine)["artifact"] == str(path)
    assert f"method: klt, 2 bits, {folder_name}/klt-2bit (default: calibrated)" in mine.stderr
    for given in (("--bits", "4"), ("--set", "sinks=8")):
        assert served(kvq(*words, *given))["method"]["name"] == "kivi"


def test_a_default_that_cannot_be_served_is_named(kvq, folder, klt):
    klt("klt:join_values=on")
    words = ("serve", "--model", str(folder), "--dry-run")
    result = kvq(*words, "-tp", "2")
    assert result.exit_code == 2
    assert f"artifacts/{folder.name}/klt-join_values=on-2bit, the default of {folder}" in result.stderr
    assert "one transform of this artifact covers the values of all kv heads" in result.stderr
    assert served(kvq(*words, "-tp", "2", "--method", "kivi"))["method"]["name"] == "kivi"
    refused = kvq(*words, "--enable-sleep-mode")
    assert refused.exit_code == 2 and "artifacts/" not in refused.stderr
