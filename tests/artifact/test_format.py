"""The artifact format: round trip, atomic writes, refusal of truncated and altered files."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model

from kvq_cli.artifact import FORMAT, Artifact, fingerprint, format, load_artifact, save_artifact
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import partial_path
from kvq_cli.methods.registry import build, to_config

METHOD = build("temporalkv", bits=4, hybrid="head")


def parts(seed=0):
    """Config, tensors and card of an artifact for the tiny model of this seed."""
    return *random_parts(METHOD, tiny_model(seed), seed=seed), "# card\n"


@pytest.fixture
def saved(tmp_path):
    return save_artifact(tmp_path / "some" / "place", *parts())


def test_save_and_load_round_trip(saved):
    loaded = load_artifact(saved.path)
    assert loaded.config == saved.config
    assert loaded.config["format"] == FORMAT
    assert loaded.method_config == to_config(METHOD)
    assert loaded.model_name == "mine"
    assert loaded.digest == saved.digest
    _, tensors, _ = parts()
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[k], v) and loaded.tensors[k].dtype == v.dtype for k, v in tensors.items())
    assert (saved.path / "README.md").read_text() == "# card\n"
    assert sorted(p.name for p in saved.path.parent.iterdir()) == ["place"]


def test_layer_returns_its_tensors_without_prefix():
    tensors = {"layers.0.k.centroids.temporal": torch.ones(2), "layers.0.v.choice": torch.ones(1)}
    artifact = Artifact({}, {**tensors, "layers.10.k.mean": torch.zeros(1)}, Path("nowhere"))
    assert set(artifact.layer(0)) == {"k.centroids.temporal", "v.choice"}
    assert set(artifact.layer(10)) == {"k.mean"}  # layer 1 is no prefix of layer 10
    assert artifact.layer(1) == {}


def test_equal_contents_give_equal_bytes_in_any_order(saved, tmp_path):
    config, tensors, card = parts()
    again = save_artifact(tmp_path / "b", config, dict(reversed(tensors.items())), card)
    for name in ("config.json", "tensors.safetensors", "README.md"):
        assert (again.path / name).read_bytes() == (saved.path / name).read_bytes()


@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
def test_flipped_bit_is_refused_naming_the_file(saved, name):
    path = saved.path / name
    data = path.read_bytes()
    for position in range(0, len(data), max(1, len(data) // 150)):
        for bit in (0, 4):
            path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
            with pytest.raises(KvqError, match=name):
                load_artifact(saved.path)


@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_truncated_file_is_refused_naming_the_file(saved, name, share):
    path = saved.path / name
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(KvqError, match=name):
        load_artifact(saved.path)


def test_missing_file_or_folder_is_named(saved, tmp_path):
    (saved.path / "tensors.safetensors").unlink()
    with pytest.raises(KvqError, match="tensors.safetensors"):
        load_artifact(saved.path)
    with pytest.raises(KvqError, match="no artifact at .*gone"):
        load_artifact(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(KvqError, match="config.json"):
        load_artifact(tmp_path / "empty")


def test_newer_format_is_refused(saved):
    path = saved.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1, "news": 1}))
    with pytest.raises(KvqError, match=f"config.json has format {FORMAT + 1}.*install a newer kvq"):
        load_artifact(saved.path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "1"}', "nonsense"])
def test_malformed_config_is_refused(saved, text):
    (saved.path / "config.json").write_text(text)
    with pytest.raises(KvqError, match="config.json"):
        load_artifact(saved.path)


def test_existing_artifact_is_replaced_only_with_overwrite(saved):
    with pytest.raises(UsageError, match="exists already.*--force"):
        save_artifact(saved.path, *parts(1))
    replaced = save_artifact(saved.path, *parts(1), overwrite=True)
    assert load_artifact(saved.path).digest == replaced.digest != saved.digest


def test_folder_without_an_artifact_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not an artifact and will not be replaced"):
        save_artifact(tmp_path, *parts(), overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("failing", ["tensors.safetensors", "README.md", "config.json"])
@pytest.mark.parametrize("before", [False, True])
def test_full_disk_leaves_existing_files_unchanged(saved, tmp_path, monkeypatch, failing, before):
    target = saved.path if before else tmp_path / "new"
    write = format.write_synced

    def full(path: Path, data: bytes):
        if path.name == failing:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(format, "write_synced", full)
    with pytest.raises(KvqError, match="no space left to write"):
        save_artifact(target, *parts(1), overwrite=True)
    assert load_artifact(saved.path).digest == saved.digest
    assert target.exists() == before
    assert {p.name for p in target.parent.iterdir()} <= {"place", "some"}


def test_unwritable_path_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvqError, match=r"cannot write .*file/below"):
        save_artifact(tmp_path / "file" / "below", *parts())


def test_fingerprint_depends_on_architecture_and_weights_not_dtype():
    model = tiny_model().bfloat16()
    assert fingerprint(model) == fingerprint(model.float())
    assert fingerprint(tiny_model()) == fingerprint(tiny_model())
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(seed=1))
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(num_attention_heads=8))
    changed = tiny_model()
    with torch.no_grad():
        changed.model.layers[1].self_attn.v_proj.weight[3, 5] *= 1.5
    assert fingerprint(changed) != fingerprint(tiny_model())


def test_artifact_of_another_model_is_refused_naming_both(saved):
    saved.check_model(tiny_model())
    with pytest.raises(UsageError, match=r"belongs to the model 'mine' .*, not to 'other' .*--model mine"):
        saved.check_model(tiny_model(seed=1), "other")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_failure_between_the_two_renames_restores_the_old_artifact(saved, monkeypatch, error):
    rename = Path.rename

    def failing(path: Path, to: Path):
        if path.name.endswith(".partial"):
            raise error
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((KvqError, KeyboardInterrupt)):
        save_artifact(saved.path, *parts(1), overwrite=True)
    assert load_artifact(saved.path).digest == saved.digest
    assert sorted(p.name for p in saved.path.parent.iterdir()) == ["place"]


def test_kill_between_the_two_renames_is_repaired_by_the_next_write(saved, monkeypatch):
    """A kill leaves the old artifact under its temporary name; the next write restores it, even if it fails."""
    saved.path.rename(saved.path.with_name(".place.replaced"))

    def full(path: Path, data: bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(format, "write_synced", full)
    with pytest.raises(KvqError, match="no space left"):
        save_artifact(saved.path, *parts(1), overwrite=True)
    assert load_artifact(saved.path).digest == saved.digest


@pytest.mark.parametrize("name", [".place.partial", ".place.replaced"])
@pytest.mark.parametrize("file", ["precious.txt", "README.md"])
def test_folders_of_others_beside_the_artifact_are_kept(saved, name, file):
    other = saved.path.with_name(name)
    other.mkdir()
    (other / file).write_text("precious")
    if name == ".place.replaced":
        with pytest.raises(UsageError, match=f"{name} is in the way and no artifact .*: move it"):
            save_artifact(saved.path, *parts(1), overwrite=True)
    else:
        save_artifact(saved.path, *parts(1), overwrite=True)
    assert (other / file).read_text() == "precious"
    assert sorted(path.name for path in saved.path.parent.iterdir()) == [name, "place"]


def test_folder_of_a_killed_write_is_removed_by_the_next(saved):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = partial_path(saved.path)
    left = left.with_name(left.name.replace(f".{os.getpid()}.", f".{process.pid}."))
    left.mkdir()
    (left / "tensors.safetensors").write_text("")
    save_artifact(saved.path, *parts(1), overwrite=True)
    assert [path.name for path in saved.path.parent.iterdir()] == ["place"]


@pytest.mark.parametrize("other", ["model.safetensors", "pictures.png/one.png"])
def test_folder_of_a_model_is_never_replaced(tmp_path, other):
    """It has a config.json, too."""
    folder = tmp_path / "model"
    (folder / other).parent.mkdir(parents=True)
    for name in ("config.json", other):
        (folder / name).write_text(name)
    with pytest.raises(UsageError, match=f"will not be replaced .it holds '{other.partition('/')[0]}'"):
        save_artifact(folder, *parts(), overwrite=True)
    assert [(folder / name).read_text() for name in ("config.json", other)] == ["config.json", other]


def test_artifact_with_pictures_and_an_empty_folder_are_replaced(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for _ in range(2):
        save_artifact(folder, *parts(), overwrite=True, pictures={"errors.png": b"picture"})
    assert load_artifact(folder).path == folder


def test_a_card_that_names_a_file_that_is_not_utf8_is_saved(tmp_path):
    config, tensors, _ = parts()
    folder = save_artifact(tmp_path / "a", config, tensors, "a\udce9").path
    assert (folder / "README.md").read_text() == "a\\udce9"


def test_a_file_of_another_size_is_refused_before_it_is_read(saved, monkeypatch):
    tensors, config = saved.path / "tensors.safetensors", saved.path / "config.json"
    true = tensors.stat().st_size
    os.truncate(tensors, 1 << 40)  # sparse: takes no space
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) if path == config else pytest.fail("read"))
    with pytest.raises(KvqError, match=f"tensors.safetensors has 1,099,511,627,776 bytes instead of {true:,}"):
        load_artifact(saved.path)
    os.truncate(config, format.MAX_CONFIG + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read"))
    with pytest.raises(KvqError, match=r"config.json: has 67,108,865 bytes, above the limit of 67,108,864"):
        load_artifact(saved.path)


@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
def test_a_pipe_is_refused(saved, name):
    """Reading it would wait for ever."""
    (saved.path / name).unlink()
    os.mkfifo(saved.path / name)
    with pytest.raises(KvqError, match=f"{name}: Not a regular file"):
        load_artifact(saved.path)
