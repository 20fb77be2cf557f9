"""The README's table of what each method needs and where it runs, against the code that decides it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import ROOT
from random_artifacts import random_parts, tiny_model

from kvq_cli import attach
from kvq_cli.artifact import Artifact
from kvq_cli.attention.backend import why_torch
from kvq_cli.errors import UsageError
from kvq_cli.methods.mixed import PARTS
from kvq_cli.methods.registry import build, method_names
from kvq_cli.vllm.checks import check_plans
from kvq_cli.vllm.served import served_options

HEADER = "| method | calibration | Triton kernels | timed on a GPU | `kvq serve` | `kvq tune` |"
#: What a cell that begins with "yes" or "with" leaves out or asks for, in --compare's form.
EXCEPTIONS = {
    "without `rotation`": {"rotation": "hadamard"},
    "`rotation` after RoPE alone": {"rotation": "hadamard", "pre_rope": True},
    "without `entries=65536`": {"entries": 65536},
}

#: Prefixes of benchmarks' stores that are not the method's name.
STORES = {"temporalkv": "temporal-", "channelkv": "channel-"}
#: Methods whose results are of an earlier format: klt's are of vector codes.
REPLACED = {"klt"}


def table() -> dict[str, list[str]]:
    """The cells of each method."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split(HEADER)[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for first, *cells in rows for name in re.findall(r"`([a-z0-9-]+)`", first)}


ROWS = table()


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=64, hidden_size=128, num_hidden_layers=5)  # more than XQuant-CL's base layers


def attached(model, method):
    """Layers and plans of the method, with random tensors where it calibrates."""
    attachable = method
    if method.calibrates:
        config, tensors = random_parts(method, model)
        attachable = Artifact({**config, "checksum": "random"}, tensors, Path("nowhere"))
    with attach(model, attachable, backend="torch") as kv:
        return kv.layers, kv.plans


def by_kernels(model, method) -> bool:
    return all(
        why_torch(layer, plan) is None and plan.cross_layer is None
        for layer, plan in zip(*attached(model, method), strict=True)
    )


def is_served(model, name: str, **options) -> bool:
    method = build(name, **options)
    try:
        check_plans(method, attached(model, method)[1])
    except UsageError:
        return False
    return True


def is_timed(name: str) -> bool:
    """Whether a result of a GPU has attention over the method's present format."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in ROOT.glob("benchmarks/*/kernels.json")]
    stores = {row.get("store", "") for result in results for row in result["rows"]}
    return name not in REPLACED and any(store.startswith(STORES.get(name, name)) for store in stores)


def test_every_method_has_a_row():
    assert {*ROWS, "mixed"} == set(method_names())


@pytest.mark.parametrize("name", ROWS)
def test_cells_say_what_the_code_does(model, name):
    calibration, kernels, timed, serve, tune = ROWS[name]
    method = build(name)
    assert calibration == ("yes" if method.calibrates else "no")
    assert kernels.startswith("yes") == by_kernels(model, method)
    for words, options in EXCEPTIONS.items():
        if words in kernels:
            assert not by_kernels(model, build(name, **options))
    assert timed == ("yes" if is_timed(name) else "no")
    assert (serve != "no") == is_served(model, name, **served_options(name, {}))
    assert (serve == "with `norm=off`") == bool(served_options(name, {}))
    assert tune == ("yes" if name in PARTS else "no")
