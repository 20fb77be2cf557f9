"""Artifacts whose hashes are right and whose contents the method cannot have written are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
from hashlib import sha256

import pytest
import safetensors.torch
import torch
from random_artifacts import random_parts, tiny_model

from kvq_cli import attach
from kvq_cli.artifact import format, load_artifact, save_artifact
from kvq_cli.artifact.format import _checksum
from kvq_cli.artifact.schema import CALIBRATION
from kvq_cli.calibration.settings import CalibrationSettings
from kvq_cli.errors import KvqError
from kvq_cli.methods.registry import build

METHODS = {
    "temporalkv": build("temporalkv", bits=4, hybrid="head", outliers=0.01, normalize_values=True),
    "temporalkv by layer": build("temporalkv", bits=4),
    "channelkv": build("channelkv", bits=4),
    "channelkv with opq": build("channelkv", bits=4, rotation="opq"),
    "kvquant": build("kvquant", bits=2),
    "klt": build("klt", bits=6),
    "klt joined": build("klt", bits=4, join_keys=True, join_values=True),
    "mixed": build("mixed", bits=9, keys="klt-4bit temporalkv-4bit", values="fp16 kvquant-2bit"),
    "xquant": build("xquant"),
    "xquant-cl": build("xquant-cl", base_layers=1),
    "oscar": build("oscar"),
    "kvtc": build("kvtc", bits=8),
    "palu": build("palu"),
    "palu of the weights": build("palu", heads=1, whiten=False),
}
FIRST = "layers.0.k."


@pytest.fixture(scope="module")
def parts_of():
    """`parts_of("kvquant")`: config and tensors of an artifact for the tiny model, to change."""
    made = {name: random_parts(method, tiny_model()) for name, method in METHODS.items()}
    return lambda name: (copy.deepcopy(made[name][0]), dict(made[name][1]))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(config, tensors)`: the folder of an artifact that `save_artifact` refuses, signed."""

    def write(config, tensors):
        with monkeypatch.context() as patch:
            patch.setattr(format, "_check_loads", lambda *_: None)
            return save_artifact(tmp_path / "a", config, tensors, "card", overwrite=True).path

    return write


@pytest.fixture
def refused(tmp_path, written):
    """`refused(config, tensors, says)`: checks that the artifact is not written, and not loaded where it is."""

    def check(config, tensors, says):
        with pytest.raises(KvqError, match=f"^the artifact is not written, since it could not be loaded: .*({says})"):
            save_artifact(tmp_path / "refused", config, tensors, "card")
        assert not (tmp_path / "refused").exists()
        with pytest.raises(KvqError, match=says) as caught:
            load_artifact(written(config, tensors))
        assert caught.value.exit_code == 1 and str(tmp_path / "a") in str(caught.value)

    return check


@pytest.mark.parametrize("name", METHODS)
def test_windows_change_without_naming_the_other_options_again(parts_of, tmp_path, name):
    """Also those without which the method cannot be built: a mixed artifact's streams, its bits."""
    config, tensors = parts_of(name)
    changed = save_artifact(tmp_path / "a", config, tensors, "card").with_options({"recent": 40})
    assert changed.method_config == {**config["method"], "recent": 40}


@pytest.mark.parametrize("name", METHODS)
def test_undamaged_artifacts_load_and_attach(parts_of, tmp_path, name):
    save_artifact(tmp_path / "a", *parts_of(name), "card")
    model = tiny_model()
    with attach(model, load_artifact(tmp_path / "a")) as kv:
        model(torch.arange(20).unsqueeze(0), past_key_values=kv.new_cache())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:1], r"is \[1, 4, 256, 2\] float32 instead of \[2, 4, 256, 2\] float32"),
        (lambda t: t.int(), "int32 instead of"),
        (lambda t: t.half(), "float16 instead of"),
        (lambda t: t.flatten(), "instead of"),
        (lambda t: t.where(t != t.max(), torch.nan), "infinite numbers or NaN"),
        (lambda t: t.where(t != t.max(), torch.inf), "infinite numbers or NaN"),
    ],
)
def test_centroids_of_wrong_form_are_refused(parts_of, refused, change, says):
    config, tensors = parts_of("channelkv")
    name = f"{FIRST}centroids.channel"
    refused(config, {**tensors, name: change(tensors[name]).contiguous()}, f"{name} .*{says}")


