"""Calibration of models of which some layers have no cache to compress: the others keep the model's indices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calibrations import run
from model_matrix import FAMILIES, small_method, tiny_model
from tiers import slow_cases

from kvq_cli import attach
from kvq_cli.artifact import load_artifact
from kvq_cli.artifact.contents import check_contents
from kvq_cli.artifact.errors import error_table
from kvq_cli.artifact.stored import stored_tensors
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import LoadedModel, model_shape


def hybrid(tiny, family: str) -> LoadedModel:
    """The family's tiny model, with the words of the tiny tokenizer."""
    model = tiny_model(family, **FAMILIES[family], vocab_size=len(tiny.tokenizer))
    return LoadedModel(model, tiny.tokenizer, family, None, model_shape(model))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("qwen3_next", "klt"),
        *slow_cases(("qwen3_next", "temporalkv"), ("falcon_h1", "klt"), ("qwen3_next", "palu"), ("lfm2", "xquant")),
        *slow_cases(("qwen3_next", "mixed"), ("llama4_text", "temporalkv")),
    ],
)
def test_layers_with_attention_are_calibrated(tiny, quick, tmp_path, family, method):
    loaded = hybrid(tiny, family)
    layers = [0, 1, 2] if family == "falcon_h1" else [1]
    bits = 4.0 if method in ("klt", "mixed") else 4
    written = run(loaded, quick, tmp_path / "a", replace(small_method(method), bits=bits))
    artifact = load_artifact(tmp_path / "a")
    assert sorted({int(name.split(".")[1]) for name in artifact.tensors}) == layers
    assert len(written.config["errors"]["layers"]) == len(layers)
    assert written.config["model"]["fingerprint"].get("attention", [0, 1, 2]) == layers
    assert {row[0] for row in error_table(written.config)[1]} - {"mean"} == {*layers}
    artifact.check_config(loaded.model.config, family)
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    exact = loaded.model(ids).logits
    with attach(loaded.model, artifact, prefill="compressed") as kv:
        lossy = loaded.model(ids, past_key_values=kv.new_cache()).logits
    assert lossy.isfinite().all()
    assert not torch.allclose(lossy, exact, atol=1e-3)
    if layers == [1]:
        says = "unknown tensor 'layers.1.* for a model of 3 layers"
        check_with([0], artifact, says)
        check_with([1, 1], artifact, "attention must be indices of its layers")


def check_with(attention, artifact, says):
    model = artifact.config["model"]
    config = {**artifact.config, "model": {**model, "fingerprint": {**model["fingerprint"], "attention": attention}}}
    data = (artifact.path / "tensors.safetensors").read_bytes()
    with pytest.raises(KvqError, match=says):
        check_contents(config, stored_tensors(data), artifact.path / "config.json")


def test_gradients_through_chunked_attention_are_refused(tiny, quick, tmp_path):
    with pytest.raises(UsageError, match="layer 0 has chunked attention, .*: calibrate another method"):
        run(hybrid(tiny, "llama4_text"), quick, tmp_path / "a", build("klt", bits=4))
