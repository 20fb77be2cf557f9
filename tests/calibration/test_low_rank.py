"""PALU's factors against its public code's formulas: Cholesky whitening of the layer inputs, SVD of W L."""

from __future__ import annotations

import pytest
import torch
from sylvester import sylvester

from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.calibration import capture, low_rank, pipeline
from kvq_cli.calibration.estimate import dry_run_report
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build

TEXT = {"samples": 3, "seqlen": 200}


def calibrated(tiny, folder, progress=lambda *_: None, **options):
    plan = plan_calibration(tiny, build("palu", **options), CalibrationOptions(**TEXT))
    return pipeline.calibrate(plan, folder, progress=progress)


def layer_inputs(tiny) -> dict[int, torch.Tensor]:
    """The layer inputs of the calibration text, `[tokens, hidden_size]` float64 by layer."""
    windows = token_windows(tiny.tokenizer, load_text("prose", "calibration"), TEXT["seqlen"], TEXT["samples"], 0)
    found: dict[int, list] = {}
    hooks = [
        layer.self_attn.k_proj.register_forward_pre_hook(
            lambda _, args, i=i: found.setdefault(i, []).append(args[0][0])
        )
        for i, layer in enumerate(tiny.model.model.layers)
    ]
    with torch.no_grad():
        for window in windows:
            tiny.model(window[None])
    for hook in hooks:
        hook.remove()
    return {i: torch.cat(inputs).double() for i, inputs in found.items()}


