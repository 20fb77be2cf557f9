"""Whole calibrations: deterministic bytes, also when killed and resumed; failures leave no files behind."""

import dataclasses
import errno
import fcntl
import os
import shlex
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from calibrations import Interrupted, contents, run, stop_at

from kvq_cli import attach
from kvq_cli.artifact import load_artifact
from kvq_cli.calibration import capture, estimate, kmeans, pipeline, work_folder
from kvq_cli.calibration.estimate import dry_run_report
from kvq_cli.calibration.kinds import codebooks
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.samples import SampleCapture
from kvq_cli.calibration.settings import CalibrationOptions, calibrate_command
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build, build_parsed


def test_artifact_bytes_depend_on_the_seed_only(tiny, quick, tmp_path):
    first = run(tiny, quick, tmp_path / "a")
    run(tiny, quick, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    other = run(tiny, dataclasses.replace(quick, seed=1), tmp_path / "c")
    assert other.digest != first.digest
    assert not all(torch.equal(other.tensors[name], first.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("temporalkv", {"bits": 1}),
        ("temporalkv", {"bits": 4, "hybrid": "head"}),
        ("temporalkv", {"hybrid": "off", "normalize_values": True, "fisher": False}),
        ("temporalkv", {"shapes": "all", "outliers": 0.02, "sinks": 4}),
        ("channelkv", {"bits": 4}),
        ("channelkv", {"bits": 1, "outliers": 0.02, "fisher": False}),
        ("kvquant", {"bits": 1}),
        ("kvquant", {"bits": 3, "outliers": 0.0, "sinks": 1}),
    ],
)
def test_artifact_runs_and_dry_run_lists_its_tensors(tiny, quick, tmp_path, method, options):
    built = build(method, **options)
    plan = plan_calibration(tiny, built, dataclasses.replace(quick, seqlen=192))
    report = dry_run_report(plan)
    artifact = pipeline.calibrate(plan, tmp_path / "a")
    assert artifact.config["sizes"]["total"] == report["artifact_bytes"]
    kinds = {name.split(".", 2)[2].replace(f".{shape}", ".<shape>") for name in artifact.tensors for shape in ("x",)}
    assert {kind.split(".")[1] for kind in kinds} == {t["name"].split(".")[3] for t in report["tensors"]}
    ids = torch.randint(0, 300, (1, 90), generator=torch.Generator().manual_seed(0))
    exact = tiny.model(ids).logits
    with attach(tiny.model, artifact, prefill="compressed") as attached:
        lossy = tiny.model(ids, past_key_values=attached.new_cache()).logits
    assert lossy.isfinite().all()
    assert torch.equal(lossy[:, 0], exact[:, 0]) or torch.allclose(lossy[:, 0], exact[:, 0], atol=1e-4)
    assert not torch.allclose(lossy[:, -1], exact[:, -1], atol=1e-3)


def test_config_and_card_record_method_data_and_command(tiny, quick, tmp_path):
    built = build("temporalkv", bits=4, sinks=12)
    artifact = run(tiny, quick, tmp_path / "a", built)
    config = artifact.config
    options = dataclasses.asdict(built)
    del options["local"]  # configs leave it out at its default
    assert config["method"] == {"name": "temporalkv"} | options
    assert config["calibration"] == dataclasses.asdict(dataclasses.replace(quick, kmeans="kvq"))  # chosen by "auto"
    assert config["captured"] == {"tokens": 6 * 88, "tokens_with_gradients": 4 * 88, "tokens_held_out": 88}
    assert len(config["errors"]["layers"]) == 2 and set(config["errors"]["layers"][0]) == {"k", "v"}
    card = (tmp_path / "a" / "README.md").read_text()
    command = f"kvq calibrate --method temporalkv --bits 4 --set sinks=12 --model {tiny.name} --dtype float32"
    assert f"{command} --dataset prose" in card
    assert str(tmp_path / "a") not in card
    artifact.check_model(tiny.model)


def test_the_card_gives_floats_exactly(tiny, quick):
    options = dataclasses.replace(quick, damping=0.12345678901, budget=1 / 3)
    plan = plan_calibration(tiny, build("klt", bits=6.2345678901), options)
    words = shlex.split(calibrate_command(plan.method, plan.loaded, plan.settings_dict()))
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert [float(given[name]) for name in ("--bits", "--damping", "--disk")] == [6.2345678901, 0.12345678901, 1 / 3]
    plan = plan_calibration(tiny, build("klt", bits=6.0), quick)
    assert "--bits 6 " in calibrate_command(plan.method, plan.loaded, plan.settings_dict())


def test_budget_captures_random_units_of_tokens(tiny, quick, tmp_path, monkeypatch):
    per_token = 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, channels, bytes
    options = dataclasses.replace(quick, seqlen=200, budget=10 * 120 * per_token / 2**30)
    plan = plan_calibration(tiny, build("temporalkv"), options)
    assert plan.capture.tokens == 120 and plan.capture.nbytes == 10 * 120 * per_token
    monkeypatch.setattr(work_folder.WorkFolder, "remove", lambda self: None)
    artifact = pipeline.calibrate(plan, tmp_path / "a")
    assert artifact.config["captured"]["tokens"] == 6 * 120
    captured = sum(path.stat().st_size for path in (tmp_path / "a.work").glob("*.bf16"))
    assert captured == plan.capture.nbytes
    sampled = SampleCapture(torch.empty(6, 200), plan.capture, gradients=4, seed=0, near=0)
    kept = [sampled.tokens(sample) for sample in range(6)]
    for tokens in kept:
        runs = tokens.view(-1, 4)
        assert (runs[:, 0] % 4 == 0).all() and (runs.diff(dim=1) == 1).all()  # 8 + 4 i, and then in order
        assert (runs[:, 0].diff() > 0).all() and tokens.min() >= 8 and tokens.max() < 200
    assert len({tuple(tokens.tolist()) for tokens in kept}) == 6


def test_default_samples_hold_64_times_2048_tokens(tiny):
    def sizes(loaded, **given):
        resolved = CalibrationOptions(**given).resolve(loaded, 256)
        return resolved.samples, resolved.seqlen, resolved.gradients, resolved.held_out

    assert sizes(tiny) == (512, 256, 512, 64)  # the tiny model's context
    assert sizes(tiny, seqlen=64) == (2048, 64, 2048, 256)
    assert sizes(tiny, samples=3) == (3, 256, 3, 1)
    assert sizes(dataclasses.replace(tiny, name="reference")) == (512, 256, 512, 64)
    tiny.model.config.max_position_embeddings = 1 << 20
    assert sizes(tiny) == (64, 2048, 64, 8)
    assert sizes(dataclasses.replace(tiny, name="reference")) == (128, 1024, 128, 16)
    assert sizes(tiny, seqlen=1 << 20, samples=4) == (4, 1 << 20, 4, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seqlen": 300}, "--seqlen 300 is more than the 256 tokens of .*tiny's context"),
        ({"gradients": 7}, "--gradients 7 must be .*at most 6"),
        ({"gradients": 1}, "--gradients 1 must be at least 2"),
        ({"seqlen": 40}, "tokens are too few for codebooks of 256 entries.* raise --seqlen or --gradients"),
        ({"seqlen": 40, "gradients": None}, "raise --seqlen or --samples .*--samples 6 with 1 of them held out"),
        ({"seqlen": 6}, "too few"),
        ({"budget": 1e-6}, "raise --disk"),
        ({"budget": 0.0}, "--disk must be above 0"),
    ],
)
def test_impossible_options_are_refused_before_the_model_runs(tiny, quick, change, says):
    with pytest.raises(UsageError, match=says):
        plan_calibration(tiny, build("temporalkv"), dataclasses.replace(quick, **change))


