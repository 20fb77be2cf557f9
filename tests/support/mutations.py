"""Random changes of a signed file of metadata and tensors, before it is signed again."""

from __future__ import annotations

import copy
import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

#: Words and scalars of an artifact, so that changes come close to valid contents.
WORDS = ["layers", "k", "v", "x", "0", "1", "2", "00", "-1", "centroids", "temporal", "channel", "scalar", "choice"]
WORDS += ["widths", "analysis", "synthesis", "join_keys", "klt", "1.5"]
WORDS += ["mean", "std", "lower", "upper", "down", "up", "bits", "sinks", "share", "hybrid", "head", "layer", "off"]
WORDS += ["thesis", "all", "kvquant", "xquant", "xquant-cl", "palu", "token", "float32", "float16", "llama"]
SCALARS = [None, True, False, 0, 1, 2, 3, 4, 8, 16, 64, -1, 2**31, 2**63, 10**30, 0.0, 0.5, 1.0, -0.5, 1e300]
SCALARS += [float("nan"), float("inf"), "", "2", "none", [], {}, [[]], [1, 2], {"a": 1}]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool)


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
    name = mutant.draw.choice([n for n, t in sorted(mutant.tensors.items()) if t.is_floating_point() and t.numel()])
    tensor = mutant.tensors[name].clone()
    number = mutant.draw.choice([float("nan"), float("inf"), -float("inf")])
    tensor.view(-1)[mutant.draw.randrange(tensor.numel())] = number
    mutant.tensors[name] = tensor


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


def values_swapped(mutant: Mutant) -> None:
    """Two tensors of one shape and dtype change their names: most have the same range."""
    one = mutant.name()
    form = (mutant.tensors[one].shape, mutant.tensors[one].dtype)
    other = mutant.draw.choice([n for n, t in sorted(mutant.tensors.items()) if (t.shape, t.dtype) == form])
    mutant.tensors[one], mutant.tensors[other] = mutant.tensors[other], mutant.tensors[one]
