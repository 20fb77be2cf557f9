"""Random changes of a saved cache, signed again: refused with KvqError, without effect, or other valid numbers."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mutations as change
import pytest
import torch
from mutations import Mutant
from random_artifacts import random_parts, tiny_model
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from kvq_cli import KvqError, attach, build
from kvq_cli.artifact import Artifact
from kvq_cli.cache.saved_cache import _checksum, _digest
from kvq_cli.methods.base import Method

METHODS = [
    build("kivi", group=8, residual=8, sinks=2),
    build("gear", group=8, residual=8, outliers=0.1, recent=3),
    build("zipcache", residual=6, sinks=2),
    build("squat", group=8, residual=8, block=4),
    build("innerq", group=16, sinks=2, recent=3, mode="hybrid_prefill"),
    build("kvquant", bits=2, sinks=2, outliers=0.05),
    build("temporalkv", bits=4, hybrid="head", outliers=0.05, sinks=2),
    build("xquant-cl", bits=4, group=8, base_layers=1),
    build("kvtc", bits=4, sinks=2, recent=8),
]
PADS, TOKENS, MORE = 9, 60, 3


def words_of_rows(mutant: Mutant) -> None:
    """Another number in the description of the rows."""
    rows = mutant.config["rows"][mutant.draw.choice(["pads", "offsets", "prompts"])]
    rows[mutant.draw.randrange(2)] = mutant.draw.choice([0, 1, 8, 10, 30, 60, 61, 2**31, 2**40, -1, 1.5, None])


def other_integers(mutant: Mutant) -> None:
    """Random bits in a tensor of integers: codes, indices of outliers, marks of salient tokens, ids."""
    name = mutant.draw.choice([n for n, t in sorted(mutant.tensors.items()) if not t.is_floating_point() and t.numel()])
    octets = mutant.tensors[name].flatten().view(torch.uint8).clone()
    for place in mutant.draw.choices(range(len(octets)), k=mutant.draw.choice([1, 5])):
        octets[place] = mutant.draw.randrange(256)
    mutant.tensors[name] = octets.view(mutant.tensors[name].dtype).view(mutant.tensors[name].shape)


def negated(mutant: Mutant) -> None:
    name = mutant.draw.choice([n for n, t in sorted(mutant.tensors.items()) if t.is_floating_point() and t.numel()])
    mutant.tensors[name] = -mutant.tensors[name]


def file_bytes(mutant: Mutant) -> None:
    """Headers that declare other sizes, and files that are cut."""
    draw, about = mutant.draw, {"kvq": json.dumps(mutant.config)}
    data = save(mutant.tensors, about)
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    entry = header[draw.choice(sorted(key for key in header if key != "__metadata__"))]
    entry[draw.choice(["shape", "data_offsets"])] = draw.choice([[2**62], [2**62, 4], [-1], [0, 2**60], [], [0.5]])
    text = json.dumps(header).encode()
    cut = data[: draw.randrange(len(data))]
    mutant.data = draw.choice([struct.pack("<Q", len(text)) + text + data[8 + length :], cut, data + b"0"])


MUTATIONS = [change.config_value, change.config_type, change.config_deleted, change.config_added, change.config_renamed]
MUTATIONS += [change.config_text, change.tensor_deleted, change.tensor_renamed, change.tensor_doubled, file_bytes]
MUTATIONS += [change.tensor_retyped, change.tensor_reshaped, change.tensor_not_finite, change.shapes_swapped]
#: These may give other valid numbers, tokens and positions: nothing in the file contradicts them.
IN_RANGE = [words_of_rows, other_integers, negated, change.values_swapped]


def in_range(mutation: Callable, config: dict, original: dict) -> bool:
    """Whether no check can tell the change from another text of as many tokens, or other positions."""
    changed = {key for key in config.keys() | original.keys() if config.get(key) != original.get(key)}
    return mutation in IN_RANGE or changed <= {"rows", "sha256", "checksum"}


def write_signed(path: Path, mutant: Mutant) -> None:
    """Write the mutant with the hashes of its own contents."""
    mutant.config["sha256"] = _digest((name, mutant.tensors[name]) for name in sorted(mutant.tensors))
    mutant.config["checksum"] = _checksum(mutant.config)
    if mutant.data is not None:
        path.unlink()  # tensors that were read may be views of the old file
        path.write_bytes(mutant.data)
    else:
        text = json.dumps(mutant.config) if mutant.text is None else mutant.text
        save_file({name: tensor.clone() for name, tensor in mutant.tensors.items()}, path, {"kvq": text})


class Batch:
    """A left-padded batch that is given to caches of a random model."""

    def __init__(self) -> None:
        self.model = tiny_model(hidden_size=64)
        self.ids = torch.arange(2 * (TOKENS + MORE)).view(2, -1) % 37
        self.mask = (torch.arange(TOKENS + MORE) >= torch.tensor([[PADS], [0]])).long()

    def feed(self, cache, start: int, stop: int) -> Tensor:
        """The logits of columns [start, stop)."""
        seen = self.mask[:, :stop]
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
        own = {"attention_mask": seen, "position_ids": positions, "past_key_values": cache}
        return self.model(self.ids[:, start:stop], **own).logits

    def continued(self, cache) -> Tensor:
        """The logits of a pass over several tokens, and of a decode step."""
        last = TOKENS + MORE
        return torch.cat([self.feed(cache, TOKENS, last - 1), self.feed(cache, last - 1, last)], dim=1)


@torch.no_grad()
def fuzz(method: Method, count: int, path: Path) -> tuple[Counter, list[str]]:
    """Outcomes of `count` mutants by (mutation, outcome), and what must not happen."""
    batch, outcomes, faults = Batch(), Counter(), []
    attached = method
    if method.calibrates:
        attached = Artifact(*random_parts(method, batch.model), Path("nowhere"))
    with attach(batch.model, attached) as kv:
        cache = kv.new_cache()
        batch.feed(cache, 0, TOKENS - 20)
        batch.feed(cache, TOKENS - 20, TOKENS)
        cache.save(path, batch.ids[:, :TOKENS])
        expected = batch.continued(cache)
        with safe_open(path, "pt") as file:
            original = json.loads(file.metadata()["kvq"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        for number in range(count):
            mutation = [*MUTATIONS, *IN_RANGE][number % len([*MUTATIONS, *IN_RANGE])]
            mutant = Mutant(copy.deepcopy(original), dict(tensors), random.Random(number))
            mutation(mutant)
            write_signed(path, mutant)
            try:
                same = torch.equal(batch.continued(kv.load_cache(path)), expected)
                valid = in_range(mutation, mutant.config, original)
                outcome = "without effect" if same else "in range" if valid else "SILENT"
            except KvqError as error:
                outcome = "refused" if "\n" not in str(error) else f"several lines: {error}"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            outcomes[mutation.__name__, outcome[:20]] += 1
            if outcome not in ("refused", "without effect", "in range"):
                faults.append(f"{mutation.__name__} {number} of {method.name}: {outcome}")
    return outcomes, faults


@pytest.mark.parametrize(
    ("method", "count"),
    # Uniform codes, codebooks, codes with the state of a prompt.
    [
        *(pytest.param(one, 36, id=f"36-{one.name}") for one in METHODS if one.name in ("kivi", "kvquant", "innerq")),
        *(pytest.param(one, 240, id=f"240-{one.name}", marks=pytest.mark.slow) for one in METHODS),
    ],
)
def test_no_change_of_a_saved_cache_raises_other_errors_or_is_silent(tmp_path, method, count):
    outcomes, faults = fuzz(method, count, tmp_path / "cache.safetensors")
    for (mutation, outcome), times in sorted(outcomes.items()):
        print(f"{mutation:25} {outcome:20} {times}")
    assert not faults
    refused = sum(times for (_, outcome), times in outcomes.items() if outcome == "refused")
    assert refused > count // 2  # so that the changes are not without effect throughout
