"""Latents of weights and inputs whose outliers are known."""

import json

import pytest
import torch

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.papers.studies.latents import KINDS, TOP, Latents, dominance, magnitude_rank


def test_dominance_and_rank():
    assert dominance(torch.tensor([12.0, 1.0, 2.0, 3.0]), 0) == pytest.approx(6)
    assert dominance(torch.ones(5), 3) == pytest.approx(1)
    row = torch.tensor([0.1, -4.0, 3.0, -0.2])
    assert [magnitude_rank(row, channel) for channel in range(4)] == [3, 0, 1, 2]


def first_direction(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors u, b of the largest singular value of W `[hidden_size, channels]`, by power iteration."""
    b = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    for _ in range(2000):
        b = weight.T @ (weight @ b)
        b = b / b.norm()
    u = weight @ b
    return u / u.norm(), b


@pytest.fixture
def data(study_input):
    """A random model whose W_k has one large direction with outliers in channel 5, to which all of X is parallel."""
    made = study_input("tiny", torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0)))
    for site in attention_layers(made.loaded.model):
        weight = site.module.k_proj.weight  # [channels, hidden_size]
        u = torch.zeros(weight.shape[1])
        u[3] = 1.0
        b = torch.full((weight.shape[0],), 0.05)
        b[5] = 1.0
        weight.add_(4 * torch.outer(b / b.norm(), u))
        site.module.register_forward_pre_hook(_along(3), with_kwargs=True)
    return made


def _along(channel: int):
    def before(_module, args, kwargs):
        x = kwargs["hidden_states"].clone()
        x[..., channel] = 30.0
        return args, {**kwargs, "hidden_states": x}

    return before


def test_a_known_outlier_channel_is_identified_and_predicted(data):
    found = Latents().run(data, lambda *_: None)
    for _, of_x, of_k, _, largest, cosine, own in found.rows:
        assert largest == 0 and own == 0
        assert of_k > 10 and of_x > 10 and cosine > 0.9
    assert found.numbers["outlier_channels"] == [[5, 5], [5, 5]]
    assert set(found.numbers["hits"].values()) == {1.0}


def test_results_follow_from_the_first_singular_direction(study_input):
    windows = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(1))
    data = study_input("tiny", windows)
    sites, seen = attention_layers(data.loaded.model), []
    for site in sites:
        site.module.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
    data.loaded.model(windows)
    seen = seen[:]
    found = Latents().run(data, lambda *_: None)
    for site, row in zip(sites, found.rows, strict=True):
        weight, x = site.module.k_proj.weight.T, seen[site.index]
        u, b = first_direction(weight)
        assert row[5] == pytest.approx(((x @ u).abs() / x.norm(dim=1)).mean().item(), rel=1e-3)
        drawn = found.numbers["layers"][str(site.index)]["k"]["mean"][0]
        assert drawn == pytest.approx((x @ u).abs().mean().item(), rel=1e-3)
        outlier = (x @ weight).abs().mean(0).argmax()
        assert found.numbers["outlier_channels"][site.index] == [outlier]
        assert found.numbers["places"][site.index] == [(b.abs() > b[outlier].abs()).sum()]


def test_the_command(kvq, tmp_path):
    result = kvq("analyze", "latents", "--samples", 1, "--seqlen", 40, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "latents.json").read_text())
    assert document == json.loads(result.stdout)
    assert [row[0] for row in document["rows"]] == list(range(8))
    numbers = document["numbers"]
    assert all(len(one["k"]["mean"]) == 128 and len(one["x"]["peak"]) == 256 for one in numbers["layers"].values())
    shares = [numbers["hits"][str(k)] for k in TOP]
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
    assert set(numbers["dominance"]) == set(KINDS)
    assert (tmp_path / "latents.png").stat().st_size > 5000
