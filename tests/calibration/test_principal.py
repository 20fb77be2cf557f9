"""Principal components of all layers, and the groups that code them, against closed forms and a search of all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvq_cli.artifact import load_artifact
from kvq_cli.calibration import pipeline
from kvq_cli.calibration.estimate import dry_run_report
from kvq_cli.calibration.kinds import joined
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.principal import best_groups, group_errors, principal_components
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.codecs.component_groups import Group
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model

TEXT = {"samples": 3, "seqlen": 100}


@pytest.mark.parametrize("tokens", [300, 40])
def test_components_are_the_singular_vectors(tokens):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator) * torch.logspace(1, -1, 64) + 3
    mean, basis = principal_components(x)
    centered = x.double().numpy() - x.double().numpy().mean(0)
    _, values, rows = np.linalg.svd(centered, full_matrices=False)
    assert basis.shape == (64, 64 if tokens > 64 else 32)
    np.testing.assert_allclose(mean, x.double().mean(0))
    np.testing.assert_allclose((basis.T @ basis).numpy(), np.eye(basis.shape[1]), atol=1e-9)
    kept = centered @ basis.numpy()
    np.testing.assert_allclose((kept**2).sum(0), values[: basis.shape[1]] ** 2, rtol=1e-3)
    np.testing.assert_allclose(np.abs(rows[:8] @ basis.numpy()[:, :8]), np.eye(8), atol=1e-3)
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()


def searched(errors, energies, words, unit=0):
    """The least error of the units from `unit` on, of all ways to group them."""
    best = sum(energies[unit:])
    for group, lost in errors.items():
        stop = unit + group.components // 16
        if stop <= len(energies) and group.words <= words:
            best = min(best, lost[unit] + searched(errors, energies, words - group.words, stop))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_the_best_of_all(seed):
    """Also where errors do not fall with bits, as measured ones may."""
    noise = np.random.default_rng(seed)
    energies = noise.uniform(0, 4, size=6)
    candidates = [Group(16, 2), Group(16, 4), Group(64, 2), Group(16, 16), Group(64, 8)]
    errors = {group: noise.uniform(0, 3, size=7 - group.components // 16) for group in candidates}
    for words in range(1, 24):
        groups = best_groups(errors, energies, words)
        assert sum(group.words for group in groups) <= words
        unit, lost = 0, 0.0
        for group in groups:
            lost += errors[group][unit]
            unit += group.components // 16
        assert lost + energies[unit:].sum() == pytest.approx(searched(errors, energies, words))


def test_errors_of_groups_are_measured_at_every_start():
    z = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * torch.linspace(4, 0.1, 96)
    errors = group_errors(z, "float16", words=12)
    assert set(errors) == {Group(16, 2), Group(16, 4), Group(16, 8), Group(16, 16), Group(64, 2), Group(64, 4)}
    assert {len(errors[Group(16, 4)]), len(errors[Group(64, 4)])} == {6, 3}
    for start, group in ((3, Group(16, 4)), (2, Group(64, 2))):
        own = z[:, 16 * start :][:, : group.components]
        low, high = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
        scale = ((high - low) / (2**group.bits - 1)).half().float()
        codes = ((own - low.half().float()) / scale).round().clamp(0, 2**group.bits - 1)
        lost = (codes * scale + low.half().float() - own).square().sum().item()
        assert errors[group][start] == pytest.approx(lost, rel=1e-5)
    assert (errors[Group(16, 16)] < 1e-6 * errors[Group(16, 2)]).all()


@pytest.fixture(scope="module")
def model():
    return load_model("reference", "cpu", "float32")


def calibrated(loaded, folder, bits=2, **more):
    plan = plan_calibration(loaded, build("kvtc", bits=bits), CalibrationOptions(**TEXT))
    return pipeline.calibrate(plan, folder, **more)


def test_calibration_resumes_to_the_same_bytes_and_errors_fall_with_bits(model, tmp_path, monkeypatch):
    made, few = calibrated(model, tmp_path / "whole"), calibrated(model, tmp_path / "few", bits=0.25)
    decompose, calls = joined.principal_components, []

    def interrupt(x):
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decompose(x)

    monkeypatch.setattr(joined, "principal_components", interrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, tmp_path / "cut")
    again = calibrated(model, tmp_path / "cut", resume=True)
    assert len(calls) == 3  # keys were not decomposed again
    assert again.digest == made.digest == load_artifact(tmp_path / "cut").digest
    shape, layers = model.shape, [made.layer(layer) for layer in range(model.shape.layers)]
    budget = 2 * shape.layers * shape.kv_heads * shape.head_dim // 8
    for kind in "kv":
        basis = torch.cat([layer[f"{kind}.basis"] for layer in layers]).double()
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64), atol=1e-5, rtol=0)
        errors = [layer[kind] for layer in made.config["errors"]["layers"]]
        assert all(budget - 8 <= error["bytes"] <= budget for error in errors)
        poor = [layer[kind] for layer in few.config["errors"]["layers"]]
        assert all(a["chosen"]["plain"] < b["chosen"]["plain"] < 1 for a, b in zip(errors, poor, strict=True))
        assert all(torch.equal(layer[f"{kind}.groups"], layers[0][f"{kind}.groups"]) for layer in layers)


def test_requests_that_cannot_work_are_refused(model):
    with pytest.raises(UsageError, match="kvtc: bits=0.01 are too few for a group of 16 components: set bits=0.0625"):
        plan_calibration(model, build("kvtc", bits=0.01), CalibrationOptions(**TEXT))
    with pytest.raises(UsageError, match="tokens are too few for 16 components"):
        plan_calibration(model, build("kvtc"), CalibrationOptions(samples=2, seqlen=12))
    plan = plan_calibration(model, build("kvtc"), CalibrationOptions(**TEXT))
    report = dry_run_report(plan)
    assert report["memory_bytes"] > 0 and {"k.basis", "v.groups"} <= {t["name"][9:] for t in report["tensors"]}
