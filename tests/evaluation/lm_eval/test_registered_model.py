"""The model `kvq` in lm-eval's registry and command line."""

import json

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import kvq_cli.evaluation.lm_eval.registered_model
from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.lm_eval.__main__ import main
from kvq_cli.evaluation.lm_eval.model import AttachedLM
from kvq_cli.methods.registry import build

METHOD = {"method": "kivi", "bits": 2, "residual": 32}


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def task(data_dir):
    """A choice among letters as lm-eval itself loads it, from a file."""
    return {
        "task": "letters_here",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data_dir / "nobody" / "letters" / "test.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{story}}\nAnswer:",
        "doc_to_choice": [" alpha", " beta and more", " gamma"],
        "doc_to_target": "label",
    }


@pytest.fixture
def run(folder, task, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
    models = []

    def start(use_cache=None, **arguments):
        model = get_model("kvq").create_from_arg_obj({"pretrained": folder, **arguments}, {"device": "cpu"})
        models.append(model)
        manager = TaskManager(include_defaults=False)
        return simple_evaluate(model, tasks=[task], task_manager=manager, use_cache=use_cache, bootstrap_iters=1)

    yield start
    for model in models:
        model.close()


def answers(results):
    return [one["filtered_resps"] for one in results["samples"]["letters_here"]]


def test_lm_eval_runs_a_task_and_reports_cache_sizes(run, loaded):
    packed, exact = run(**METHOD), run(method="fp16")
    assert answers(packed) != answers(exact)
    told = packed["config"]["kvq"]
    assert told["method"] | METHOD | {"name": "kivi"} == told["method"] | {"method": "kivi"}
    assert told["cache"]["compressed_tokens"] > 30
    assert told["cache"]["bytes"] < 0.7 * exact["config"]["kvq"]["cache"]["bytes"]
    json.dumps(told)
    with attach(loaded.model, build("kivi", bits=2, residual=32), prefill="compressed") as attached:
        model = AttachedLM(loaded, attached)
        pairs = [tuple(one) for one in packed["samples"]["letters_here"][0]["arguments"]]
        asked = [Instance("loglikelihood", {}, pair, 0, ("a", 0, 1)) for pair in pairs]
        assert model.loglikelihood(asked, disable_tqdm=True) == answers(packed)[0]


def test_response_cache_is_bound_to_one_method(run, tmp_path):
    cache = str(tmp_path / "responses")
    first = run(use_cache=cache, **METHOD)
    again = run(use_cache=cache, **METHOD)
    assert answers(again) == answers(first)
    assert "cache" not in again["config"]["kvq"]  # nothing was computed
    for other in ({**METHOD, "bits": 4}, {**METHOD, "residual": 64}, {"method": "fp16"}, {**METHOD, "max_length": 900}):
        with pytest.raises(UsageError, match="responses_rank0.db holds the responses of another model or method"):
            run(use_cache=cache, **other)
    assert answers(run(use_cache=str(tmp_path / "other"), **{**METHOD, "bits": 4})) != answers(first)


def test_nothing_compressed_is_an_error(run):
    with pytest.raises(KvqError, match="kivi compressed no token"):
        run(**{**METHOD, "residual": 1024})


def test_contradictory_or_unknown_arguments_are_refused(folder, tmp_path):
    model = get_model("kvq")
    assert model is kvq_cli.evaluation.lm_eval.registered_model.KvqLM
    for arguments, message in (
        ({}, "name a method"),
        ({"artifact": str(tmp_path), "bits": 2}, "drop the others"),
        ({"method": "kivi", "residul": 3}, "residul"),
        ({"method": "kivi", "batch_size": "auto"}, "--batch_size auto: must be a number"),
        ({"method": "temporalkv"}, "kvq calibrate"),
    ):
        with pytest.raises(UsageError, match=message):
            model(folder, device="cpu", **arguments)


def test_artifact_defines_the_options(kvq, folder, tmp_path):
    small = ["--samples", 6, "--seqlen", 100, "--gradients", 4, "--points", 300, "--iterations", 3]
    made = kvq("calibrate", "--model", folder, "--method", "channelkv", "--bits", 4, "--out", "made", *small)
    assert made.exit_code == 0, made.output
    model = get_model("kvq")(folder, artifact="made", device="cpu")
    identity = model.identity
    model.close()
    assert identity["method"]["name"] == "channelkv" and identity["method"]["bits"] == 4
    assert identity["artifact"] == load_artifact(tmp_path / "made").digest


def test_lm_evals_command_reports_errors_in_one_line(monkeypatch, capsys):
    def fail():
        assert get_model("kvq").__name__ == "KvqLM"
        raise UsageError("name a method")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err == "kvq: error: name a method\n"
