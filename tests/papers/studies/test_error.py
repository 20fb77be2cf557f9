"""Errors of channel and temporal chunks on numbers that only one of the two can compress."""

import json

import pytest
import torch

from kvq_cli.benchmarking.shapes import random_model
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.activations import Activations, temporary_store
from kvq_cli.papers.studies.error import Error, some_channels, wins


@pytest.fixture(scope="module")
def loaded():
    model = random_model("tiny", torch.device("cpu"), torch.float32, 0)
    return LoadedModel(model, None, "tiny", None, model_shape(model))


def errors_of(loaded, windows: torch.Tensor, chunk: int) -> dict:
    """Return the study's errors of keys `[windows, tokens, kv_heads, head_dim]` with equal Fisher weights."""
    with temporary_store() as store:
        for window in windows:
            store.append("0.k.x", window)
            store.append("0.k.g", torch.ones_like(window))
        activations = Activations(loaded, [], [0], store)
        return Error(channels=8, points=4096)._errors(activations, (0, "k", chunk), held_out=1, seed=0)


@pytest.mark.parametrize("chunk", [2, 4])
def test_numbers_that_repeat_along_tokens_or_channels(loaded, chunk):
    heads, dim = loaded.shape.kv_heads, loaded.shape.head_dim
    levels = torch.randint(0, 32, (4, 512, heads, dim), generator=torch.Generator().manual_seed(0)) / 8.0
    still = levels[:, ::chunk].repeat_interleave(chunk, dim=1)  # chunks of tokens take 32 values, all in the codebook
    alike = levels[..., ::chunk].repeat_interleave(chunk, dim=3)
    for numbers, exact, lossy in ((still, "temporal", "channel"), (alike, "channel", "temporal")):
        found = errors_of(loaded, numbers, chunk)
        assert found[exact]["fisher"] < 1e-6
        assert max(found[exact]["by_head"]) < 1e-6
        assert found[lossy]["fisher"] > 1e-4
        assert len(found[lossy]["by_head"]) == heads
    assert errors_of(loaded, still, chunk)["adjacent_token_correlation"] == pytest.approx(1, abs=1e-3)


def test_chosen_channels_form_runs_of_the_widest_chunk():
    assert some_channels(64, 16).tolist() == [*range(8), *range(56, 64)]
    assert some_channels(64, None).tolist() == some_channels(64, 64).tolist() == list(range(64))
    assert some_channels(16, 8).tolist() == list(range(8, 16))


def test_wins_count_layers_and_heads():
    def stream(temporal, channel):
        sides = (("temporal", temporal), ("channel", channel))
        return {"2": {name: {"fisher": sum(heads), "by_head": heads} for name, heads in sides}}

    found = [
        {"keys": stream([1, 1], [2, 2]), "values": stream([1, 5], [2, 2])},
        {"keys": stream([3, 1], [2, 9]), "values": stream([3, 3], [2, 2])},
    ]
    assert wins(found, 2) == {"layers": 2 / 4, "heads": 4 / 8}


@pytest.mark.slow
def test_the_command_gives_every_layer_and_head(kvq, tmp_path):
    options = ["channels=8", "points=256", "iterations=1"]
    words = [word for option in options for word in ("--set", option)]
    result = kvq("analyze", "error", "--samples", 2, "--seqlen", 264, *words, "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "error.json").read_text())
    assert [row[:2] for row in document["rows"]] == [[n, kind] for n in range(8) for kind in ("keys", "values")]
    for row in document["rows"]:
        chunks = document["numbers"]["errors"][row[0]][row[1]]
        assert row[3:] == [chunks[c][s]["fisher"] for c in ("2", "4", "8") for s in ("channel", "temporal")]
        assert all(len(chunks[c]["temporal"]["by_head"]) == 2 for c in ("2", "4", "8"))
        assert min(row[3:]) > 0
    assert set(document["numbers"]["temporal_lower"]) == {"2", "4", "8"}
    assert (tmp_path / "error.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--samples", 2, "--seqlen", 64], "raise --samples or --seqlen"),
        (["--set", "channels=4"], "channels must be at least 8"),
        (["--set", "points=9"], "points 256"),
    ],
)
def test_too_little_text_and_invalid_options_are_refused(fails, words, says):
    fails("analyze", "error", *words, code=2, says=says)
