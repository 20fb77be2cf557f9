"""Errors of libraries that read a user's file name the file, in one line."""

import errno
import json
import shutil

import pytest

from kvq_cli.errors import KvqError, UsageError, reading, reason
from kvq_cli.evaluation.sample_log import SampleLog
from kvq_cli.files import load_json

DEEP = "[" * 100_000


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


def generate(folder, *flags):
    return ["generate", "hello", "-n", 2, "--method", "fp16", "--model", folder, *flags]


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_config_of_wrong_types_is_named(fails, folder):
    change(folder / "config.json", num_attention_heads="x")
    says = ": StrictDataclassFieldValidationError: Validation error for field 'num_attention_heads': TypeError: "
    fails(*generate(folder), code=1, says=f"{folder}': config.json{says}")
    plan = ["plan", "--model", folder, "--context", 64, "--memory", "1GB"]
    fails(*plan, code=1, says=f"{folder}: cannot read its configuration{says}")
    (folder / "config.json").write_text(DEEP)
    fails(*generate(folder), code=1, says=f"{folder}': config.json: RecursionError")
    fails(*plan, code=1, says=f"{folder}: cannot read its configuration: RecursionError")


@pytest.mark.parametrize(
    "wrong",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # a panic, no Exception
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}},  # a bare Exception
    ],
)
def test_tokenizer_that_cannot_be_loaded_is_named(fails, folder, wrong):
    change(folder / "tokenizer.json", **wrong)
    fails(*generate(folder), code=1, says=f"cannot load the model '{folder}': its tokenizer: ")


def test_a_panic_anywhere_is_one_line(fails, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_, **__):
        raise Panic("of Rust")

    monkeypatch.setattr("kvq_cli.models.load_model", panic)
    fails(*generate("reference"), code=1, says="Panic: of Rust")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_chat_template_that_fails_is_named(fails, folder, template, says):
    (folder / "chat_template.jinja").write_text(template)
    fails(*generate(folder), code=1, says=f"the chat template of {folder} fails: {says}")


@pytest.mark.parametrize("yaml", [DEEP[:500], "a: !!timestamp x", "set: &a {b: *a}"])
def test_yaml_that_cannot_be_read_is_named(fails, tmp_path, yaml):
    (tmp_path / "a.yaml").write_text(yaml)
    fails("generate", "x", "--config", "a.yaml", code=2, says="--config a.yaml: ")


@pytest.mark.parametrize("temperature", ["1e-320", "1e-39"])
def test_temperature_by_which_logits_cannot_be_divided_is_named(kvq, folder, temperature):
    result = kvq(*generate(folder, "--temperature", temperature, "--quiet"))
    assert result.exit_code == 2
    assert f"--temperature {temperature}: too small; raise it, or leave it out" in result.stderr.splitlines()[-1]
    assert kvq(*generate(folder, "--temperature", "1e-36", "--quiet")).exit_code == 0


@pytest.mark.parametrize(
    "document", [{"columns": 3, "rows": [[1]]}, {"bench": "generate", "rows": [{"peer": 1}]}, {"notes": 3}]
)
def test_result_of_wrong_form_is_named(fails, tmp_path, document):
    (tmp_path / "study.json").write_text(json.dumps(document))
    fails("report", tmp_path, code=1, says=f"{tmp_path / 'study.json'}: ")
    (tmp_path / "study.json").write_text(DEEP)
    fails("report", tmp_path, code=1, says="study.json: not JSON (nested too deeply)")


def test_comparison_of_wrong_form_is_named(fails, tmp_path):
    one = {"results": {"vt": {"512,none": "a"}}, "n-samples": {"vt": {"effective": 2}}, "higher_is_better": {"vt": 3}}
    one |= {"cache": {"vt-512": 3}, "config": {"method": {"name": "kivi"}}}
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": {"a": one}}))
    for command in ("results", "report"):
        fails(command, tmp_path, code=1, says=f"{tmp_path}: not results of kvq: ")


def test_lone_surrogates_are_written(kvq, tmp_path):
    log = SampleLog(tmp_path, "vt", {})
    log.append([{"index": 0, "answer": "a\udc80"}])
    assert SampleLog(tmp_path, "vt", {}).records == {0: {"index": 0, "answer": "a\udc80"}}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "study.json").write_text(json.dumps({"title": "a\udc80"}))
    assert kvq("report", "in").exit_code == 0
    assert "a\\udc80" in (tmp_path / "in" / "report.html").read_text()


def test_reading_converts_what_is_no_error_of_kvq():
    with pytest.raises(UsageError, match="^a file: KeyError: 'b'; mend it$"), reading("a file", "mend it", UsageError):
        raise KeyError("b")
    full = OSError(errno.ENOSPC, "No space left on device")
    for passes in (KvqError("said"), KeyboardInterrupt(), BrokenPipeError(), MemoryError(), full):
        with pytest.raises(type(passes)) as raised, reading("a file"):
            raise passes
        assert raised.value is passes
    assert reason(ValueError("one: \n two\nthree")) == "one: two" and reason(OSError()) == "OSError"
    framed = LookupError("\n****\n  Resource punkt not found.\n  Use the downloader.\n****\n")  # as NLTK words it
    assert reason(framed) == "LookupError: Resource punkt not found."
    with pytest.raises(ValueError, match="deeply"):
        load_json(DEEP)