def test_methods_that_cannot_be_calibrated_are_refused(tiny, quick):
    with pytest.raises(UsageError, match="fp16 needs no calibration"):
        plan_calibration(tiny, build("fp16"), quick)
    with pytest.raises(UsageError, match="share=3 does not divide head_dim=8"):
        plan_calibration(tiny, build("temporalkv", share=3), quick)


@pytest.mark.parametrize(("allocate", "bits", "least"), [("model", 3.7, 3.75), ("stream", 4.9, 5.0)])
def test_fewer_bytes_than_transforms_need_are_refused(tiny, quick, allocate, bits, least):
    """2 layers, keys by head (2), values together: 5 bytes for each of 6 transforms, or 10 for each of 4 streams."""
    with pytest.raises(UsageError, match=rf"klt: bits={bits:g} are .* set bits={least:g} or more"):
        plan_calibration(tiny, build("klt", bits=bits, join_values=True, allocate=allocate), quick)
    plan_calibration(tiny, build("klt", bits=least, join_values=True, allocate=allocate), quick)


def test_blocks_longer_than_the_captured_tokens_are_refused(tiny, quick):
    wide = dataclasses.replace(tiny, shape=dataclasses.replace(tiny.shape, head_dim=128))
    mixed = build("mixed", bits=16, keys="kivi-2bit:group=128", values="fp16")
    with pytest.raises(UsageError, match=r"keys of layer 0 .* blocks of 128 tokens, and 88 tokens are .*--seqlen"):
        plan_calibration(wide, mixed, quick)
    plan_calibration(wide, mixed, dataclasses.replace(quick, seqlen=136))


