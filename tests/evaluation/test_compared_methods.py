"""Labels, result folders and identities of compared methods and artifacts."""

from pathlib import Path

import pytest
from random_artifacts import random_parts, tiny_model

from kvq_cli.artifact import save_artifact
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.methods.registry import build, method_names
from kvq_cli.resolve import resolve_compared


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    """Makes an artifact of temporalkv in a folder, with random centroids for a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvq_cli.models.model_config", lambda *_, **__: tiny_model().config)

    def make(folder, bits, seed=0, **options):
        method = build("temporalkv", bits=bits, **options)
        save_artifact(folder, *random_parts(method, tiny_model(), "reference", seed), "card")
        return tmp_path / folder

    return make


def _labels(*arguments, **options):
    return [one.label for one in compared_methods(resolve_compared("reference", *arguments, **options))]


def test_default_artifacts_are_found(artifact):
    with pytest.raises(KvqError, match="run `kvq calibrate --method temporalkv --bits 2`"):
        _labels(["fp16", "temporalkv"], 2)
    artifact("artifacts/reference/temporalkv-2bit", 2)
    artifact("artifacts/reference/temporalkv-4bit", 4)
    assert _labels(["fp16", "temporalkv", "temporalkv-4bit"], 2) == ["fp16", "temporalkv-2bit", "temporalkv-4bit"]


def test_given_artifact_replaces_its_methods_default(artifact):
    mine = artifact("mine", 2, sinks=4)
    chosen = resolve_compared("reference", ["temporalkv", "fp16"], 2, [mine])
    assert chosen[0].path == mine and len(chosen) == 2
    assert _labels(["fp16"], None, [mine]) == ["fp16", "temporalkv-2bit"]
    assert _labels(["fp16", str(mine)]) == ["fp16", "temporalkv-2bit"]
    assert _labels(["fp16", str(artifact("with: a colon", 2))]) == ["fp16", "temporalkv-2bit"]


def test_given_artifact_serves_every_configuration_that_it_fits(artifact):
    default, mine = artifact("artifacts/reference/temporalkv-2bit", 2), artifact("mine", 2, seed=1)
    names = ["temporalkv", "temporalkv:sinks=0", "temporalkv-2bit:recent=32"]
    chosen = resolve_compared("reference", names, 2, [mine])
    assert [one.path for one in chosen] == [mine] * 3
    assert [(one.method_config["sinks"], one.method_config["recent"]) for one in chosen][1:] == [(0, 0), (8, 32)]
    both = resolve_compared("reference", names[:2], 2, [mine, default.resolve()])
    assert [one.path for one in both] == [mine, default, mine, default]


def test_given_artifact_is_not_used_with_options_of_another_calibration(artifact):
    mine, without = artifact("mine", 2), artifact("artifacts/reference/temporalkv-2bit-fisher-off", 2, fisher=False)
    chosen = resolve_compared("reference", ["temporalkv:fisher=off", "temporalkv"], 2, [mine])
    assert [one.path for one in chosen] == [without.relative_to(without.parents[2]), mine]
    with pytest.raises(UsageError, match=r"fisher=off: the artifact .*mine was calibrated with fisher=on"):
        resolve_compared("reference", ["temporalkv:fisher=off"], 2, [mine])


def test_bits_of_run_time_do_not_choose_among_artifacts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvq_cli.models.model_config", lambda *_, **__: tiny_model().config)
    save_artifact("mine", *random_parts(build("oscar", bits=2), tiny_model(), "reference", 0), "card")
    chosen = resolve_compared("reference", ["oscar-4bit", "oscar"], 3, [Path("mine")])
    assert [(one.path, one.method_config["bits"]) for one in chosen] == [(Path("mine"), 4), (Path("mine"), 3)]


def test_labels_of_artifacts_of_one_method_are_their_folders(artifact):
    both = [artifact("one", 2), artifact("other", 2, seed=1)]
    assert _labels([], None, both) == ["one", "other"]
    with pytest.raises(UsageError, match="twice"):
        _labels([], None, [both[0], both[0]])


def test_identity_depends_on_the_artifact(artifact):
    one, other = (
        compared_methods(resolve_compared("reference", [], None, [artifact(f"a{bits}", bits)]))[0] for bits in (2, 4)
    )
    assert one.identity["artifact"] != other.identity["artifact"]
    assert one.identity["method"]["bits"] == 2


def test_labels_name_the_options_that_differ(artifact):
    assert _labels(["kivi", "kivi:sinks=8", "kivi:sinks=8:recent=32"], 2) == [
        "kivi-2bit",
        "kivi-2bit,sinks=8",
        "kivi-2bit,sinks=8,recent=32",
    ]
    assert _labels(["kivi-4bit", "innerq:sign=inside"]) == ["kivi-4bit", "innerq-2bit,sign=inside"]
    assert _labels(["innerq"], options={"sign": "inside"}) == ["innerq-2bit,sign=inside"]
    shared = {"options": {"sinks": "8", "recent": "64"}}
    assert _labels(["kivi", "innerq:sign=inside"], 2, **shared) == ["kivi-2bit", "innerq-2bit,sign=inside"]
    both = [artifact("with", 2), artifact("without", 2, fisher=False)]
    assert _labels([], None, both) == ["temporalkv-2bit", "temporalkv-2bit,fisher=off"]


def test_result_folder_does_not_depend_on_the_comparison(artifact):
    def folders(*arguments, **options):
        return [one.folder for one in compared_methods(resolve_compared("reference", *arguments, **options))]

    shared = {"options": {"sinks": "8"}}
    assert _labels(["kivi", "kivi:residual=64"], 2, **shared) == ["kivi-2bit", "kivi-2bit,residual=64"]
    together = folders(["kivi", "kivi:residual=64"], 2, **shared)
    assert together == ["kivi-2bit,sinks=8", "kivi-2bit,residual=64,sinks=8"]
    assert [*folders(["kivi:sinks=8"], 2), *folders(["kivi:residual=64:sinks=8"], 2)] == together
    one, other = artifact("one", 2), artifact("other", 2, seed=1)
    (first,), (second,), (third,) = folders([], None, [one]), folders([], None, [other]), folders([f"{one}:recent=32"])
    assert first.startswith("temporalkv-2bit,artifact=") and len({first, second, third}) == 3
    assert third.startswith("temporalkv-2bit,recent=32,artifact=") and third.endswith(first.rpartition(",")[2])


@pytest.mark.parametrize("name", method_names())
def test_result_folder_of_default_options_names_bits_only(name):
    chosen = [build(name)]
    others = {"quanto": 2, "palu": 2, "llama-cpp": 8, "per-token-head": 8}  # of those with 4 by default
    chosen += [build(name, bits=others.get(name, 4))] if hasattr(chosen[0], "bits") else []
    assert all(one.folder == one.label for one in compared_methods(chosen))


def test_runtime_options_of_an_artifact_can_be_changed(artifact):
    mine = artifact("mine", 2)
    plain, other = resolve_compared("reference", [str(mine), f"{mine}:recent=32"])
    assert other.method_config == {**plain.method_config, "recent": 32}
    one, two = compared_methods([plain, other])
    assert one.identity != two.identity
    with pytest.raises(UsageError, match="was calibrated with share=none"):
        resolve_compared("reference", [f"{mine}:share=8"])


def test_methods_of_many_layers_are_named_by_a_digest():
    """File names have at most 255 bytes."""
    keys, values = (" ".join(["kivi-4bit:pre_rope=on"] * number + ["kivi-2bit"] * (32 - number)) for number in (3, 9))
    chosen = [build("mixed", bits=4, keys=keys, values=each) for each in (keys, values)]
    one, other = compared_methods(chosen)
    assert one.folder != other.folder and all(len(each.folder) < 60 and " " not in each.folder for each in (one, other))
    assert one.label.startswith("mixed-4bit,values=") and one.label != other.label
    assert [each.label for each in compared_methods([build("fp16"), chosen[0]])] == ["fp16", "mixed-4bit"]
