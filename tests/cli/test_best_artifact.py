"""The default of `kvq generate` and `kvq chat`: the artifact with the lowest error of those that fit."""

from types import SimpleNamespace

import pytest
from random_artifacts import random_parts, tiny_model

from kvq_cli.artifact import save_artifact
from kvq_cli.cli.best_artifact import best_artifact, calibration_error
from kvq_cli.cli.text_generator import has_weights_of
from kvq_cli.methods.registry import build

MODEL = tiny_model()


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Saves an artifact whose keys have this error in every layer, and whose values have none."""
    monkeypatch.chdir(tmp_path)

    def run(name, error, method="kvquant", bits=2, model=MODEL):
        config, tensors = random_parts(build(method, bits=bits), model)
        for layer in config["errors"]["layers"]:
            for kind, measured in (("k", error), ("v", 0.0)):
                layer[kind]["chosen"] = {**layer[kind]["chosen"], "fisher": measured}
        save_artifact(tmp_path / "artifacts" / "mine" / name, config, tensors, "card")
        return config

    return run


def best(bits=2, model=MODEL, only=None):
    loaded = SimpleNamespace(name="some/mine", model=model)
    artifact, passed_over = best_artifact("some/mine", bits, has_weights_of(loaded), only)
    return artifact and str(artifact.path), passed_over


def test_lowest_error_at_these_bits(save):
    assert best() == (None, [])
    assert calibration_error(save("a", 0.5)) == 0.25
    save("b", 0.3)
    save("c", 0.3)
    save("d", 0.1, bits=3)
    assert best() == ("artifacts/mine/b", [])
    assert best(3) == ("artifacts/mine/d", []) and best(4) == (None, [])


def test_klt_comes_first_whatever_its_error(save):
    model = tiny_model(head_dim=32)
    save("a", 0.1, model=model)
    save("klt", 0.9, method="klt", model=model)
    assert best(model=model) == best(model=model, only="klt") == ("artifacts/mine/klt", [])
    assert best(3, model=model) == best(model=model, only="palu") == (None, [])


def test_artifacts_that_do_not_fit_are_passed_over_with_a_line(save, tmp_path):
    save("fits", 0.9)
    save("other", 0.1, model=tiny_model(seed=1))
    save("damaged", 0.2)
    save("unreadable", 0.3)
    folder = tmp_path / "artifacts" / "mine"
    (folder / "damaged" / "tensors.safetensors").write_bytes(b"x")
    (folder / "unreadable" / "config.json").write_text("{}")
    (folder / ".half.partial").mkdir()
    found, passed_over = best()
    assert found == "artifacts/mine/fits" and len(passed_over) == 3
    unreadable, other, damaged = passed_over
    assert "unreadable/config.json is not the config of a kvq artifact" in unreadable
    assert other == "skipped artifact artifacts/mine/other: its weights are not those of 'some/mine'"
    assert damaged.startswith("skipped artifact: artifacts/mine/damaged/tensors.safetensors has 1 bytes")


def test_errors_on_another_text_are_named(save, tmp_path):
    save("here", 0.1)
    config, tensors = random_parts(build("kvquant", bits=2), MODEL)
    config["calibration"]["dataset"] = "pydoc"
    save_artifact(tmp_path / "artifacts" / "mine" / "there", config, tensors, "card")
    found, notes = best()
    chosen, other = ("here", "there") if found.endswith("here") else ("there", "here")
    assert notes == [
        f"chosen by its calibration error: {chosen}; {other} were calibrated on other text, where errors differ: "
        "choose with --artifact"
    ]


def test_factors_of_weights_have_no_error_to_compare():
    config, _ = random_parts(build("xquant"), MODEL)
    assert calibration_error(config) is None