def palu_factors(weight: torch.Tensor, x: torch.Tensor, latents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(up, down) of the public code, with W ~ up down: the Cholesky factor L of X^T X, W L = U S V^T, U S^(1/2) and
    S^(1/2) V^T L^-1."""
    scale = torch.linalg.cholesky(x.T @ x)
    u, s, v = torch.linalg.svd(weight @ scale, full_matrices=False)
    root = s[:latents].sqrt()
    return u[:, :latents] * root, root[:, None] * (v[:latents] @ torch.linalg.inv(scale))


@pytest.mark.parametrize(("heads", "latents"), [(1, 4), (4, 8)])
def test_factors_are_those_of_the_public_code(tiny, tmp_path, heads, latents):
    artifact = calibrated(tiny, tmp_path / "a", heads=heads)
    inputs, groups = layer_inputs(tiny), 2 if heads == 1 else 1
    rotation = sylvester(latents) / latents**0.5
    for i, layer in enumerate(tiny.model.model.layers):
        for kind in "kv":
            weight = getattr(layer.self_attn, f"{kind}_proj").weight.double().unflatten(0, (groups, -1))
            down, up = (artifact.tensors[f"layers.{i}.{kind}.{name}"].double() for name in ("down", "up"))
            assert down.shape == (32, groups * latents) and up.shape == (groups * latents, 16)
            products, lost, whole = [], 0.0, 0.0
            for g in range(groups):
                rows, columns = slice(g * latents, (g + 1) * latents), slice(g * 16 // groups, (g + 1) * 16 // groups)
                left, right = palu_factors(weight[g], inputs[i], latents)
                ours = up[rows, columns].T @ rotation  # without the Hadamard matrix, and without the scale of the sum
                ratio = (left / ours).abs()
                torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=2e-2, atol=0)
                product = down[:, rows] @ up[rows, columns]
                torch.testing.assert_close(product, (left @ right).T, rtol=1e-3, atol=1e-4)
                products.append(product)
                y = inputs[i] @ weight[g].T
                lost, whole = lost + (inputs[i] @ product - y).square().sum(), whole + y.square().sum()
            torch.testing.assert_close(down @ up, torch.cat(products, dim=1), rtol=1e-4, atol=1e-5)
            errors = artifact.config["errors"]["layers"][i][kind]
            assert errors["residual"] == pytest.approx((lost / whole).sqrt().item(), rel=1e-2)
            assert errors["rank"] == groups * latents


def test_factors_of_the_weights_are_their_truncated_svd(tiny, tmp_path):
    artifact = calibrated(tiny, tmp_path / "a", whiten=False, hadamard=False)
    for i, layer in enumerate(tiny.model.model.layers):
        for kind in "kv":
            weight = getattr(layer.self_attn, f"{kind}_proj").weight.double()
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            down, up = (artifact.tensors[f"layers.{i}.{kind}.{name}"].double() for name in ("down", "up"))
            expected = (u[:, :8] * s[:8]) @ v[:8]
            torch.testing.assert_close((down @ up).T, expected, rtol=1e-3, atol=1e-4)
            residual = (s[8:].square().sum() / s.square().sum()).sqrt().item()
            assert artifact.config["errors"]["layers"][i][kind]["residual"] == pytest.approx(residual, rel=1e-2)
    assert artifact.config["calibration"] == {} and "captured" not in artifact.config


@pytest.mark.parametrize("hadamard", [True, False])
def test_all_latents_without_quantization_change_no_logit(tiny, tmp_path, hadamard):
    calibrated(tiny, tmp_path / "a", bits=16, share=1.0, hadamard=hadamard)
    artifact = load_artifact(tmp_path / "a")
    ids = torch.randint(3, 30, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = tiny.model(ids).logits
        with attach(tiny.model, artifact, prefill="compressed") as kv:
            torch.testing.assert_close(
                tiny.model(ids, past_key_values=kv.new_cache()).logits, expected, rtol=1e-3, atol=1e-3
            )


def test_whitening_lowers_the_error_of_keys_and_values(tiny, tmp_path):
    inputs = layer_inputs(tiny)
    lost = {}
    for whiten in (True, False):
        artifact = calibrated(tiny, tmp_path / str(whiten), whiten=whiten)
        lost[whiten] = [
            (x @ (artifact.tensors[f"layers.{i}.{kind}.down"] @ artifact.tensors[f"layers.{i}.{kind}.up"]).double()
             - x @ getattr(tiny.model.model.layers[i].self_attn, f"{kind}_proj").weight.T.double()).norm().item()
            for i, x in inputs.items() for kind in "kv"
        ]  # fmt: skip
    assert all(ours < plain for ours, plain in zip(lost[True], lost[False], strict=True))


def test_interrupted_calibration_resumes_to_the_same_bytes(tiny, tmp_path, monkeypatch, interrupted):
    whole = calibrated(tiny, tmp_path / "whole")
    plan = plan_calibration(tiny, build("palu"), CalibrationOptions(**TEXT))
    calls = interrupted(low_rank, "factorize_groups", lambda: pipeline.calibrate(plan, tmp_path / "a"))
    monkeypatch.setattr(capture, "forward", lambda *_: pytest.fail("the text was read already"))
    again = pipeline.calibrate(plan, tmp_path / "a", resume=True)
    assert calls == [0, 1, 1]
    assert (again.path / "tensors.safetensors").read_bytes() == (whole.path / "tensors.safetensors").read_bytes()


def test_reading_continues_where_it_was_interrupted(tiny, tmp_path, monkeypatch):
    plan = plan_calibration(tiny, build("palu"), CalibrationOptions(samples=7, seqlen=60))
    whole = pipeline.calibrate(plan, tmp_path / "whole")
    forward, read = capture.forward, []

    def interrupted(model, window):
        read.append(window)
        if len(read) == 5:
            raise KeyboardInterrupt
        forward(model, window)

    monkeypatch.setattr(capture, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.calibrate(plan, tmp_path / "a")
    again = pipeline.calibrate(plan, tmp_path / "a", resume=True)
    assert len(read) == 5 + 3 and torch.equal(read[5], read[4])
    assert (again.path / "tensors.safetensors").read_bytes() == (whole.path / "tensors.safetensors").read_bytes()


def test_sizes_of_the_dry_run_and_refusals(tiny, tmp_path):
    plan = plan_calibration(tiny, build("palu"), CalibrationOptions(**TEXT))
    report = dry_run_report(plan)
    assert report["artifact_bytes"] == calibrated(tiny, tmp_path / "a").config["sizes"]["total"]
    assert report["request"]["calibration"] == {"dataset": "prose", **TEXT, "seed": 0}
    with pytest.raises(UsageError, match="too few for 16 channels"):
        plan_calibration(tiny, build("palu"), CalibrationOptions(samples=2, seqlen=7))
    with pytest.raises(
        UsageError, match=r"share=0.7 of 16 channels: a Hadamard rotation of 11 channels .* hadamard=off"
    ):
        build("palu", share=0.7).calibration(tiny.shape)
    windows = token_windows(tiny.tokenizer, load_text("prose", "calibration"), TEXT["seqlen"], TEXT["samples"], 0)
    tiny.model.model.embed_tokens.weight.data[windows[0, -1]] = torch.nan
    with pytest.raises(KvqError, match="layer 0 are not all finite"):
        calibrated(tiny, tmp_path / "b")