def test_failure_leaves_no_files(tiny, quick, tmp_path, monkeypatch):
    with pytest.raises(KvqError, match="too short: .* tokens found, 600 needed"):
        (tmp_path / "short.txt").write_text("Too short.")
        run(tiny, dataclasses.replace(quick, dataset=str(tmp_path / "short.txt")), tmp_path / "a")
    tiny.model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(KvqError, match="layers.1.self_attn: its keys or values hold NaN or infinity"):
        run(tiny, quick, tmp_path / "a")
    assert os.listdir(tmp_path) == ["short.txt"]


@pytest.mark.parametrize("method", ["klt-6bit", "temporalkv", "xquant"])
def test_artifacts_of_values_that_are_always_zero_load(tiny, quick, tmp_path, method):
    tiny.model.model.layers[0].self_attn.v_proj.weight.data[8:] = 0  # the second head
    tiny.model.model.layers[1].self_attn.v_proj.weight.data[:] = 0
    made = run(tiny, quick, tmp_path / "a", build_parsed(method))
    assert load_artifact(tmp_path / "a").digest == made.digest


def test_an_artifact_that_could_not_be_loaded_is_not_written(tiny, quick, tmp_path, monkeypatch):
    first = run(tiny, quick, tmp_path / "a")
    calibrate = codebooks.calibrate_stream

    def without_a_number(*args, **options):
        tensors, errors = calibrate(*args, **options)
        return tensors, errors | {"adjacent_token_correlation": float("nan")}

    monkeypatch.setattr(codebooks, "calibrate_stream", without_a_number)
    says = r"not written, since it could not be loaded: .*layers\[0\]: k.adjacent_token_correlation must be a finite"
    with pytest.raises(KvqError, match=says):
        run(tiny, quick, tmp_path / "a", force=True)
    assert load_artifact(tmp_path / "a").digest == first.digest


