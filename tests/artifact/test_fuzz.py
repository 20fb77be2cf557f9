"""Random changes of signed artifacts are refused with KvqError, have no effect, or stay within the valid range."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
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
    ],
    "factors": [build("xquant", bits=4, group=16), build("xquant-cl", bits=4, group=16, base_layers=1)],
}
#: Words and scalars of an artifact, so that changes come close to valid contents.
WORDS = ["layers", "k", "v", "x", "0", "1", "2", "00", "-1", "centroids", "temporal", "channel", "scalar", "choice"]
WORDS += ["mean", "std", "lower", "upper", "down", "up", "bits", "sinks", "share", "hybrid", "head", "layer", "off"]
WORDS += ["thesis", "all", "kvquant", "xquant", "xquant-cl", "token", "float32", "float16", "llama"]
SCALARS = [None, True, False, 0, 1, 2, 3, 4, 8, 16, 64, -1, 2**31, 2**63, 10**30, 0.0, 0.5, 1.0, -0.5, 1e300]
SCALARS += [float("nan"), float("inf"), "", "2", "none", [], {}, [[]], [1, 2], {"a": 1}]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool)
TOKENS = 80  # above an outlier block of 32 and a group of 16, behind the sinks


@dataclass
class Mutant:
    """A changed artifact, before it is signed. text, data: contents of the files, instead of config and tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    draw: random.Random
    text: str | None = None
    data: bytes | None = None

    def entry(self) -> tuple[Any, Any]:
        """A container somewhere in the config, and one of its keys."""
        place: Any = self.config
        while True:
            key = self.draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or self.draw.random() < 0.1:
                return place, key
            place = place[key]

    def name(self, *kinds: str) -> str:
        """A tensor, of one of these kinds ("mean", ...) if there is any."""
        names = sorted(name for name in self.tensors if not kinds or name.split(".")[3] in kinds)
        return self.draw.choice(names or sorted(self.tensors))


def config_value(mutant: Mutant) -> None:
    place, key = mutant.entry()
    value, draw = place[key], mutant.draw
    if isinstance(value, bool):
        place[key] = not value
    elif isinstance(value, int):
        place[key] = draw.choice([value + 1, value - 1, 2 * value, -value, value + 2**40, draw.randrange(64)])
    elif isinstance(value, float):
        place[key] = draw.choice([value / 2, 3 * value, -value, value + 1e-3, 1e30, draw.random()])
    elif isinstance(value, str):
        place[key] = draw.choice([*WORDS, value + "x", value[:-1], value.upper()])
    else:
        place[key] = draw.choice(SCALARS)


def config_type(mutant: Mutant) -> None:
    place, key = mutant.entry()
    place[key] = mutant.draw.choice([other for other in SCALARS if type(other) is not type(place[key])])


def method_option(mutant: Mutant) -> None:
    options = mutant.config["method"]
    key = mutant.draw.choice(list(options))
    options[key] = mutant.draw.choice([*SCALARS, *WORDS, 32, 128])


def model_section(mutant: Mutant) -> None:
    place = mutant.draw.choice([mutant.config["model"], mutant.config["model"]["fingerprint"]])
    key = mutant.draw.choice(list(place))
    place[key] = mutant.draw.choice([*SCALARS, *WORDS, 32, 2**20])


def config_deleted(mutant: Mutant) -> None:
    place, key = mutant.entry()
    del place[key]


def config_added(mutant: Mutant) -> None:
    place, key = mutant.entry()
    value = copy.deepcopy(mutant.draw.choice([*SCALARS, place[key]]))
    if isinstance(place, dict):
        place[mutant.draw.choice(WORDS)] = value
    else:
        place.insert(key, value)


def config_renamed(mutant: Mutant) -> None:
    place, key = mutant.entry()
    if isinstance(place, dict):
        place[mutant.draw.choice([*WORDS, *place, key + "x"])] = place.pop(key)
    else:
        mutant.draw.shuffle(place)


def config_text(mutant: Mutant) -> None:
    text, draw = json.dumps(mutant.config), mutant.draw
    depth, cut = draw.choice([10, 900, 50_000]), draw.randrange(len(text))
    nested = "[" * depth + "]" * depth
    mutant.text = draw.choice(
        [nested, text.replace('"bits"', '"bits": 1, "bits"', 1), text[:cut], text[:cut] + nested + text[cut:]]
    )


def tensor_deleted(mutant: Mutant) -> None:
    del mutant.tensors[mutant.name()]


def tensor_renamed(mutant: Mutant) -> None:
    name = mutant.name()
    mutant.tensors[other_name(mutant, name)] = mutant.tensors.pop(name)


def tensor_doubled(mutant: Mutant) -> None:
    name = mutant.name()
    mutant.tensors[other_name(mutant, name)] = mutant.tensors[name].clone()


