"""Weights without a backward pass: calibration refuses what it would weight with gradients, and names the module."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from calibrations import run
from torch import nn

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration import captures, samples
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build

REFUSED = r"model\.layers\.{}\.self_attn\.k_proj: its output has no gradients"


class Detached(nn.Module):
    """A linear layer whose kernel gives no gradients, as those of some quantized weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach()


class ForwardOnly(torch.autograd.Function):
    """Has no backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Unfinished(Detached):
    """A linear layer whose kernel raises in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ForwardOnly.apply(self.linear(x))


def without_gradients(tiny, wrap, layers, names=("o_proj",), head=False):
    model = copy.deepcopy(tiny.model)
    for layer in layers:
        attention = model.model.layers[layer].self_attn
        for name in names:
            setattr(attention, name, wrap(getattr(attention, name)))
    if head:
        model.lm_head = wrap(model.lm_head)
    return replace(tiny, model=model)


@pytest.mark.parametrize("wrap", [Detached, Unfinished])
@pytest.mark.parametrize(("layers", "head", "first"), [([0, 1], False, 0), ([1], False, None), ([], True, 0)])
def test_calibration_names_the_first_module_without_gradients(tiny, quick, tmp_path, wrap, layers, head, first):
    first = first if first is not None else (0 if wrap is Unfinished else 1)  # what raises ends the whole pass
    loaded = without_gradients(tiny, wrap, layers, head=head)
    with pytest.raises(KvqError, match=REFUSED.format(first)):
        run(loaded, quick, tmp_path / "a", build("temporalkv"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("klt", {"bits": 6.0, "fisher": False}),
        ("klt", {"bits": 6.0, "metric": "none"}),
        ("mixed", {"keys": "kivi:group=8", "values": "temporalkv"}),
    ],
)
def test_each_weight_counts(tiny, quick, tmp_path, method, options):
    with pytest.raises(KvqError, match=REFUSED.format(0)):
        run(without_gradients(tiny, Detached, [0, 1]), quick, tmp_path / "a", build(method, **options))


def test_windows_in_which_nothing_is_read_packed_are_the_reason_that_is_given(tiny, quick, tmp_path, monkeypatch):
    klt = build("klt", bits=6.0, fisher=False, sinks=2, recent=8, buffer=16)
    with pytest.raises(UsageError, match=r"--seqlen 19: .* none reads a packed token: raise it to 20 or more"):
        run(tiny, replace(quick, seqlen=19), tmp_path / "a", klt)
    read, silent = WorkFolder.read_samples, set()

    def without(self, name, size, sample=0):  # no prediction attends to distant tokens of layer 1, as of local heads
        return torch.zeros(size) if name in silent else read(self, name, size, sample)

    monkeypatch.setattr(WorkFolder, "read_samples", without)
    silent |= {"1.k.g", "1.v.g"}
    says = r"layers\.1\..*no gradients, since no prediction in 4 windows of 100 tokens attends to what is 16 or more"
    with pytest.raises(KvqError, match=says):
        run(tiny, quick, tmp_path / "a", klt)


@pytest.mark.parametrize(
    ("method", "options"), [("temporalkv", {}), ("kvquant", {}), ("klt", {"bits": 6.0, "metric": "none"})]
)
def test_without_weights_all_numbers_count_the_same(tiny, quick, tmp_path, method, options):
    """The artifact is that of a model with gradients, but for the errors weighted with them."""
    built = build(method, fisher=False, **options | ({"hybrid": "off"} if method == "temporalkv" else {}))
    artifact = run(without_gradients(tiny, Detached, [0, 1]), quick, tmp_path / "a", built)
    errors = [layer[kind]["chosen"] for layer in artifact.config["errors"]["layers"] for kind in "kv"]
    assert all(0 < each["fisher"] == each["plain"] for each in errors)
    if method != "klt":  # its codes are allocated by the gradients' size
        expected = run(tiny, quick, tmp_path / "b", built)
        assert all(torch.equal(artifact.tensors[name], each) for name, each in expected.tensors.items())


def test_gradients_are_checked_without_running_the_model_that_other_threads_capture(tiny, quick, tmp_path, monkeypatch):
    """A probe of the model during a capture would record what other threads compute."""
    probed, begun, capture = [], [], samples.SampleCapture.run

    def probe(model):
        probed.append(list(begun))
        return attention_layers(model)

    def counted(self, loaded, layers, sample, *rest, **options):
        begun.append(sample)
        return capture(self, loaded, layers, sample, *rest, **options)

    monkeypatch.setattr(captures, "attention_layers", probe)
    monkeypatch.setattr(samples.SampleCapture, "run", counted)
    run(tiny, quick, tmp_path / "a")
    assert probed == [[]] and sorted(begun) == list(range(quick.samples))
