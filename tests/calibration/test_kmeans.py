"""Weighted k-means against definitions and exhaustive search; test_kmeans_faiss.py compares it with faiss."""

import itertools
from math import inf

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.calibration import kmeans_scalar
from kvq_cli.calibration.kmeans import _nearest, kmeans_plus_plus, lloyd, nearest, weighted_kmeans


def data(books, points, size, seed=0, spread=4.0):
    noise = torch.Generator().manual_seed(seed)
    u = torch.randn(books, points, size, generator=noise)
    return u, torch.rand(books, points, generator=noise) ** spread


def error(points, weights, centroids):
    """sum_i w_i min_j ||u_i - c_j||^2 in float64, per codebook."""
    distances = torch.cdist(points.double(), centroids.double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2
    return (weights.double() * distances.min(-1).values).sum(-1)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("entries", [2, 16, 256])
def test_nearest_equals_exhaustive_search(size, entries):
    points, _ = data(3, 700, size)
    centroids, _ = data(3, entries, size, seed=1)
    scores, codes = _nearest(points, centroids)
    distances = torch.cdist(points.double(), centroids.double()) ** 2
    best = distances.min(-1).values
    mine = distances.gather(2, codes[..., None])[..., 0]
    # Scores are compared to 2^-15 of their size.
    slack = 2.0**-14 * (points.square().sum(-1) + centroids.square().sum(-1).max())
    assert (mine - best <= slack).all()
    assert (codes == distances.argmin(-1)).float().mean() > 0.9
    assert torch.allclose(points.square().sum(-1) + 2 * scores, mine.float(), atol=1e-2)
    assert (nearest(points, centroids) == codes).float().mean() > 0.9


def test_one_dimensional_k_means_reaches_the_global_optimum():
    points, weights = data(20, 12, 1)
    order = points[..., 0].argsort(-1)
    best = torch.full((20,), torch.inf, dtype=torch.float64)
    for cuts in itertools.combinations(range(1, 12), 2):  # clusters of an optimum are neighbours on the line
        total = torch.zeros(20, dtype=torch.float64)
        for a, b in itertools.pairwise((0, *cuts, 12)):
            x = points[..., 0].double().gather(1, order[:, a:b])
            w = weights.double().gather(1, order[:, a:b])
            mean = (w * x).sum(-1) / w.sum(-1)
            total += (w * (x - mean[:, None]) ** 2).sum(-1)
        best = torch.minimum(best, total)
    assert torch.allclose(error(points, weights, weighted_kmeans(points, weights, 3)), best, rtol=1e-6)


@pytest.mark.parametrize("points, entries, repeated", [(40, 5, 0), (300, 16, 0), (64, 64, 0), (120, 16, 60)])
def test_cuts_of_scalars_are_those_of_trying_all_starts(points, entries, repeated):
    """Their costs, at least: among repeated points and points without weight several partitions are as good."""
    generator = torch.Generator().manual_seed(points)
    u = (torch.randn(6, points, generator=generator) ** 3).double().sort().values
    u[:, 1 : repeated + 1] = u[:, :1]
    w = torch.rand(6, points, generator=generator).double()
    w[3:, ::3] = 0
    sums = F.pad(torch.stack([w, w * u, w * u * u]).cumsum(-1), (1, 0))
    cuts = kmeans_scalar._best_cuts(sums, entries)
    assert (cuts.diff() > 0).all() and (cuts[:, 0] == 0).all() and (cuts[:, -1] == points).all()
    for codebook in range(6):
        cost = [
            [_interval(sums[:, codebook], i, j) if i < j else inf for j in range(points + 1)] for i in range(points)
        ]
        cost = torch.tensor(cost, dtype=torch.float64)
        best = cost[0]
        for _ in range(entries - 1):
            best = (best[:points, None] + cost).amin(0)
        chosen = sum(_interval(sums[:, codebook], i, j) for i, j in itertools.pairwise(cuts[codebook].tolist()))
        assert chosen == pytest.approx(best[points].item(), rel=1e-9, abs=1e-12)


def _interval(sums, start, end):
    w, wu, wuu = (sums[:, end] - sums[:, start]).tolist()
    return max(wuu - wu * wu / max(w, 1e-300), 0.0)


@pytest.mark.parametrize("engine", ["kvq", "faiss"])
def test_converged_centroids_are_weighted_means_of_their_points(engine):
    points, weights = data(4, 400, 2)
    centroids = weighted_kmeans(points, weights, 16, iterations=200, tolerance=0.0, engine=engine)
    codes = (torch.cdist(points.double(), centroids.double())).argmin(-1)
    for book, entry in itertools.product(range(4), range(16)):
        mine = codes[book] == entry
        assert mine.any()
        mean = np.average(points[book][mine].numpy(), axis=0, weights=weights[book][mine].numpy())
        np.testing.assert_allclose(centroids[book, entry].numpy(), mean, atol=2e-3)


def test_integer_weights_equal_repeated_points():
    points, _ = data(2, 60, 2)
    weights = torch.randint(1, 4, (2, 60), generator=torch.Generator().manual_seed(0)).float()
    start = points[:, :8].clone()
    once = lloyd(points, weights, start, 30, 0.0)
    for book in range(2):
        repeated = points[book].repeat_interleave(weights[book].long(), dim=0)[None]
        many = lloyd(repeated, torch.ones(1, repeated.shape[1]), start[book : book + 1], 30, 0.0)
        assert torch.allclose(once[book], many[0], atol=1e-5)


def test_more_iterations_never_raise_the_error():
    points, weights = data(3, 900, 4)
    start = kmeans_plus_plus(points, weights, torch.rand(3, 32, 1, generator=torch.Generator().manual_seed(0)))
    errors = torch.stack([error(points, weights, lloyd(points, weights, start, n, 0.0)) for n in (0, 1, 2, 5, 20)])
    assert (errors[1:] <= errors[:-1] * (1 + 1e-5)).all()
    assert (errors[-1] < 0.9 * errors[0]).all()


def test_early_stop_raises_the_error_little():
    points, weights = data(3, 4000, 4)
    early, late = (error(points, weights, weighted_kmeans(points, weights, 64, tolerance=t)) for t in (1e-3, 0.0))
    assert (early <= 1.03 * late).all()


def test_k_means_plus_plus_draws_proportional_to_weighted_squared_distance():
    points = torch.tensor([[[0.0], [1.0], [3.0], [7.0]]])
    weights = torch.tensor([[1.0, 2.0, 0.0, 0.5]])
    draws = torch.rand(20_000, 2, 1, generator=torch.Generator().manual_seed(0))
    chosen = kmeans_plus_plus(points.expand(20_000, -1, -1), weights.expand(20_000, -1), draws)[..., 0]
    counts = torch.zeros(4, 4, dtype=torch.float64)
    where = {0.0: 0, 1.0: 1, 3.0: 2, 7.0: 3}
    for first, second in chosen.tolist():
        counts[where[first], where[second]] += 1 / 20_000
    w, x = weights[0].double(), points[0, :, 0].double()
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for i in range(4):
        mass = w * (x - x[i]) ** 2
        expected[i] = w[i] / w.sum() * mass / mass.sum()
    assert (counts - expected).abs().max() < 0.015


def test_k_means_plus_plus_chooses_the_points_of_a_direct_computation():
    """Distances in float64, one try after another."""
    points, weights = data(2, 300, 4)
    draws = torch.rand(2, 12, 3, generator=torch.Generator().manual_seed(1))
    found = kmeans_plus_plus(points, weights, draws)
    for book in range(2):
        x, w = points[book].double(), weights[book].double()
        distance, mass = torch.full((300,), torch.inf, dtype=torch.float64), w
        for draw, chosen in zip(draws[book].double(), found[book], strict=True):
            tried = torch.searchsorted(mass.cumsum(0), draw * mass.sum(), right=True)
            new = torch.minimum((x - x[tried].unsqueeze(1)).square().sum(-1), distance)
            best = (new @ w).argmin()
            distance, mass = new[best], new[best] * w
            assert torch.equal(chosen, points[book, tried[best]])


def test_empty_clusters_move_to_points_with_large_errors():
    points = torch.tensor([[[0.0], [0.1], [10.0], [10.1], [20.0], [90.0]]])
    far = torch.tensor([[[0.0], [500.0], [600.0], [10.05]]])
    found = lloyd(points, torch.ones(1, 6), far, 10, 0.0).flatten().sort().values
    assert torch.allclose(found, torch.tensor([0.05, 10.05, 20.0, 90.0]), atol=1e-5)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 30), st.sampled_from(["equal", "zero", "few"]))
