"""kvq's k-means compared with faiss, and faiss as the second engine."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import faiss
import pytest
import torch

from kvq_cli.artifact import load_artifact
from kvq_cli.calibration import kmeans, kmeans_faiss
from kvq_cli.calibration.kmeans import choose_engine, kmeans_plus_plus, lloyd, weighted_kmeans
from kvq_cli.calibration.kmeans_faiss import lloyd_faiss
from kvq_cli.errors import KvqError

ITERATIONS = 10
FAISS = Path(kmeans_faiss.__file__)


def mixture(points, size):
    """Gaussian clusters of unequal size and spread; a tenth of the points has nearly all the weight."""
    noise = torch.Generator().manual_seed(0)
    centers, spreads = 5 * torch.randn(40, size, generator=noise), torch.rand(40, 1, generator=noise)
    cluster = (40 * torch.rand(points, generator=noise) ** 2).long()
    u = centers[cluster] + spreads[cluster] * torch.randn(points, size, generator=noise)
    return u[None], torch.rand(1, points, generator=noise) ** 12


def heavy_tailed(points, size):
    """Student's t with 2 degrees of freedom, like activations with outliers; weights t^2, like squared gradients."""
    noise = torch.Generator().manual_seed(1)
    chi = torch.randn(2, points, 2, generator=noise).square().sum(-1, keepdim=True) / 2
    normal = torch.randn(2, points, size, generator=noise)
    u, gradients = normal / chi.sqrt()
    return u[None], 1e-9 * gradients.square().sum(-1)[None]


def data(books, points, size):
    noise = torch.Generator().manual_seed(0)
    return torch.randn(books, points, size, generator=noise), torch.rand(books, points, generator=noise) ** 4


def error(points, weights, centroids):
    """sum_i w_i min_j ||u_i - c_j||^2 by codebook, in float64."""
    squares = (points[:, :, None].double() - centroids[:, None].double()).square().sum(-1)
    return (weights.double() * squares.amin(-1)).sum(-1)


def by_faiss(points, weights, entries, start=None, **parameters):
    """Centroids by faiss alone, without kvq's code."""
    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": points.shape[1]}
    model = faiss.Kmeans(points.shape[2], entries, niter=ITERATIONS, **limits, **parameters)
    model.train(points[0].numpy(), weights[0].numpy(), None if start is None else start[0].numpy())
    return torch.from_numpy(model.centroids)[None]


@pytest.mark.parametrize("kind", [mixture, heavy_tailed])
@pytest.mark.parametrize(("size", "entries"), [(1, 16), (4, 64), (8, 256)])
def test_kvq_and_faiss_reach_the_same_error_from_the_same_start(kind, size, entries):
    points, weights = kind(3000, size)
    start = kmeans_plus_plus(points, weights, torch.rand(1, entries, 1, generator=torch.Generator().manual_seed(0)))
    ours = error(points, weights, lloyd(points, weights, start, ITERATIONS, 0.0)).item()
    theirs = error(points, weights, by_faiss(points, weights, entries, start)).item()
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours < 0.9 * error(points, weights, start).item()


@pytest.mark.parametrize("kind", [mixture, heavy_tailed])
@pytest.mark.parametrize(("size", "entries"), [(4, 64), (8, 256)])
def test_weighted_seeding_beats_the_unweighted_seeding_of_faiss(kind, size, entries):
    """On average over seeds."""
    points, weights = kind(3000, size)
    settings = {"iterations": ITERATIONS, "tolerance": 0.0, "engine": "kvq"}
    ours = sum(error(points, weights, weighted_kmeans(points, weights, entries, seed=s, **settings)) for s in range(3))
    theirs = sum(error(points, weights, by_faiss(points, weights, entries, seed=s)) for s in range(3))
    assert ours.item() < theirs.item()