@pytest.mark.parametrize("file", ["1.v.g.bf16", "windows.safetensors.new", "1.k.safetensors.new", "config.json"])
def test_full_disk_leaves_no_files(tiny, quick, tmp_path, monkeypatch, file):
    real = open

    def full(path, mode="r", *rest, **options):
        if Path(path).name == file and "r" not in mode.replace("r+", "w"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *rest, **options)

    monkeypatch.setattr(work_folder, "open", full, raising=False)
    monkeypatch.setattr("kvq_cli.artifact.format.open", full, raising=False)
    with pytest.raises(KvqError, match="no space left to write .*: free some, or choose another --out"):
        run(tiny, quick, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_calibrations_share_a_capture_at_the_same_time(tiny, quick, tmp_path, monkeypatch):
    """While the first one captures, a second one waits; once it clusters, a second one reads what it captured."""
    monkeypatch.setattr(work_folder, "_RETRY", 0.01)
    captured, waiting, made, phases = tmp_path / "captured", threading.Event(), [], []

    def second():
        def note(text):
            assert str(captured) in text and "waiting for another calibration" in text
            waiting.set()

        def progress(phase, done, total):
            phases.append((phase, done))

        made.append(run(tiny, quick, tmp_path / "b", captured=captured, note=note, progress=progress))

    thread = threading.Thread(target=second)

    def first(phase, done, total):
        if phase == "capture" and done == 1:
            thread.start()
            assert waiting.wait(60) and "capture" not in dict(phases)
        if phase == "cluster" and done == 0:
            made.append(run(tiny, quick, tmp_path / "c", captured=captured, note=pytest.fail))

    alone = run(tiny, quick, tmp_path / "a", captured=captured, progress=first)
    thread.join()
    assert [each.digest for each in made] == [alone.digest] * 2 == [run(tiny, quick, tmp_path / "d").digest] * 2
    assert [done for phase, done in phases if phase == "capture"] == [quick.samples]  # it captured nothing


def test_a_calibration_that_waited_for_a_dead_one_captures_the_rest(tiny, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "_RETRY", 0.01)
    captured = tmp_path / "captured"

    def interrupt(phase, done, total):
        if phase == "capture" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny, quick, tmp_path / "a", captured=captured, progress=interrupt)
    holder = os.open(next(captured.iterdir()), os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    again = run(tiny, quick, tmp_path / "b", captured=captured, note=lambda _: os.close(holder))
    assert again.digest == run(tiny, quick, tmp_path / "c").digest


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"force": True}])
def test_second_process_in_the_same_folder_is_refused(tiny, quick, tmp_path, flags):
    """The first process still writes the same artifact as alone."""

    def second(phase, done, total):
        if phase == "capture":
            with pytest.raises(KvqError, match=r"a\.work is in use by a running calibration"):
                run(tiny, quick, tmp_path / "a", **flags)

    alone, beside = run(tiny, quick, tmp_path / "alone"), run(tiny, quick, tmp_path / "a", progress=second)
    assert beside.digest == alone.digest
    assert sorted(os.listdir(tmp_path)) == ["a", "alone"]


def test_missing_disk_space_is_reported_before_the_model_runs(tiny, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(KvqError, match="no space left in .*: [1-9].* [KMG]iB are needed while calibrating"):
        run(tiny, quick, tmp_path / "new" / "folders" / "a")
    assert os.listdir(tmp_path) == []


def numbers_bytes(folder: Path, pattern: str) -> int:
    """Bytes of the tensors of these files."""
    return sum(x.nbytes for path in folder.glob(pattern) for x in safetensors.torch.load_file(path).values())


@pytest.mark.parametrize("join", [True, False])
def test_disk_space_counts_transforms(tiny, quick, tmp_path, monkeypatch, join):
    monkeypatch.setattr(work_folder.WorkFolder, "remove", lambda self: None)
    plan = plan_calibration(tiny, build("klt", bits=6.0, join_keys=join), quick)
    pipeline.calibrate(plan, tmp_path / "a")
    transforms = numbers_bytes(tmp_path / "a.work", "*.transform.*")
    assert transforms > 0 and plan.disk_bytes() == plan.capture.nbytes + transforms
    pipeline.calibrate(plan, tmp_path / "b", captured=tmp_path / "captured")
    assert plan.step_bytes() == transforms == numbers_bytes(tmp_path / "b.work", "*.transform.*")


def test_disk_space_counts_sums_of_products(tiny, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.WorkFolder, "remove", lambda self: None)
    plan = plan_calibration(tiny, build("palu"), quick)
    pipeline.calibrate(plan, tmp_path / "a")
    count = torch.tensor([0]).nbytes  # of the tokens that were added
    parts = [numbers_bytes(tmp_path / "a.work", name) for name in ("sums.*", "*.moments.*", "*.factors.s*")]
    assert min(parts) > 0 and plan.disk_bytes() == sum(parts) - count


def test_memory_counts_the_matrices_of_transforms_and_sums(tiny, quick, monkeypatch):
    monkeypatch.setattr(estimate, "_resident_bytes", lambda loaded: 0)
    wide = dataclasses.replace(tiny, shape=dataclasses.replace(tiny.shape, layers=32, kv_heads=16, head_dim=16))
    joined, by_head, palu = (
        dry_run_report(plan_calibration(wide, build(*name, **options), quick))["memory_bytes"]
        for *name, options in (
            ("klt", {"bits": 4.0, "join_values": True}),
            ("klt", {"bits": 4.0}),
            ("palu", {"heads": 16}),
        )
    )
    matrix = 8 * 256 * 256
    assert joined - by_head > 2 * (matrix - 16 * 8 * 16 * 16)  # analysis and synthesis of 256 channels, or of 16 heads
    assert palu > 32 * 2 * matrix


def test_unwritable_output_is_refused(tiny, quick, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvqError, match=r"cannot write .*file/a"):
        run(tiny, quick, tmp_path / "file" / "a")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="not an artifact and will not be replaced"):
        run(tiny, quick, tmp_path / "thesis", force=True)


