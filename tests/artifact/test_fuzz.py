"""Random changes of signed artifacts are refused with KvqError, have no effect, or stay within the valid range."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from mutations import (
    SCALARS,
    WORDS,
    Mutant,
    config_added,
    config_deleted,
    config_renamed,
    config_text,
    config_type,
    config_value,
    shapes_swapped,
    tensor_bytes,
    tensor_deleted,
    tensor_doubled,
    tensor_not_finite,
    tensor_renamed,
    tensor_reshaped,
    tensor_retyped,
    values_swapped,
)
from random_artifacts import random_parts, tiny_model
from torch import Tensor

from kvq_cli import attach
from kvq_cli.artifact import load_artifact, save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.artifact.format import CONFIG_FILE, TENSOR_FILE, _checksum
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import Method
from kvq_cli.methods.registry import build

METHODS = {
    "codebooks": [
        build("temporalkv", bits=4, hybrid="head", outliers=0.01, sinks=2),
        build("temporalkv", bits=4, normalize_values=True, sinks=2),
        build("kvquant", bits=2, sinks=2),
        build("channelkv", bits=4, sinks=2),
        build("channelkv", bits=4, sinks=2, rotation="opq"),
    ],
    "transforms": [
        build("klt", bits=6, sinks=2),
        build("klt", bits=6, sinks=2, join_keys=True),
    ],
    "mixed": [build("mixed", bits=9, keys="klt-4bit temporalkv-4bit", values="fp16 kvquant-2bit", sinks=2)],
    "factors": [build("xquant", bits=4, group=16), build("xquant-cl", bits=4, group=16, base_layers=1), build("palu")],
    "rotations": [build("oscar", sinks=2, recent=4)],
    "joined": [build("kvtc", bits=4, sinks=2, recent=4)],
}
TOKENS = 80  # above an outlier block of 32 and a group of 16, behind the sinks


def method_option(mutant: Mutant) -> None:
    options = mutant.config["method"]
    key = mutant.draw.choice(list(options))
    options[key] = mutant.draw.choice([*SCALARS, *WORDS, 32, 128])


def model_section(mutant: Mutant) -> None:
    place = mutant.draw.choice([mutant.config["model"], mutant.config["model"]["fingerprint"]])
    key = mutant.draw.choice(list(place))
    place[key] = mutant.draw.choice([*SCALARS, *WORDS, 32, 2**20])


def layer_moved(mutant: Mutant) -> None:
    """A layer has another index, or is doubled under it."""
    old, new = mutant.draw.choice(["0", "1"]), mutant.draw.choice(["2", "01", "-1", "1e0", "100000000000"])
    layer = [name for name in mutant.tensors if name.split(".")[1] == old]
    moved = {name.replace(f"layers.{old}.", f"layers.{new}.", 1): mutant.tensors[name].clone() for name in layer}
    if mutant.draw.random() < 0.5:
        for name in layer:
            del mutant.tensors[name]
    mutant.tensors |= moved


def statistic_out_of_range(mutant: Mutant) -> None:
    name = mutant.name("std", "lower", "upper", "choice", "widths", "deviation")
    kind, tensor = name.split(".")[3], mutant.tensors[name].clone()
    out_of_range = {"std": -0.5, "deviation": -0.5, "lower": 1e9, "upper": -1e9}
    out_of_range |= {"choice": mutant.draw.choice([-1, 2, 100]), "widths": mutant.draw.choice([0, 9, 100])}
    number = out_of_range.get(kind, float("nan") if tensor.is_floating_point() else -1)
    tensor.view(-1)[mutant.draw.randrange(tensor.numel())] = number
    mutant.tensors[name] = tensor


def choice_permuted(mutant: Mutant) -> None:
    name = mutant.name("choice")
    mutant.tensors[name] = mutant.tensors[name].flip(0).contiguous()


def other_values(mutant: Mutant) -> None:
    """Other numbers that calibration could have written."""
    name = mutant.name("centroids", "mean", "std", "down", "up")
    mutant.tensors[name] = mutant.tensors[name] * 1.5


MUTATIONS = [config_value, config_type, method_option, model_section, config_deleted, config_added, config_renamed]
MUTATIONS += [config_text, tensor_deleted, tensor_renamed, tensor_doubled, layer_moved, tensor_retyped, tensor_reshaped]
MUTATIONS += [tensor_not_finite, statistic_out_of_range, shapes_swapped, tensor_bytes]
#: These may stay within the range of valid values: nothing in the artifact contradicts them.
IN_RANGE = [other_values, values_swapped]
#: Options that have other valid values for the same tensors, besides those that can be changed at run time.
FREE_OPTIONS = {"outliers"}


def stays_in_range(mutation: Callable, config: dict[str, Any], original: dict[str, Any], method: Method) -> bool:
    """Whether no check can tell the change from an artifact of another model text, or used with other options."""
    if mutation in IN_RANGE:
        return True
    options = {name for name, field in method.__dataclass_fields__.items() if field.metadata.get("runtime")}
    keys = config.keys() | original.keys()
    changed = {key for key in keys if config.get(key) != original.get(key)} - {"checksum"}
    if changed != {"method"} or not isinstance(config.get("method"), dict):
        return False
    now, before = config["method"], original["method"]
    return {key for key in now.keys() | before.keys() if now.get(key) != before.get(key)} <= options | FREE_OPTIONS


def write_signed(folder: Path, mutant: Mutant, original: dict[str, Tensor]) -> None:
    """Write the mutant with the sizes and hashes of its own contents."""
    config = mutant.config
    names = original.keys() | mutant.tensors.keys()
    if mutant.data is not None or any(mutant.tensors.get(name) is not original.get(name) for name in names):
        data = mutant.data or safetensors.torch.save(mutant.tensors)
        (folder / TENSOR_FILE).write_bytes(data)
        config["files"] = {TENSOR_FILE: {"bytes": len(data), "sha256": sha256(data).hexdigest()}}
        if all(len(name.split(".")) > 3 for name in mutant.tensors):
            config["sizes"] = tensor_sizes(mutant.tensors)
    config["checksum"] = _checksum(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config) if mutant.text is None else mutant.text)


@torch.no_grad()
def decoded(folder: Path, model) -> Tensor:
    """The logits of a pass through a cache that the artifact compresses."""
    with attach(model, load_artifact(folder), prefill="compressed") as kv:
        ids = torch.arange(TOKENS).unsqueeze(0) % model.config.vocab_size
        return model(ids, past_key_values=kv.new_cache()).logits


def fuzz(kind: str, count: int, tmp_path: Path) -> tuple[Counter, list[str]]:
    """Outcomes of `count` mutants by (mutation, outcome), and what must not happen."""
    model, outcomes, faults = tiny_model(), Counter(), []
    made = []
    for index, method in enumerate(METHODS[kind]):
        artifact = save_artifact(tmp_path / str(index), *random_parts(method, model), "card")
        files = {name: (artifact.path / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}
        made.append((method, artifact, files, decoded(artifact.path, model)))
    mutations = [*MUTATIONS, *IN_RANGE, *([choice_permuted] if kind == "codebooks" else [])]
    for number in range(count):
        method, artifact, files, expected = made[number % len(made)]
        mutation = mutations[number // len(made) % len(mutations)]
        original = json.loads(files[CONFIG_FILE])
        mutant = Mutant(copy.deepcopy(original), dict(artifact.tensors), random.Random(number))
        (artifact.path / TENSOR_FILE).write_bytes(files[TENSOR_FILE])
        mutation(mutant)
        in_range = stays_in_range(mutation, mutant.config, original, method)
        write_signed(artifact.path, mutant, dict(artifact.tensors))
        try:
            same = torch.equal(decoded(artifact.path, model), expected)
            outcome = "without effect" if same else "in range" if in_range else "SILENT"
        except KvqError:
            outcome = "refused"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        outcomes[mutation.__name__, outcome[:20]] += 1
        if outcome not in ("refused", "without effect", "in range"):
            faults.append(f"{mutation.__name__} {number} of {method.name}: {outcome}")
    return outcomes, faults


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_change_of_an_artifact_raises_other_errors_or_changes_answers(tmp_path, kind, count):
    outcomes, faults = fuzz(kind, count, tmp_path)
    for (mutation, outcome), times in sorted(outcomes.items()):
        print(f"{kind:10} {mutation:25} {outcome:20} {times}")
    assert not faults
    refused = sum(times for (_, outcome), times in outcomes.items() if outcome == "refused")
    assert refused > count // 2  # so that the changes are not without effect throughout