@pytest.mark.parametrize("name", ["mean", "std", "lower", "upper"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_statistics_that_are_not_finite_are_refused(parts_of, refused, name, number):
    config, tensors = parts_of("temporalkv")
    tensors[FIRST + name] = tensors[FIRST + name].index_fill(1, torch.tensor(3), number)
    refused(config, tensors, f"{FIRST}{name} has infinite numbers or NaN")


@pytest.mark.parametrize("method", ["temporalkv", "kvquant"])
def test_statistics_out_of_range_are_refused(parts_of, refused, method):
    config, tensors = parts_of(method)
    refused(config, {**tensors, f"{FIRST}std": -tensors[f"{FIRST}std"]}, "k.std has negative numbers")
    swapped = {f"{FIRST}lower": tensors[f"{FIRST}upper"], f"{FIRST}upper": tensors[f"{FIRST}lower"]}
    refused(config, {**tensors, **swapped}, "k.lower exceeds")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("widths", lambda t: t + 8, "widths must be bits of 1 to 1 fields"),
        ("widths", lambda t: t * 0, "widths must be bits of 1 to 1 fields"),
        ("widths", lambda t: torch.cat([t, t]), "widths must be bits"),
        ("widths", lambda t: t[:0], "widths must be bits"),
        ("widths", lambda t: t[:1], "widths must be bits"),
        ("widths", lambda t: t.float(), "widths .*float32 instead of .*uint8"),
        ("widths", lambda t: t - 1, "k.center has numbers that are not between the codes"),
        ("center", lambda t: -t, "k.center has numbers that are not between the codes"),
        ("deviation", lambda t: -t, "k.deviation has negative numbers"),
        ("synthesis", lambda t: t[:, :, :4], r"is \[2, 8, 4\]"),
        ("std", lambda t: -t, "k.std has negative numbers"),
    ],
)
def test_transforms_that_do_not_fit_are_refused(parts_of, refused, name, change, says):
    config, tensors = parts_of("klt")
    refused(config, {**tensors, FIRST + name: change(tensors[FIRST + name]).contiguous()}, says)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([[16, 4], [16, 2]], r"tensors layers\.\*\.k\.groups must be the same in all layers"),
        ([[16, 3], [16, 2]], r"layers\.1\.k\.groups must be sizes \(16, 64, 256, 1024\) and bits"),
        ([[64, 2], [16, 2]], r"layers\.1\.k\.groups have more than the 32 components of all layers"),
        ([[16, 16], [16, 2]], r"layers\.1\.k\.groups are 40 bytes for a token, above the 32 of the method"),
    ],
)
def test_groups_of_other_components_are_refused(parts_of, refused, groups, says):
    config, tensors = parts_of("kvtc")
    for layer, rows in enumerate(([[16, 2], [16, 4]], groups)):
        config["errors"]["layers"][layer]["k"]["bytes"] = 20
        tensors[f"layers.{layer}.k.groups"] = torch.tensor(rows, dtype=torch.int32)
    refused(config, tensors, says)


@pytest.mark.parametrize("method", ["channelkv with opq", "oscar"])
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("rotation", lambda t: 1.5 * t, "k.rotation is not orthogonal"),
        ("spread", lambda t: -t, "k.spread has negative numbers"),
    ],
)
def test_rotations_that_are_none_are_refused(parts_of, refused, method, name, change, says):
    config, tensors = parts_of(method)
    refused(config, {**tensors, FIRST + name: change(tensors[FIRST + name]).contiguous()}, says)


def test_more_bytes_than_the_bits_allow_are_refused(parts_of, refused):
    """Valid layer by layer: each token and head has 5 bytes, and the method says 4.75 bits."""
    config, tensors = parts_of("klt")
    config["method"]["bits"] = 4.75
    refused(config, tensors, "the layers have 40 bytes for a token, above the 38 of the method")


@pytest.mark.parametrize(("method", "command"), [("klt", "kvq calibrate --method klt"), ("mixed", "kvq tune --budget")])
def test_artifacts_with_codebooks_of_klt_are_refused(parts_of, tmp_path, method, command):
    """Format 1; other methods' artifacts of that format are read."""
    for name in (method, "kvquant"):
        folder = save_artifact(tmp_path / name, *parts_of(name), "card").path
        signed(folder, {**json.loads((folder / "config.json").read_text()), "format": 1})
    assert load_artifact(folder).config["format"] == 1
    with pytest.raises(KvqError, match=rf"codebooks of klt \(format 1\).*`{command} .*--model mine --out .* --force`"):
        load_artifact(tmp_path / method)


def test_statistics_that_thresholds_determine_are_compared(parts_of, refused):
    config, tensors = parts_of("kvquant")
    refused(config, {**tensors, f"{FIRST}mean": tensors[f"{FIRST}mean"] + 0.5}, "mean is not computed from")


