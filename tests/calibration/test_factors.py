"""Calibration of methods that need SVD factors of the weights (XQuant): resume, dry run, inspect."""

from __future__ import annotations

import json

import pytest
import torch
from random_artifacts import tiny_model

from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration import factors, pipeline
from kvq_cli.calibration.estimate import dry_run_report
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build

SIZE = 2 * 8  # kv heads x head_dim of the tiny model, whose hidden size is 32


def calibrated(tiny, folder, name="xquant", **options):
    return pipeline.calibrate(plan_calibration(tiny, build(name, **options), CalibrationOptions()), folder)


def test_factors_reproduce_the_weights_with_singular_directions(tiny, tmp_path):
    artifact = calibrated(tiny, tmp_path / "a")
    for i, layer in enumerate(tiny.model.model.layers):
        for kind in ("k", "v"):
            weight = getattr(layer.self_attn, f"{kind}_proj").weight.T.double()
            down, up = (artifact.tensors[f"layers.{i}.{kind}.{name}"].double() for name in ("down", "up"))
            torch.testing.assert_close(down @ up, weight, atol=1e-5, rtol=0)
            gram = up @ up.T  # S B^T B S = S^2: diagonal, descending, the eigenvalues of W^T W
            values = torch.linalg.eigvalsh(weight.T @ weight).flip(0)
            torch.testing.assert_close(gram, values.diag(), atol=1e-4, rtol=0)
            assert artifact.config["errors"]["layers"][i][kind]["residual"] < 1e-6
            assert artifact.config["errors"]["layers"][i][kind]["rank"] == SIZE


def test_factors_depend_on_no_number_of_threads():
    layer, before = attention_layers(tiny_model(hidden_size=576, head_dim=64))[0], torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(factors.factorize(layer, ("k", "x"), torch.float16)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


def test_cross_layer_factors_share_one_subspace_for_keys_and_values(tiny, tmp_path):
    artifact = calibrated(tiny, tmp_path / "a", "xquant-cl", base_layers=1)
    assert sorted(artifact.tensors) == ["layers.1.k.up", "layers.1.v.up", "layers.1.x.down"]
    attention = tiny.model.model.layers[1].self_attn
    down = artifact.tensors["layers.1.x.down"].double()
    assert down.shape == (32, 32)
    for kind in ("k", "v"):
        weight = getattr(attention, f"{kind}_proj").weight.T.double()
        torch.testing.assert_close(down @ artifact.tensors[f"layers.1.{kind}.up"].double(), weight, atol=1e-5, rtol=0)


def test_interrupted_factorization_resumes_to_the_same_bytes(tiny, tmp_path, interrupted):
    plan = plan_calibration(tiny, build("xquant"), CalibrationOptions())
    whole = pipeline.calibrate(plan, tmp_path / "whole")

    calls = interrupted(factors, "factorize", lambda: pipeline.calibrate(plan, tmp_path / "a"))
    with pytest.raises(UsageError, match="--resume"):
        pipeline.calibrate(plan, tmp_path / "a")
    again = pipeline.calibrate(plan, tmp_path / "a", resume=True)
    assert calls == [0, 1, 1] and not (tmp_path / "a.work").exists()
    assert again.digest == whole.digest == pipeline.calibrate(plan, tmp_path / "a", resume=True).digest


@pytest.mark.parametrize("name, options", [("xquant", {}), ("xquant-cl", {"base_layers": 1})])
def test_dry_run_reports_the_bytes_written(tiny, tmp_path, name, options):
    plan = plan_calibration(tiny, build(name, **options), CalibrationOptions())
    artifact, report = pipeline.calibrate(plan, tmp_path / "a"), dry_run_report(plan)
    assert report["artifact_bytes"] == artifact.config["sizes"]["total"]
    assert report["memory_bytes"] > 0 and report["request"]["calibration"] == {}


def test_dry_run_calibrate_and_inspect_commands(kvq, tiny_folder, tmp_path):
    words = ["calibrate", "--model", tiny_folder, "--device", "cpu", "--method", "xquant"]
    dry = kvq(*words, "--dry-run")
    assert dry.exit_code == 0 and "layers.*.k.down" in dry.stdout and "data       none" in dry.stdout
    made = kvq(*words, "--out", "a")
    assert made.exit_code == 0 and "factors of the weights, relative error at most" in made.stdout
    shown = kvq("inspect", "a")
    assert shown.exit_code == 0 and len([line for line in shown.stdout.splitlines() if " W_k " in line]) == 2
    assert json.loads(kvq("inspect", "a", "--json").stdout)["errors"]["layers"][1]["v"]["rank"] == SIZE
    assert kvq("inspect", "a", "--plot", "a.png").exit_code == 2
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"kvq calibrate --method xquant --bits 2 --model {tiny_folder} --dtype float32\n" in card
    assert f"| 1 | k: {SIZE}, " in card


def test_bits_and_windows_can_be_set_when_the_artifact_is_used(tiny, kvq, tiny_folder):
    """The factors do not depend on them."""
    assert (
        kvq("calibrate", "--model", tiny_folder, "--device", "cpu", "--method", "xquant", "--out", "a").exit_code == 0
    )
    artifact = load_artifact("a")
    prompt = torch.arange(40)[None]
    with attach(tiny.model, artifact) as kv:
        tiny.model(prompt, past_key_values=kv.new_cache())
        assert kv.report().compressed == 0  # a group of 128 is not full
    words = ["generate", "--model", tiny_folder, "--device", "cpu", "--artifact", "a", "--set", "group=8", "--json"]
    out = kvq(*words, "--bits", 4, "--set", "sinks=2", "--max-new-tokens", 20, "hello there, you who read this text")
    assert out.exit_code == 0, out.output


def test_artifact_is_empty_where_the_layer_input_is_cached_whole(kvq, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvq_cli.models import LoadedModel, model_shape

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval().requires_grad_(False)
    loaded = LoadedModel(model, None, "tiny", None, model_shape(model))
    artifact = calibrated(loaded, tmp_path / "a", group=4)
    assert artifact.tensors == {} and kvq("inspect", tmp_path / "a").exit_code == 0
    with attach(model, load_artifact(tmp_path / "a")) as kv:
        model(torch.arange(9)[None], past_key_values=kv.new_cache())
        assert kv.report().compressed == 8