def other_name(mutant: Mutant, name: str) -> str:
    """A name that no tensor has, with another part in one place."""
    parts = name.split(".")
    parts[mutant.draw.randrange(len(parts))] = mutant.draw.choice(WORDS)
    return ".".join(parts) if ".".join(parts) not in mutant.tensors else f"{name}.x"


def layer_moved(mutant: Mutant) -> None:
    """A layer has another index, or is doubled under it."""
    old, new = mutant.draw.choice(["0", "1"]), mutant.draw.choice(["2", "01", "-1", "1e0", "100000000000"])
    layer = [name for name in mutant.tensors if name.split(".")[1] == old]
    moved = {name.replace(f"layers.{old}.", f"layers.{new}.", 1): mutant.tensors[name].clone() for name in layer}
    if mutant.draw.random() < 0.5:
        for name in layer:
            del mutant.tensors[name]
    mutant.tensors |= moved


def tensor_retyped(mutant: Mutant) -> None:
    name = mutant.name()
    tensor = mutant.tensors[name]
    mutant.tensors[name] = tensor.to(mutant.draw.choice([dtype for dtype in DTYPES if dtype != tensor.dtype]))


def tensor_reshaped(mutant: Mutant) -> None:
    name = mutant.name()
    x = mutant.tensors[name]
    forms = [x.flatten(), x.unsqueeze(0), x[:1], x[:0], torch.cat([x, x]), x.transpose(0, -1), x[..., :1]]
    others = [form for form in forms if form.shape != x.shape]
    mutant.tensors[name] = mutant.draw.choice(others).contiguous().clone()


def tensor_not_finite(mutant: Mutant) -> None:
    name = mutant.draw.choice([n for n in sorted(mutant.tensors) if mutant.tensors[n].is_floating_point()])
    tensor = mutant.tensors[name].clone()
    number = mutant.draw.choice([float("nan"), float("inf"), -float("inf")])
    tensor.view(-1)[mutant.draw.randrange(tensor.numel())] = number
    mutant.tensors[name] = tensor


def statistic_out_of_range(mutant: Mutant) -> None:
    name = mutant.name("std", "lower", "upper", "choice")
    kind, tensor = name.split(".")[3], mutant.tensors[name].clone()
    number = {"std": -0.5, "lower": 1e9, "upper": -1e9, "choice": mutant.draw.choice([-1, 2, 100])}.get(kind)
    tensor.view(-1)[mutant.draw.randrange(tensor.numel())] = float("nan") if number is None else number
    mutant.tensors[name] = tensor


def choice_permuted(mutant: Mutant) -> None:
    name = mutant.name("choice")
    mutant.tensors[name] = mutant.tensors[name].flip(0).contiguous()


def shapes_swapped(mutant: Mutant) -> None:
    """Two tensors of different shapes or dtypes change their names."""
    one = mutant.name()
    form = lambda name: (mutant.tensors[name].shape, mutant.tensors[name].dtype)  # noqa: E731
    if others := [name for name in sorted(mutant.tensors) if form(name) != form(one)]:
        other = mutant.draw.choice(others)
        mutant.tensors[one], mutant.tensors[other] = mutant.tensors[other], mutant.tensors[one]
    else:
        del mutant.tensors[one]


def tensor_bytes(mutant: Mutant) -> None:
    """Headers that declare huge or impossible sizes; bytes that are cut or are none of a header."""
    draw, data = mutant.draw, safetensors.torch.save(mutant.tensors)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    entry = header[draw.choice(sorted(key for key in header if key != "__metadata__"))]
    entry[draw.choice(["shape", "data_offsets"])] = draw.choice(
        [[2**62], [2**62, 4], [2**63, 0], [-1], [0, 2**60], [], [0.5]]
    )
    entry["dtype"] = draw.choice([entry["dtype"], "F4", "C64", "BOOL", "X", 1])
    text = json.dumps(header).encode()
    mutant.data = draw.choice(
        [
            struct.pack("<Q", len(text)) + text + data[8 + length :],
            struct.pack("<Q", 2**62) + data[8:],
            data[: draw.randrange(len(data))],
            draw.randbytes(64),
        ]
    )


def other_values(mutant: Mutant) -> None:
    """Other numbers that calibration could have written."""
    name = mutant.name("centroids", "mean", "std", "down", "up")
    mutant.tensors[name] = mutant.tensors[name] * 1.5


def values_swapped(mutant: Mutant) -> None:
    """Two tensors of one shape and dtype change their names: most have the same range."""
    one = mutant.name()
    form = (mutant.tensors[one].shape, mutant.tensors[one].dtype)
    other = mutant.draw.choice([n for n, t in sorted(mutant.tensors.items()) if (t.shape, t.dtype) == form])
    mutant.tensors[one], mutant.tensors[other] = mutant.tensors[other], mutant.tensors[one]


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