def test_faiss_weights_its_means_but_not_its_objective():
    """The reason why `lloyd_faiss` measures the error itself."""
    points, weights = data(1, 60, 2)
    weights = (4 * weights).ceil()
    repeated = points[0].repeat_interleave(weights[0].long(), dim=0)[None]
    once = by_faiss(points, weights, 8, points[:, :8])
    assert torch.allclose(once, by_faiss(repeated, torch.ones(repeated.shape[:2]), 8, points[:, :8]), atol=1e-5)
    model = faiss.Kmeans(2, 8, niter=200, min_points_per_centroid=1)
    model.train(points[0].numpy(), weights[0].numpy())
    found = torch.from_numpy(model.centroids)[None]
    assert model.obj[-1] == pytest.approx(error(points, torch.ones_like(weights), found).item(), rel=1e-4)
    assert model.obj[-1] < 0.9 * error(points, weights, found).item()


def test_lloyd_faiss_stops_by_the_weighted_error():
    points, weights = data(3, 4000, 4)
    start = kmeans_plus_plus(points, weights, torch.rand(3, 64, 1, generator=torch.Generator().manual_seed(0)))
    runs = {"none": (0, 0.0), "early": (200, 5e-3), "late": (200, 0.0)}  # iterations and tolerance
    none, early, late = (error(points, weights, lloyd_faiss(points, weights, start, *run)) for run in runs.values())
    assert (late < early).all() and (early <= 1.03 * late).all() and (early < 0.9 * none).all()


def test_result_does_not_depend_on_the_scale_of_weights():
    points, weights = data(2, 300, 2)
    start = points[:, :16].clone()
    start[:, 10:] += 500  # empty clusters: faiss splits others to replace them
    moved = lloyd_faiss(points, weights, start, 10, 0.0)
    assert moved.equal(lloyd_faiss(points, weights * 2.0**-30, start, 10, 0.0))
    assert (error(points, weights, moved) < error(points, weights, start[:, :10])).all()


@pytest.mark.parametrize("kind", ["equal", "zero", "few"])
def test_points_without_spread_or_weight_give_finite_centroids(kind):
    points = torch.full((2, 30, 3), 2.5)
    weights = torch.zeros(2, 30) if kind == "zero" else torch.ones(2, 30)
    if kind == "few":
        points[:, 0], weights[:, 2:] = -1.0, 0.0
    books = weighted_kmeans(points, weights, 8, engine="faiss")
    # faiss splits a cluster in two by 1/1024 of its centroid, also where all its points are the same.
    assert (error(points, weights, books) <= weights.sum(-1) * 3 * (2.5 / 512) ** 2).all()


def test_codebook_does_not_depend_on_others_in_the_batch():
    points, weights = data(5, 600, 4)
    together = weighted_kmeans(points, weights, 64, seed=5, engine="faiss")
    assert together.equal(weighted_kmeans(points, weights, 64, seed=5, engine="faiss"))
    assert not together.equal(weighted_kmeans(points, weights, 64, seed=6, engine="faiss"))
    assert together[:2].equal(weighted_kmeans(points[:2], weights[:2], 64, seed=5, engine="faiss"))


@pytest.mark.parametrize(
    ("engine", "entries", "chosen"),
    [("auto", 256, "kvq"), ("auto", 1024, "kvq"), ("auto", 1025, "faiss"), ("kvq", 4096, "kvq"), ("faiss", 2, "faiss")],
)
def test_engine_is_chosen_by_codebook_size(engine, entries, chosen):
    assert choose_engine(engine, entries) == chosen


def test_without_faiss_auto_is_kvq_and_faiss_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(kmeans, "find_spec", lambda name: None)
    assert choose_engine("auto", 4096) == "kvq"
    with pytest.raises(KvqError, match=r"--kmeans faiss needs .* pip install '\.\[faiss\]'"):
        choose_engine("faiss", 256)


