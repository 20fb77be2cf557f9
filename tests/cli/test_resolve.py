"""Resolving flags to methods and artifacts, and the error messages."""

import re
from pathlib import Path

import pytest

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.paths import artifact_folder
from kvq_cli.resolve import describe, resolve, resolve_compared


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("reference", "artifacts/reference/temporalkv-2bit"),
        ("meta-llama/Llama-3.1-8B", "artifacts/Llama-3.1-8B/temporalkv-2bit"),
        ("./some where/model/", "artifacts/model/temporalkv-2bit"),
        ("/", "artifacts/model/temporalkv-2bit"),
    ],
)
def test_artifact_folder(model, folder):
    assert artifact_folder(model, build("temporalkv", bits=2)) == Path(folder)


def test_artifact_folder_is_named_by_calibrated_options():
    def name(method, **options):
        return artifact_folder("reference", build(method, **options)).name

    assert name("temporalkv", bits=4, recent=32) == "temporalkv-4bit"
    assert name("temporalkv", fisher=False, outliers=0.01) == "temporalkv-2bit-outliers-0.01-fisher-off"
    assert name("xquant", bits=3) == "xquant"


def test_artifact_folders_of_many_options_have_names_that_file_systems_take():
    def folder(last):
        layers = {"keys": " ".join(31 * ["klt-1.75bit:join_keys=on"] + [last]), "values": " ".join(32 * ["klt-1bit"])}
        return artifact_folder("reference", build("mixed", bits=2.25, **layers))

    one, other = folder("kivi-2bit"), folder("kvquant-2bit")
    assert one == folder("kivi-2bit") != other
    assert re.fullmatch("mixed-2.25bit-[0-9a-f]{8}", one.name)
    one.mkdir(parents=True)
    short = artifact_folder("reference", build("mixed", bits=4, keys="klt-4bit kivi-4bit", values="klt-2bit"))
    assert short.name == "mixed-4bit-keys-klt-4bit kivi-4bit-values-klt-2bit"


def test_methods_without_calibration_are_built():
    assert describe(resolve("reference", "kivi", 4, None, {"sinks": "32", "pre_rope": "on"})) == {
        **describe(resolve("reference", "kivi", 4)),
        "sinks": 32,
        "pre_rope": True,
    }
    assert describe(resolve("reference"))["name"] == "kivi"
    assert describe(resolve("reference", "fp16")) == {"name": "fp16"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "unknown method 'nonsense'; there are: "),
        (["kivi", 5], "bits=5 is not one of 1, 2, 3, 4, 8"),
        (["fp16", 2], "fp16 has no option 'bits'"),
        (["kivi", 2, None, {"chunk": "2"}], "kivi has no option 'chunk'; its options are: bits"),
        (["kivi", 2, None, {"sinks": "many"}], "sinks='many' is not a whole number"),
    ],
)
def test_unknown_methods_and_options_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        resolve("reference", *arguments)


def test_missing_artifact_error_names_the_calibrate_command():
    with pytest.raises(KvqError, match=r"run `kvq calibrate --method temporalkv --bits 2`$"):
        resolve("reference", "temporalkv")
    with pytest.raises(KvqError, match=r"`kvq calibrate --method temporalkv --model 'a b' --bits 4 --set share=8`"):
        resolve("a b", "temporalkv", 4, None, {"share": "8", "sinks": "0"})
    with pytest.raises(KvqError, match="no artifact at gone"):
        resolve("reference", None, None, Path("gone"))


def test_shared_bits_apply_to_methods_with_bits():
    fp16, kivi = resolve_compared("reference", ["fp16", "kivi"], 4)
    assert (fp16.name, kivi.name, kivi.bits) == ("fp16", "kivi", 4)
    with pytest.raises(UsageError, match="twice"):
        resolve_compared("reference", ["kivi", "kivi"])


def test_compared_methods_take_own_and_shared_options():
    names = ["fp16", "kivi-4bit:residual=32", "kivi"]
    fp16, own, shared = resolve_compared("reference", names, 2, options={"sinks": "8"})
    assert fp16.name == "fp16"
    assert (own.bits, own.residual, own.sinks) == (4, 32, 8)
    assert (shared.bits, shared.residual, shared.sinks) == (2, 128, 8)
    with pytest.raises(UsageError, match="--set chunk=...: none of the methods fp16, kivi has this option"):
        resolve_compared("reference", names, 2, options={"chunk": "2"})
    with pytest.raises(UsageError, match="kivi:sinks: an option must be OPTION=VALUE"):
        resolve_compared("reference", ["kivi:sinks"])
    with pytest.raises(UsageError, match="method kivi has no option 'chunk'"):
        resolve_compared("reference", ["kivi:chunk=2"])


def test_artifact_folder_of_a_model_in_this_or_the_parent_folder(tmp_path, monkeypatch):
    (tmp_path / "mine" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "below")
    names = {model: artifact_folder(model, build("temporalkv", bits=2)).parts for model in (".", "./", "..", "../..")}
    folders = {".": "below", "./": "below", "..": "mine", "../..": tmp_path.name}
    assert names == {model: ("artifacts", name, "temporalkv-2bit") for model, name in folders.items()}
