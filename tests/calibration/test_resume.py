"""Calibrations that are resumed: what a work folder, shared captures and finished artifacts depend on."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from calibrations import Interrupted, contents, run, stop_at
from reference_model.tokenizer import build as tokenizer_of
from transformers import PreTrainedTokenizerFast

import kvq_cli
from kvq_cli.artifact import load_artifact, save_artifact
from kvq_cli.calibration.kinds import base as plan_module
from kvq_cli.errors import UsageError, WorkerDiedError
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose


@pytest.mark.slow
def test_killed_at_any_step_and_resumed_gives_the_same_artifact(tiny_folder, tmp_path):
    script = Path(__file__).with_name("interrupted.py")
    command = [sys.executable, str(script), str(tiny_folder), str(tmp_path), "8"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    kills = [json.loads(line) for line in ran.stdout.splitlines()]
    assert all(kill["status"] == 0 and kill["equal"] for kill in kills), kills
    killed_in = " ".join(kill["before"] for kill in kills)
    for phase in ("read text", "capture", "numbers", "cluster", "safetensors", "write", "rename"):
        assert phase in killed_in


def test_unfinished_work_is_resumed_with_the_same_request_only(tiny, quick, tmp_path):
    out = tmp_path / "a"
    with pytest.raises(Interrupted):
        run(tiny, quick, out, progress=stop_at("capture", 3))
    assert os.listdir(tmp_path) == ["a.work"]
    with pytest.raises(UsageError, match=r"a\.work holds an unfinished calibration: .* --resume, or .*--force"):
        run(tiny, quick, out)
    with pytest.raises(UsageError, match="begun with another calibration"):
        run(tiny, dataclasses.replace(quick, seed=1), out, resume=True)
    with pytest.raises(UsageError, match="begun with another method"):
        run(tiny, quick, out, build("temporalkv", bits=1), resume=True)
    assert os.listdir(tmp_path) == ["a.work"]
    steps = []
    resumed = run(tiny, quick, out, resume=True, progress=lambda *now: steps.append(now))
    captured = [done for phase, done, _ in steps if phase == "capture"]
    assert captured in ([3, 4, 5, 6], [2, 3, 4, 5, 6])  # parallel samples count when the batch is complete
    assert run(tiny, quick, tmp_path / "b").digest == resumed.digest


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("type of --device", "begun with another type of --device: repeat those options, or start over with --force$"),
        ("version of torch", "begun with another version of torch: .* steps of another version are not continued"),
        ("version of transformers", "begun with another version of transformers: "),
    ],
)
def test_work_of_another_device_or_library_is_not_continued(tiny, quick, tmp_path, key, says):
    with pytest.raises(Interrupted):
        run(tiny, quick, tmp_path / "a", progress=stop_at("capture", 0))
    path = tmp_path / "a.work" / "request.json"
    request = json.loads(path.read_text())
    path.write_text(json.dumps(request | {key: request[key] + "0"}))
    with pytest.raises(UsageError, match=says):
        run(tiny, quick, tmp_path / "a", resume=True)


@pytest.fixture
def other_tokens(tiny):
    """The tiny model with a tokenizer that splits words into letters, and begins with another token."""
    words = "".join(map(chr, range(32, 127)))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of([words], vocabulary=260), bos_token=" ")
    return dataclasses.replace(tiny, tokenizer=tokenizer)


@pytest.mark.parametrize(("method", "dataset"), [("temporalkv", "prose"), ("temporalkv", "self"), ("palu", "prose")])
def test_work_of_another_tokenizer_is_not_continued(tiny, quick, other_tokens, tmp_path, method, dataset):
    options = {"calibration": dataclasses.replace(quick, dataset=dataset), "method": build(method)}
    with pytest.raises(Interrupted):
        run(tiny, out=tmp_path / "a", progress=stop_at("read text", 1), **options)
    with pytest.raises(UsageError, match=r"a\.work was begun with another tokenization of --dataset: "):
        run(other_tokens, out=tmp_path / "a", resume=True, **options)
    run(tiny, out=tmp_path / "a", resume=True, **options)


def test_captures_of_another_tokenizer_are_not_shared(tiny, quick, other_tokens, tmp_path):
    for name, loaded in (("first", tiny), ("second", other_tokens)):
        run(loaded, quick, tmp_path / name, captured=tmp_path / "captured")
        assert contents(run(loaded, quick, tmp_path / "alone", force=True).path) == contents(tmp_path / name)
    assert len(list((tmp_path / "captured").iterdir())) == 2


def test_captures_of_another_library_are_not_shared(tiny, quick, tmp_path, monkeypatch):
    for version in ("1.0", "2.0"):
        monkeypatch.setattr(plan_module, "library_versions", lambda version=version: {"torch": version})
        with pytest.raises(Interrupted):
            run(tiny, quick, tmp_path / version, captured=tmp_path / "captured", progress=stop_at("capture", 0))
    assert len(list((tmp_path / "captured").iterdir())) == 2


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"force": True}])
def test_folder_of_another_in_place_of_the_work_is_kept(tiny, quick, tmp_path, flags):
    (tmp_path / "a.work").mkdir()
    (tmp_path / "a.work" / "precious.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"a\.work holds 'precious.txt', and no calibration: move it"):
        run(tiny, quick, tmp_path / "a", **flags)
    assert os.listdir(tmp_path) == ["a.work"] and os.listdir(tmp_path / "a.work") == ["precious.txt"]


def test_force_starts_over(tiny, quick, tmp_path):
    out = tmp_path / "a"
    with pytest.raises(Interrupted):
        run(tiny, quick, out, progress=stop_at("capture", 3))
    other = run(tiny, dataclasses.replace(quick, seed=1), out, force=True)
    assert other.config["calibration"]["seed"] == 1
    with pytest.raises(UsageError, match="exists already.*--force"):
        run(tiny, quick, out)
    assert run(tiny, quick, out, force=True).digest == run(tiny, quick, tmp_path / "b").digest
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_interrupted_replacement_is_resumed_with_both_options(tiny, quick, tmp_path):
    """`--resume` beside the `--force` of the interrupted command."""
    out, steps = tmp_path / "a", []
    first = run(tiny, dataclasses.replace(quick, seed=1), out)
    with pytest.raises(Interrupted):
        run(tiny, quick, out, force=True, progress=stop_at("capture", 3))
    again = run(tiny, quick, out, force=True, resume=True, progress=lambda *now: steps.append(now))
    assert next(done for phase, done, _ in steps if phase == "capture") >= 2
    assert again.digest == run(tiny, quick, tmp_path / "b").digest != first.digest
    assert run(tiny, dataclasses.replace(quick, seed=1), out, force=True, resume=True).digest == first.digest


def test_dead_workers_leave_the_finished_steps(tiny, quick, tmp_path):
    def die(*now):
        if now[:2] == ("capture", 3):
            raise WorkerDiedError("a worker died 4 times")

    with pytest.raises(WorkerDiedError):
        run(tiny, quick, tmp_path / "a", progress=die)
    steps = []
    run(tiny, quick, tmp_path / "a", resume=True, progress=lambda *now: steps.append(now))
    assert next(done for phase, done, _ in steps if phase == "capture") >= 2


def test_resume_of_a_finished_or_unstarted_calibration(tiny, quick, tmp_path):
    first = run(tiny, quick, tmp_path / "a", resume=True)
    steps = []
    again = run(tiny, quick, tmp_path / "a", resume=True, progress=lambda *now: steps.append(now))
    assert again.digest == first.digest and steps == []
    with pytest.raises(UsageError, match=r"a was made with another calibration: .*--force"):
        run(tiny, dataclasses.replace(quick, seed=1), tmp_path / "a", resume=True)


def test_finished_artifacts_of_other_inputs_are_not_returned(tiny, quick, tmp_path, monkeypatch):
    text = tmp_path / "own.txt"
    text.write_text(prose("calibration")[:60_000])
    out, own = tmp_path / "a", dataclasses.replace(quick, dataset=str(text))
    first = run(tiny, own, out)
    assert run(tiny, own, out, resume=True, note=pytest.fail).digest == first.digest

    text.write_text(prose("calibration")[60_000:120_000])
    with pytest.raises(UsageError, match=r"a was made with another text of --dataset: .*--force"):
        run(tiny, own, out, resume=True)
    text.write_text(prose("calibration")[:60_000])
    with monkeypatch.context() as patch:
        patch.setattr(kvq_cli, "RESULTS", 0)
        with pytest.raises(UsageError, match="made with another version of results: "):
            run(tiny, own, out, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "library_versions", lambda: {"torch": "0", "transformers": "0"})
        with pytest.raises(UsageError, match="made with another version of torch, version of transformers: "):
            run(tiny, own, out, resume=True)
    tiny.model.model.layers[0].mlp.up_proj.weight[0, 0] += 1  # not part of the fingerprint, which is compared, too
    with pytest.raises(UsageError, match="made with another weights of --model: "):
        run(tiny, own, out, resume=True)
    assert load_artifact(out).digest == first.digest


def test_finished_artifacts_without_recorded_inputs_are_returned_with_a_note(tiny, quick, tmp_path):
    first = run(tiny, quick, tmp_path / "a")
    older = {key: value for key, value in first.config.items() if key not in ("inputs", "files", "checksum")}
    saved = save_artifact(tmp_path / "a", older, first.tensors, "card", overwrite=True)
    notes = []
    assert run(tiny, quick, tmp_path / "a", resume=True, note=notes.append).digest == saved.digest
    assert len(notes) == 1 and "does not record the text and the weights that it was made from" in notes[0]


def test_an_edited_text_is_captured_again(tiny, quick, tmp_path):
    text, tokens = tmp_path / "numbers.txt", []
    options = {"calibration": dataclasses.replace(quick, dataset=str(text)), "captured": tmp_path / "captured"}
    for step in (1, 7):
        text.write_text(" ".join(map(str, range(0, 4000 * step, step))))
        tokens.append(run(tiny, out=tmp_path / str(step), **options).digest)
    assert len(list((tmp_path / "captured").iterdir())) == 2 and tokens[0] != tokens[1]
