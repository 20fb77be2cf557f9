"""`kvq eval` end to end: documents, tables, resume, and one-line errors."""

import json

import pytest


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def evaluate(kvq, folder):
    def run(*arguments):
        return kvq("eval", "--model", folder, "--templates", "reference", "--seqlen", 160, "--samples", 1, *arguments)

    return run


def test_single_method_prints_lm_evals_document(evaluate, folder, tmp_path):
    result = evaluate("--task", "vt,perplexity", "--seqlen", 512, "--method", "kivi", "--bits", 2, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document["results"]) == {"vt", "perplexity"}
    assert document["config"]["method"]["bits"] == 2
    kept = tmp_path / "results" / folder.name
    assert json.loads((kept / "kivi-2bit" / "results.json").read_text()) == document
    assert (kept / "comparison.json").is_file()
    assert "kivi-2bit" in result.stderr  # the table


def test_several_methods_print_a_table_and_one_document_each(evaluate):
    arguments = ("--compare", "fp16,kivi-2bit,kivi", "--bits", 4, "--out", "here")
    shown = evaluate(*arguments)
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split()[0] for line in shown.stdout.splitlines() if line.startswith((" fp16", " kivi"))]
    assert rows == ["fp16", "kivi-2bit", "kivi-4bit"]
    assert "chat template" not in shown.stderr  # perplexity has no prompts
    document = json.loads(evaluate(*arguments, "--json").stdout)
    assert list(document["methods"]) == rows
    kl = [document["methods"][label]["results"]["perplexity"]["kl,none"] for label in rows]
    assert kl[1] > kl[2] > kl[0]


def test_wide_table_is_transposed(evaluate):
    result = evaluate("--task", "vt,fwe,qa_1,qa_2,niah_single_1,perplexity", "--seqlen", 640, "--method", "fp16")
    assert result.exit_code == 0, result.stderr
    words = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert "chat template: not applied" in result.stderr
    assert words[:2] == ["run", "method"] and {"vt", "qa_2", "perplexity"} <= set(words[2:])


def test_quiet_prints_only_the_table(evaluate):
    assert evaluate("--method", "fp16", "--quiet").stderr == ""


def test_options_from_yaml(evaluate, tmp_path):
    (tmp_path / "run.yaml").write_text("task: [vt]\nmethod: kivi\nset: {residual: 32}\n")
    result = evaluate("--config", "run.yaml", "--seqlen", 512, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert list(document["results"]) == ["vt"] and document["config"]["method"]["residual"] == 32


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--task", "niah"], 2, "unknown task 'niah'; valid: ruler, perplexity, drift, niah_single_1"),
        (["--task", "niah_singel_1"], 2, "; did you mean 'niah_single_1'?"),
        (["--task", "gsm8k"], 2, "lm_eval:NAME with any task of lm-eval; did you mean 'lm_eval:gsm8k'?"),
        (["--compare", "fp16,zip"], 2, "unknown method 'zip'"),
        (["--compare", "fp16,fp16"], 2, "twice"),
        (["--compare", ""], 2, "--compare '': must be names joined by commas"),
        (["--compare", "fp16,kivi", "--method", "kivi"], 2, "use one of them"),
        (["--method", "kivi", "--bits", "7"], 2, "7"),
        (["--method", "kivi", "--seqlen", "96", "--prompt-tokens", "96"], 2, "--prompt-tokens 96: windows of 96"),
        (["--method", "temporalkv", "--bits", "2"], 1, "kvq calibrate --method temporalkv --model"),
        (["--method", "fp16", "--dataset", "no-such-data"], 2, "no-such-data"),
        (["--method", "fp16", "--seqlen", "4096"], 2, "--seqlen 4096"),
        (["--method", "fp16", "--task", "vt", "--seqlen", "12,x"], 2, "--seqlen 12,x"),
        (["--method", "fp16", "--task", "qa_1", "--seqlen", "512", "--qa-file", "none.json"], 1, "none.json"),
        (["--method", "fp16", "--out", "taken"], 1, "choose another --out"),
        (
            ["--method", "fp16", "--out", "results", "--store", "taken"],
            1,
            "taken: Not a directory; choose another --store",
        ),
        (["--method", "fp16", "--plot", "taken/x.png"], 1, "taken: Not a directory; choose another --plot"),
    ],
)
def test_bad_input_is_one_line(fails, folder, tmp_path, arguments, code, says):
    (tmp_path / "taken").write_text("")
    fails("eval", "--model", folder, *arguments, code=code, says=says)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("flags", "says"), [([], "the same command"), (["--fresh"], "the same command without --fresh")]
)
def test_ctrl_c_keeps_finished_samples(kvq, folder, tmp_path, monkeypatch, flags, says):
    """Interrupted while the second sample is answered: 130, and the first one is not evaluated again."""
    from kvq_cli.evaluation.ruler import evaluation

    real, calls = evaluation.generate_answers, []

    def generate_answers(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(evaluation, "generate_answers", generate_answers)
    arguments = ["eval", "--model", folder, "--task", "vt", "--seqlen", 512, "--samples", 2, "--batch-size", 1]
    arguments += ["--templates", "reference", "--method", "kivi", "--out", "out"]
    result = kvq(*arguments, *flags)
    assert (result.exit_code, result.stdout) == (130, "")
    assert f"finished samples are kept in out: run {says} to resume" in result.stderr
    assert not list((tmp_path / "out").rglob("*.json"))
    assert kvq(*arguments).exit_code == 0
    assert len(calls) == 3


def test_ctrl_c_before_the_first_sample_keeps_fresh(kvq, folder, monkeypatch):
    """Earlier samples may not be discarded yet: without --fresh, they would be the result."""
    from kvq_cli.evaluation import runner

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "build_evaluations", interrupted)
    result = kvq("eval", "--model", folder, "--task", "perplexity", "--method", "kivi", "--out", "out", "--fresh")
    assert result.exit_code == 130 and "run the same command to resume" in result.stderr
