"""Factors of weights that are not those of the model, though the artifact says so, are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model

from kvq_cli import attach, build, load_artifact
from kvq_cli.artifact import Artifact
from kvq_cli.errors import KvqError

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "reference"


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=3)


def artifact(model, name: str, **options) -> Artifact:
    return Artifact(*random_parts(build(name, bits=4, group=8, **options), model), Path("mine"))


def attached(model, given: Artifact, change) -> None:
    tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
    change(tensors)
    with attach(model, replace(given, tensors=tensors)):
        pass


def swapped(*names: str):
    def change(tensors):
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    return change


def scaled(**factors: float):
    def change(tensors):
        for name, factor in factors.items():
            tensors[f"layers.2.{name.replace('_', '.')}"] *= factor

    return change


def rows_exchanged(tensors):
    tensors["layers.1.v.up"] = tensors["layers.1.v.up"].roll(1, dims=0)


PRODUCT = "is not the model's W_{} of that layer"


@pytest.mark.parametrize(
    "change, says",
    [
        (scaled(k_up=1.05), "layers.2.k.down times layers.2.k.up " + PRODUCT.format("k")),
        (scaled(v_up=-1.0), "layers.2.v.down times layers.2.v.up " + PRODUCT.format("v")),
        (scaled(k_up=float("nan")), "layers.2.k.up"),
        (scaled(k_down=2.0, k_up=0.5), "layers.2.k.down is not orthonormal"),
        (rows_exchanged, "layers.1.v.down times layers.1.v.up " + PRODUCT.format("v")),
        (swapped("layers.0.k.down", "layers.1.k.down"), "layers.0.k.down times layers.0.k.up"),
        (swapped("layers.1.v.up", "layers.2.v.up"), "layers.1.v.down times layers.1.v.up"),
        (swapped("layers.1.k.up", "layers.1.v.up"), "layers.1.k.down times layers.1.k.up"),
    ],
)
def test_factors_of_other_weights_are_refused(model, change, says):
    with pytest.raises(KvqError, match=f"artifact mine: .*{says}.*calibrate again"):
        attached(model, artifact(model, "xquant"), change)


@pytest.mark.parametrize(
    "change, says",
    [
        (scaled(x_down=1.05), "layers.2.x.down is not orthonormal"),
        (scaled(k_up=1.05), "layers.2.x.down times layers.2.k.up"),
        (swapped("layers.1.v.up", "layers.2.v.up"), "layers.1.x.down times layers.1.v.up"),
    ],
)
def test_factors_of_both_weights_together_are_checked(model, change, says):
    with pytest.raises(KvqError, match=says):
        attached(model, artifact(model, "xquant-cl", base_layers=1), change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("used", [torch.bfloat16, torch.float32])
def test_factors_in_any_dtype_are_accepted(dtype, used):
    model = tiny_model(num_hidden_layers=3).to(torch.bfloat16)
    for name, options in (("xquant", {}), ("xquant-cl", {"base_layers": 2})):
        attached(model.to(used), artifact(model.to(dtype), name, **options), lambda _: None)


@pytest.mark.parametrize("name", ["xquant", "xquant-cl"])
def test_residuals_are_not_taken_from_a_config_that_allows_all(model, name):
    given = artifact(model, name, **({"base_layers": 1} if name == "xquant-cl" else {}))
    for layer in given.config["errors"]["layers"]:
        for entry in layer.values():
            entry["residual"] = 1e9
    with pytest.raises(KvqError, match="times"):
        attached(model, given, scaled(k_up=1.2))


def test_shipped_artifacts_have_the_factors_of_the_built_in_model():
    from kvq_cli.models import load_model

    model = load_model("reference", "cpu").model
    for name in ("xquant", "xquant-cl"):
        attached(model, load_artifact(ARTIFACTS / name), lambda _: None)
