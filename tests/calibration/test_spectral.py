"""OSCAR's rotations against the formulas of its public code, from queries and keys that transformers rotates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sylvester import sylvester
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.calibration import pipeline, spectral
from kvq_cli.calibration.estimate import dry_run_report
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build

TEXT = {"samples": 3, "seqlen": 200}
DIM, KV_HEADS = 8, 2


def calibrated(tiny, folder, **more):
    plan = plan_calibration(tiny, build("oscar"), CalibrationOptions(**TEXT))
    return pipeline.calibrate(plan, folder, **more)


def windows(tiny) -> torch.Tensor:
    return token_windows(tiny.tokenizer, load_text("prose", "calibration"), TEXT["seqlen"], TEXT["samples"], 0)


def activations(tiny) -> list[dict[str, np.ndarray]]:
    """Queries and keys after RoPE, and values, `[tokens, heads, DIM]` float64 of all windows, by layer."""
    found: dict[tuple[int, str], list[torch.Tensor]] = {}
    layers = [layer.self_attn for layer in tiny.model.model.layers]
    hooks = [
        getattr(attention, f"{name}_proj").register_forward_hook(
            lambda _module, _args, out, key=(i, name): found.setdefault(key, []).append(out[0].unflatten(1, (-1, DIM)))
        )
        for i, attention in enumerate(layers)
        for name in "qkv"
    ]
    with torch.no_grad():
        for window in windows(tiny):
            tiny.model(window[None])
        cos, sin = tiny.model.model.rotary_emb(torch.zeros(1), torch.arange(TEXT["seqlen"])[None])
    for hook in hooks:
        hook.remove()
    by_layer = []
    for i in range(len(layers)):
        q, k, v = (torch.stack(found[i, name]).transpose(1, 2) for name in "qkv")
        rotated = (*apply_rotary_pos_emb(q, k, cos, sin), v)
        by_layer.append(
            {n: x.transpose(1, 2).flatten(0, 1).double().numpy() for n, x in zip("qkv", rotated, strict=True)}
        )
    return by_layer


def covariances(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The public code's `qqt` and `sst`."""
    group, tokens = x["q"].shape[1] // KV_HEADS, len(x["q"])
    keys, values = np.zeros((DIM, DIM)), np.zeros((DIM, DIM))
    for head in range(KV_HEADS):
        q = x["q"][:, head * group : (head + 1) * group].reshape(-1, DIM)
        moments = q.T @ q / len(q)
        k, v = x["k"][:, head], x["v"][:, head]
        weights = (k @ moments * k).sum(1)
        weights = weights / weights.sum() * tokens
        weighted = v * np.sqrt(weights)[:, None]
        keys += moments / KV_HEADS
        values += weighted.T @ weighted / tokens / KV_HEADS
    return {"k": keys, "v": values}


def composed(covariance: np.ndarray) -> np.ndarray:
    """R H P of the public code's default, its eigenvectors with the signs of kvq's."""
    values, vectors = np.linalg.eigh(covariance)
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(DIM)])
    bits, order = int(np.log2(DIM)), np.argsort(-values)
    permuted = np.zeros(DIM, dtype=int)
    for i in range(DIM):
        permuted[int(bin(i)[2:].zfill(bits)[::-1], 2)] = order[i]
    return vectors @ (sylvester(DIM).numpy() / DIM**0.5) @ np.eye(DIM)[:, permuted]


def test_rotations_are_those_of_the_public_code(tiny, tmp_path):
    artifact = calibrated(tiny, tmp_path / "a")
    for i, x in enumerate(activations(tiny)):
        for kind, covariance in covariances(x).items():
            rotation, spread = (artifact.tensors[f"layers.{i}.{kind}.{name}"] for name in ("rotation", "spread"))
            np.testing.assert_allclose(rotation[0].numpy(), composed(covariance).T, rtol=0, atol=2e-3)
            np.testing.assert_allclose(spread[0].numpy(), np.sqrt((x[kind] ** 2).mean((0, 1))), rtol=1e-3)
            values = np.linalg.eigvalsh(covariance)
            errors = artifact.config["errors"]["layers"][i][kind]
            assert errors["energy"] == pytest.approx(values[-1] / values.sum(), rel=1e-2)
            assert errors["rank"] == DIM and errors["residual"] < 1e-6
    assert artifact.config["calibration"] == {"dataset": "prose", **TEXT, "seed": 0}


@pytest.mark.parametrize("width", [8, 64, 80, 96])
def test_rotations_of_any_width_are_orthogonal_and_spread_eigenvalues(width):
    x = torch.randn(4 * width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = x.T @ x * torch.linspace(1, 5, width).outer(torch.linspace(1, 5, width)).double()
    rotation, energy = spectral.spectral_rotation(covariance)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width), rtol=0, atol=1e-5)
    diagonal = (rotation.double() @ covariance @ rotation.double().T).diagonal()  # H mixes all directions alike
    torch.testing.assert_close(diagonal, diagonal.mean().expand(width), rtol=1e-3, atol=0)
    assert 1 / width < energy < 1
    assert sorted(spectral.reversed_bits(width).tolist()) == list(range(width))
    assert spectral.reversed_bits(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_many_bits_change_no_logit(tiny, tmp_path):
    calibrated(tiny, tmp_path / "a")
    artifact = load_artifact(tmp_path / "a").with_options({"bits": 8, "sinks": 4, "recent": 8})
    ids = torch.randint(3, 30, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = tiny.model(ids).logits
        with attach(tiny.model, artifact, prefill="compressed") as kv:
            logits = tiny.model(ids, past_key_values=kv.new_cache()).logits
            assert kv.report().compressed == 60 - 12
    assert (logits - expected).norm() < 0.2 * expected.norm()  # the largest number of a head of 8 is clipped


def test_interrupted_calibration_resumes_to_the_same_bytes(tiny, tmp_path, monkeypatch):
    whole = calibrated(tiny, tmp_path / "whole")
    add, read = spectral.TextSums.add, []

    def interrupted(self, window):
        read.append(window)
        if len(read) == 5:
            raise KeyboardInterrupt
        add(self, window)

    monkeypatch.setattr(spectral.TextSums, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrated(tiny, tmp_path / "a")
    again = calibrated(tiny, tmp_path / "a", resume=True)
    assert len(read) == 5 + 3  # the queries were read
    assert (again.path / "tensors.safetensors").read_bytes() == (whole.path / "tensors.safetensors").read_bytes()


def test_sizes_of_the_dry_run_and_refusals(tiny, tmp_path):
    plan = plan_calibration(tiny, build("oscar"), CalibrationOptions(**TEXT))
    assert dry_run_report(plan)["artifact_bytes"] == calibrated(tiny, tmp_path / "a").config["sizes"]["total"]
    with pytest.raises(UsageError, match="6 tokens are too few for 8 channels"):
        plan_calibration(tiny, build("oscar"), CalibrationOptions(samples=2, seqlen=3))
    tiny.model.model.layers[0].self_attn.q_proj.weight.data[0] = torch.nan
    with pytest.raises(KvqError, match="queries, keys or values of layer 0 are not all finite"):
        calibrated(tiny, tmp_path / "b")