@pytest.mark.parametrize(
    ("method", "choice", "says"),
    [
        ("temporalkv", [0, 2], "numbers from 0 to 1"),
        ("temporalkv", [0, -1], "numbers from 0 to 1"),
        ("temporalkv", [0, 0], "centroids.channel|centroids.temporal"),
        ("temporalkv", [1, 0], "choice"),  # the errors say [0, 1]
        ("temporalkv", [0], r"is \[1\]"),
        ("temporalkv by layer", [0, 1], "one block shape for all heads"),
        ("kvquant", [0, 1], "numbers from 0 to 0"),
    ],
)
def test_choices_out_of_range_are_refused(parts_of, refused, method, choice, says):
    config, tensors = parts_of(method)
    refused(config, {**tensors, f"{FIRST}choice": torch.tensor(choice, dtype=torch.int8)}, says)


@pytest.mark.parametrize(
    ("method", "option", "value", "says"),
    [
        ("temporalkv", "normalize_keys", False, "do not allow a tensor 'layers.0.k.(mean|std)"),
        ("temporalkv by layer", "normalize_values", True, "layers.0.v.mean is missing"),
        ("temporalkv", "outliers", 0.0, "do not allow a tensor 'layers.0.k.(lower|upper)"),
        ("temporalkv", "bits", 2, "layers.0.k.centroids"),
        ("temporalkv", "share", 4, "layers.0.k.centroids"),
        ("temporalkv", "hybrid", "layer", "one block shape"),
        ("kvquant", "bits", 3, "centroids.scalar is"),
        ("kvquant", "bits", "2", "method.bits must be 2"),
        ("kvquant", "bits", 2.0, "method"),
        ("kvquant", "unheard_of", 1, "no option 'unheard_of'"),
        ("xquant-cl", "base_layers", 2, "layers.0.k.down is missing"),
        ("xquant", "name", "kivi", "kivi"),
        ("xquant", "name", "gone", "unknown method 'gone'"),
        ("xquant", "name", ["xquant"], "method.name"),
    ],
)
def test_options_that_contradict_the_tensors_are_refused(parts_of, refused, method, option, value, says):
    config, tensors = parts_of(method)
    config["method"][option] = value
    refused(config, tensors, says)


@pytest.mark.parametrize("key", ["layers", "kv_heads", "head_dim", "hidden_size"])
@pytest.mark.parametrize("method", ["temporalkv", "xquant"])
@pytest.mark.parametrize("value", [1, 3, 64, 2**20, 2**70, 0, -2, 2.0, "2", True, None])
def test_a_model_section_of_another_shape_is_refused(parts_of, refused, method, key, value):
    if method == "temporalkv" and key == "hidden_size" and value in (1, 3, 64, 2**20) and type(value) is int:
        return  # codebooks do not depend on it: `check_model` compares it with the model
    config, tensors = parts_of(method)
    config["model"]["fingerprint"][key] = value
    refused(config, tensors, "layers|model|tensor|head_dim")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("news", "json: unknown key 'news'"),
        ("model.news", "model: unknown key 'news'"),
        ("model.fingerprint.news", "model.fingerprint: unknown key 'news'"),
        ("calibration.news", "calibration: unknown key 'news'"),
        ("errors.news", "errors: unknown key 'news'"),
        ("versions.news", "versions: unknown key 'news'"),
    ],
)
@pytest.mark.parametrize("method", ["kvquant", "xquant"])
def test_unknown_keys_are_refused(parts_of, refused, method, path, says):
    config, tensors = parts_of(method)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    place[last] = 1
    refused(config, tensors, says)


def test_inputs_have_a_form_where_they_are_recorded(parts_of, refused, tmp_path):
    config, tensors = parts_of("kvquant")
    inputs = {"weights": "ab", "text": None, "results": 2, "device": "cpu"}
    for valid in (inputs, {**inputs, "text": "cd", "held_out": ["ef", None]}, {**inputs, "clustering": 1}):
        save_artifact(tmp_path / "a", {**config, "inputs": valid}, tensors, "card", overwrite=True)
        assert load_artifact(tmp_path / "a").config["inputs"] == valid
    refused({**config, "inputs": {**inputs, "results": "2"}}, tensors, "inputs.results must be a whole number")
    refused({**config, "inputs": {**inputs, "held_out": [1]}}, tensors, r"inputs.held_out\[0\] must be a string")


@pytest.mark.parametrize("key", ["method", "model", "calibration", "errors", "sizes", "captured", "versions", "kvq"])
def test_missing_sections_are_refused(parts_of, refused, key):
    config, tensors = parts_of("kvquant")
    del config[key]
    refused(config, tensors, f"{key}")


@pytest.mark.parametrize("method", METHODS)
def test_missing_doubled_and_foreign_layers_are_refused(parts_of, refused, method):
    config, tensors = parts_of(method)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.1.")}
    refused(config, {name: t for name, t in tensors.items() if name not in last}, "layers.1.* is missing")
    for index in ("2", "-1", "01", "x", "1.0", ""):
        more = {name.replace("layers.1.", f"layers.{index}."): tensor.clone() for name, tensor in last.items()}
        refused(config, {**tensors, **more}, "unknown tensor|do not allow")