def test_points_without_spread_or_weight_give_finite_centroids(books, size, extra, kind):
    points = torch.full((books, 8 + extra, size), 2.5)
    weights = torch.zeros(books, 8 + extra) if kind == "zero" else torch.ones(books, 8 + extra)
    if kind == "few":
        points[:, 0], weights[:, 1:] = -1.0, 0.0
        weights[:, 1] = 1.0
    found = weighted_kmeans(points, weights, 8)
    assert found.isfinite().all()
    assert (error(points, weights, found) < 1e-6).all()


@pytest.mark.parametrize("engine", ["kvq", "faiss"])
def test_points_far_from_0_are_clustered_as_well(engine):
    points, weights = data(6, 4096, 4)
    near, far = (weighted_kmeans(x, weights, 256, engine=engine) for x in (points, points + 400))
    errors = error(points, weights, near).sum(), error(points + 400, weights, far).sum()
    assert errors[1] == pytest.approx(errors[0].item(), rel=0.01)


def test_nearest_far_from_0_is_that_of_float64():
    points, weights = data(2, 2048, 4)
    centroids = weighted_kmeans(points, weights, 256) + 400
    points = points + 400
    distances = torch.cdist(points.double(), centroids.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert (nearest(points, centroids) == distances.argmin(-1)).float().mean() > 0.995


def test_codebook_does_not_depend_on_others_in_the_batch():
    points, weights = data(40, 600, 4)
    together = weighted_kmeans(points, weights, 64, seed=5)
    assert together.equal(weighted_kmeans(points, weights, 64, seed=5))
    assert not together.equal(weighted_kmeans(points, weights, 64, seed=6))
    assert together[:5].equal(weighted_kmeans(points[:5], weights[:5], 64, seed=5))
    assert nearest(points, together)[7:8].equal(nearest(points[7:8], together[7:8]))


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="16 centroids need as many points, not 15"):
        weighted_kmeans(torch.zeros(1, 15, 2), torch.ones(1, 15), 16)


def heavy_tailed(points, size):
    """Points and weights like activations and their squared gradients: Student's t with 2 degrees of freedom."""
    noise = torch.Generator().manual_seed(1)
    chi = torch.randn(2, points, 2, generator=noise).square().sum(-1, keepdim=True) / 2
    u, gradients = torch.randn(2, points, size, generator=noise) / chi.sqrt()
    return u[None], gradients.square().sum(-1)[None]


@pytest.mark.parametrize(("size", "entries", "most"), [(1, 4, 1.002), (1, 16, 1.01), (4, 256, 1.08)])
def test_every_seed_is_nearly_as_good_as_the_best_of_three_runs_of_scikit_learn(size, entries, most):
    cluster = pytest.importorskip("sklearn.cluster")
    points, weights = heavy_tailed(8192, size)
    model = cluster.KMeans(entries, n_init=3, random_state=0, tol=0).fit(points[0].numpy(), sample_weight=weights[0])
    best = error(points, weights, torch.from_numpy(model.cluster_centers_)[None].float()).item()
    found = [error(points, weights, weighted_kmeans(points, weights, entries, seed=seed)).item() for seed in range(8)]
    assert max(found) < most * best