def test_truncated_captured_samples_are_detected(tiny, quick, tmp_path):
    with pytest.raises(Interrupted):
        run(tiny, quick, tmp_path / "a", progress=stop_at("cluster", 0))
    path = tmp_path / "a.work" / "1.k.x.bf16"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(KvqError, match=r"1\.k\.x\.bf16 is shorter than it was written"):
        run(tiny, quick, tmp_path / "a", resume=True)


def test_captured_activations_are_shared(tiny, quick, tmp_path, monkeypatch):
    """The second method runs no text through the model, and its artifact is the one that its own capture gives."""
    kept = tmp_path / "captured"
    plans = [plan_calibration(tiny, build(*method), quick) for method in (("temporalkv",), ("kvquant",))]
    pipeline.calibrate(plans[0], tmp_path / "first", captured=kept)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "capture", lambda *args, **options: pytest.fail("captured again"))
        pipeline.calibrate(plans[1], tmp_path / "second", captured=kept)
    pipeline.calibrate(plans[1], tmp_path / "alone")
    assert contents(tmp_path / "second") == contents(tmp_path / "alone")
    assert len(os.listdir(kept)) == 1 and sorted(os.listdir(tmp_path)) == ["alone", "captured", "first", "second"]
    other = plan_calibration(tiny, build("kvquant"), dataclasses.replace(quick, seed=1))
    pipeline.calibrate(other, tmp_path / "third", captured=kept)
    assert len(os.listdir(kept)) == 2


def test_a_mixed_method_clusters_each_codebook_by_the_engine_for_its_size(tiny, quick, tmp_path, monkeypatch):
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(kmeans, "MAX_KVQ_ENTRIES", 100)
    parts = {"both": ("kvquant-2bit", "temporalkv-4bit"), "small": ("kvquant-2bit", "fp16")}
    parts["large"] = ("fp16", "temporalkv-4bit")
    made = {
        name: run(tiny, quick, tmp_path / name, build("mixed", bits=16, keys=keys, values=values))
        for name, (keys, values) in parts.items()
    }
    engines = {name: artifact.config["calibration"]["kmeans"] for name, artifact in made.items()}
    assert engines == {"both": "auto", "small": "kvq", "large": "faiss"}
    recorded = {name: artifact.config["versions"].get("faiss") for name, artifact in made.items()}
    assert recorded == {"both": faiss.__version__, "small": None, "large": faiss.__version__}
    alone = {**made["small"].tensors, **made["large"].tensors}
    assert made["both"].tensors.keys() == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in made["both"].tensors.items())


@pytest.mark.parametrize("engine", ["auto", "kvq"])
def test_faiss_is_an_input_where_a_codebook_needs_it(tiny, quick, engine):
    faiss = pytest.importorskip("faiss")
    options = dataclasses.replace(quick, samples=4000, gradients=4000, kmeans=engine)
    keys = {"few": "temporalkv-4bit", "many": "temporalkv-4bit:entries=65536"}
    few, many = (
        plan_calibration(tiny, build("mixed", bits=16, keys=keys[name], values="temporalkv-2bit"), options)
        for name in keys
    )
    assert (few.settings.kmeans, many.settings.kmeans) == ("kvq", engine)
    assert "version of faiss" not in few.named_inputs and many.named_inputs["version of faiss"] == faiss.__version__
    assert few.capture_request() == many.capture_request()  # captured activations do not depend on it


def test_calibration_on_text_sampled_from_the_model(tiny, quick, tmp_path):
    artifact = run(tiny, dataclasses.replace(quick, dataset="self"), tmp_path / "a")
    assert artifact.config["calibration"]["dataset"] == "self"
    assert load_artifact(tmp_path / "a").digest == artifact.digest


@pytest.mark.slow
def test_calibration_and_artifact_do_not_depend_on_the_default_dtype(tiny, quick, tmp_path):
    run(tiny, quick, tmp_path / "a")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        run(tiny, quick, tmp_path / "b")
    finally:
        torch.set_default_dtype(before)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