def test_large_codebooks_are_clustered_by_faiss():
    points, weights = data(1, 4000, 4)
    settings = {"iterations": 3, "seed": 1}
    books = {name: weighted_kmeans(points, weights, 1025, engine=name, **settings) for name in ("auto", "faiss", "kvq")}
    assert books["auto"].equal(books["faiss"]) and not books["auto"].equal(books["kvq"])
    faiss_error, kvq_error = (error(points, weights, books[name]).item() for name in ("faiss", "kvq"))
    assert faiss_error == pytest.approx(kvq_error, rel=0.02)


def test_faiss_is_not_imported_unless_it_clusters():
    # Importing the calibration's other modules takes seconds: their text shows that none imports it at once.
    sources = set(Path(kmeans.__file__).parents[1].rglob("*.py"))
    assert not any(re.search(r"^(import|from) .*faiss", source.read_text(), re.M) for source in sources - {FAISS})
    script = (
        "import sys, torch\n"
        "from kvq_cli.calibration.kmeans import choose_engine, weighted_kmeans\n"
        "choose_engine('faiss', 256)\n"
        "weighted_kmeans(torch.rand(1, 50, 2), torch.rand(1, 50), 4)\n"
        "assert 'faiss' not in sys.modules\n"
        "weighted_kmeans(torch.rand(1, 50, 2), torch.rand(1, 50), 4, engine='faiss')\n"
        "assert 'faiss' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_gpu_index_is_used_where_faiss_supports_gpus(monkeypatch):
    """With a stand-in for faiss, so that the test needs no GPU."""
    stand_in = SimpleNamespace(
        get_num_gpus=lambda: 2,
        GpuIndexFlatConfig=SimpleNamespace,
        StandardGpuResources=lambda: "memory",
        GpuIndexFlatL2=lambda memory, size, config: ("gpu", memory, size, config.device),
        IndexFlatL2=lambda size: ("cpu", size),
    )
    monkeypatch.setattr(kmeans_faiss, "faiss", stand_in)
    assert kmeans_faiss._flat_index(4, torch.device("cuda:1")) == ("gpu", "memory", 4, 1)
    assert kmeans_faiss._flat_index(4, torch.device("cpu")) == ("cpu", 4)
    stand_in.get_num_gpus = lambda: 0
    assert kmeans_faiss._flat_index(4, torch.device("cuda:1")) == ("cpu", 4)


@pytest.mark.slow
def test_artifact_calibrated_with_faiss_matches_kvq_in_error_and_perplexity(kvq, fails):
    """On the built-in model; the config names the engine."""
    small = ["--samples", 4, "--seqlen", 256, "--points", 1024, "--iterations", 10, "--device", "cpu"]
    perplexities, errors = {}, {}
    for engine in ("kvq", "faiss"):
        made = kvq("calibrate", *small, "--kmeans", engine, "--out", engine)
        assert made.exit_code == 0, made.output
        config = load_artifact(engine).config
        assert config["calibration"]["kmeans"] == engine
        assert config["versions"].get("faiss") == (faiss.__version__ if engine == "faiss" else None)
        assert f"--kmeans {engine}" in (load_artifact(engine).path / "README.md").read_text()
        errors[engine] = [layer[kind]["chosen"]["fisher"] for layer in config["errors"]["layers"] for kind in "kv"]
        evaluated = kvq(
            *("eval", "--task", "perplexity", "--artifact", engine, "--seqlen", 256, "--samples", 2),
            *("--device", "cpu", "--out", f"results-{engine}", "--json"),
        )
        assert evaluated.exit_code == 0, evaluated.output
        perplexities[engine] = json.loads(evaluated.stdout)["results"]["perplexity"]["perplexity,none"]
    assert perplexities["faiss"] == pytest.approx(perplexities["kvq"], rel=0.05)
    assert sum(errors["faiss"]) == pytest.approx(sum(errors["kvq"]), rel=0.05)
    fails("calibrate", *small, "--kmeans", "kvq", "--out", "faiss", "--resume", code=2, says="another calibration")