def signed(folder, config):
    """Write a config with its checksum; `config` may be of any form that JSON has."""
    text = json.dumps({**config, "checksum": _checksum(config)})
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("number", [0, -5, True, 1.0])
def test_formats_that_never_were_are_refused(parts_of, tmp_path, number):
    folder = save_artifact(tmp_path / "a", *parts_of("kvquant"), "card").path
    signed(folder, {**json.loads((folder / "config.json").read_text()), "format": number})
    with pytest.raises(KvqError, match="format"):
        load_artifact(folder)


def test_deep_nesting_repeated_keys_and_nan_are_not_valid_json(parts_of, tmp_path):
    folder = save_artifact(tmp_path / "a", *parts_of("kvquant"), "card").path
    text = (folder / "config.json").read_text()
    for bad in (
        "[" * 100_000,
        '{"a":' * 100_000,
        text.replace('"bits"', '"bits": 3, "bits"', 1),
        text.replace("0.25", "NaN", 1),
    ):
        (folder / "config.json").write_text(bad)
        with pytest.raises(KvqError, match="config.json is not valid JSON"):
            load_artifact(folder)


@pytest.mark.parametrize(
    "header",
    [
        {"layers.0.k.choice": {"dtype": "I8", "shape": [2**62], "data_offsets": [0, 2**62]}},
        {"layers.0.k.choice": {"dtype": "I8", "shape": [2**62, 0], "data_offsets": [0, 0]}},
        {"layers.0.k.choice": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
        {"layers.0.k.choice": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]}},
        {},
    ],
)
@pytest.mark.parametrize("claimed", [None, 2**60])
def test_tensor_files_with_huge_declared_sizes_are_refused(parts_of, tmp_path, header, claimed):
    folder = save_artifact(tmp_path / "a", *parts_of("kvquant"), "card").path
    text = json.dumps(header).encode()
    data = struct.pack("<Q", claimed or len(text)) + text + b"\0"
    (folder / "tensors.safetensors").write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    config["files"] = {"tensors.safetensors": {"bytes": len(data), "sha256": sha256(data).hexdigest()}}
    signed(folder, config)
    with pytest.raises(KvqError, match="tensors"):
        load_artifact(folder)


def test_a_file_of_another_size_than_declared_is_refused(parts_of, tmp_path):
    folder = save_artifact(tmp_path / "a", *parts_of("xquant"), "card").path
    config = json.loads((folder / "config.json").read_text())
    config["files"]["tensors.safetensors"]["bytes"] = 2**62
    signed(folder, config)
    with pytest.raises(KvqError, match=f"instead of {2**62:,}"):
        load_artifact(folder)


def test_sizes_are_those_of_the_tensors(parts_of, refused):
    config, tensors = parts_of("xquant")
    config["sizes"]["total"] += 1
    refused(config, tensors, "sizes are not those of the tensors")


def test_the_schema_knows_every_calibration_setting():
    assert {key.removesuffix("?") for key in CALIBRATION} == {f.name for f in dataclasses.fields(CalibrationSettings)}


def test_inspect_refuses_in_one_line(fails, parts_of, written):
    config, tensors = parts_of("kvquant")
    data = {**tensors, f"{FIRST}std": tensors[f"{FIRST}std"][:1].contiguous()}
    folder = written(config, data)
    assert safetensors.torch.load_file(folder / "tensors.safetensors").keys() == tensors.keys()
    fails("inspect", folder, code=1, says="layers.0.k.std is [1, 8] float32 instead of [2, 8] float32")


ESCAPE = "\x1b]52;c;aGk=\x07"  # writes to a terminal's clipboard


@pytest.mark.parametrize("place", ["key", "model.name", "calibration.dataset", "versions.torch", "tensor"])
def test_no_message_and_no_string_of_an_artifact_has_control_characters(parts_of, written, place):
    config, tensors = parts_of("kvquant")
    if place == "key":
        config["model"][ESCAPE] = 1
    elif place == "tensor":
        tensors[f"{FIRST}{ESCAPE}"] = torch.zeros(1)
    else:
        section, key = place.split(".")
        config[section][key] += ESCAPE
    folder = written(config, tensors)
    with pytest.raises(KvqError) as caught:
        load_artifact(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("digits", [400, 4200])
@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_many_digits_are_refused_by_name(parts_of, written, name, digits):
    """As every number of the method's options."""
    config, tensors = parts_of(name)
    for key in [key for key, value in config["method"].items() if type(value) in (int, float)]:
        folder = written({**config, "method": {**config["method"], key: -(10**digits)}}, tensors)
        with pytest.raises(KvqError, match=f"config.json: .*{key}=a number of .* bits is not a"):
            load_artifact(folder)
