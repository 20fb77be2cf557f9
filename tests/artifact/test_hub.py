"""Artifacts on the Hub, against a local stand-in of its HTTP API."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Repository
from random_artifacts import random_parts, tiny_model

from kvq_cli import attach
from kvq_cli.artifact import load_artifact, read_config, save_artifact, verified_config
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.vllm.served import ServedMethod


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    """`artifact(2)`: an artifact of temporalkv at so many bits, in the folder `mine-2`."""
    monkeypatch.chdir(tmp_path)

    def make(bits: int = 2):
        method = build("temporalkv", bits=bits)
        parts = random_parts(method, tiny_model())
        return save_artifact(Path(f"mine-{bits}"), *parts, "# card", overwrite=True, pictures={"a.png": b"p"})

    return make


@pytest.fixture
def pushed(hub, kvq, artifact):
    """`pushed(2, "--force")` pushes such an artifact to user/repo."""

    def push(bits: int = 2, *words: str):
        artifact(bits)
        return kvq("push", f"mine-{bits}", "user/repo", *words)

    return push


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_pushed_is_loaded_and_attached(hub, pushed):
    result = pushed()
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{hub.url}/user/repo\n" and "UserWarning" not in result.stderr
    held = dict(hub.repositories["user/repo"].files)
    del held[".gitattributes"]
    assert held == files_of(Path("mine-2"))
    own, loaded = load_artifact("mine-2"), load_artifact("user/repo")
    commit = hub.repositories["user/repo"].refs["main"]
    assert loaded.digest == own.digest and loaded.path == Path(f"user/repo@{commit}")
    assert all(torch.equal(loaded.tensors[name], own.tensors[name]) for name in own.tensors)
    with attach(tiny_model(), "user/repo") as kv:
        assert kv.method == build("temporalkv", bits=2) and kv.origin.artifact == own.digest
    with attach(tiny_model(), "user/repo:sinks=3") as kv:
        assert kv.method.sinks == 3


def test_only_files_of_an_artifact_are_uploaded_and_downloaded(hub, pushed, artifact, kvq):
    artifact()
    (Path("mine-2") / "notes.txt").write_text("mine alone")
    assert kvq("push", "mine-2", "user/repo").exit_code == 0
    repository = hub.repositories["user/repo"]
    assert "notes.txt" not in repository.files
    repository.commit({**repository.files, "model.safetensors": b"large"}, "a model")
    hub.requests.clear()
    load_artifact("user/repo")
    assert not [each for each in hub.requests if "model.safetensors" in each]


def test_revisions_are_commits_tags_and_branches(hub, pushed):
    pushed(2)
    repository = hub.repositories["user/repo"]
    first, repository.refs["v1"] = repository.refs["main"], repository.refs["main"]
    assert pushed(4, "--force", "--json").exit_code == 0
    names = ("user/repo", "user/repo@v1", f"user/repo@{first}")
    assert [load_artifact(name).method_config["bits"] for name in names] == [4, 2, 2]
    with pytest.raises(KvqError, match="user/repo@v9: user/repo has no such revision"):
        load_artifact("user/repo@v9")


def test_an_artifact_is_replaced_only_where_that_is_said(hub, pushed):
    assert pushed(2).exit_code == 0
    refused = pushed(4)
    assert refused.exit_code == 2 and "user/repo holds an artifact already" in refused.stderr
    assert json.loads(hub.repositories["user/repo"].files["config.json"])["method"]["bits"] == 2
    result = pushed(4, "--force", "--json")
    document = json.loads(result.stdout)
    config = json.loads(hub.repositories["user/repo"].files["config.json"])
    assert config["method"]["bits"] == 4 and document["digest"] == config["checksum"]
    assert document["commit"] == f"{hub.url}/user/repo/commit/{hub.repositories['user/repo'].refs['main']}"


def test_a_model_is_never_replaced(hub, pushed):
    hub.repositories["user/repo"] = repository = Repository()
    repository.commit({"config.json": b"{}", "model.safetensors": b"weights"}, "a model")
    refused = pushed(2, "--force")
    assert refused.exit_code == 2 and "user/repo is no artifact" in refused.stderr
    assert repository.files["model.safetensors"] == b"weights"
    with pytest.raises(KvqError, match="user/repo on the Hugging Face Hub holds no artifact of kvq: it has no tensors"):
        load_artifact("user/repo")


@pytest.mark.parametrize("names", [("README.md",), ("config.json", "README.md"), ("config.json", "a.png")])
def test_some_of_an_artifacts_files_are_no_artifact(hub, pushed, names):
    hub.repositories["user/repo"] = repository = Repository()
    repository.commit({**repository.files, **dict.fromkeys(names, b"own")}, "made by hand")
    held = dict(repository.files)
    for words in ((), ("--force",)):
        refused = pushed(2, *words)
        assert refused.exit_code == 2 and "user/repo is no artifact, and is not replaced" in refused.stderr
    assert repository.files == held


def test_an_empty_repository_is_filled(hub, pushed):
    hub.repositories["user/repo"] = repository = Repository()
    assert pushed().exit_code == 0 and repository.files["README.md"] == b"# card"


def test_files_in_folders_are_neither_pushed_nor_deleted(hub, artifact, kvq):
    artifact()
    Path("mine-2/below").mkdir()
    Path("mine-2/below/own.png").write_bytes(b"own")
    assert kvq("push", "mine-2", "user/repo").exit_code == 0
    repository = hub.repositories["user/repo"]
    assert "a.png" in repository.files and "below/own.png" not in repository.files
    repository.commit({**repository.files, "docs/photo.png": b"own"}, "a picture")
    refused = kvq("push", "mine-2", "user/repo", "--force")
    assert refused.exit_code == 2 and "it holds 'docs/photo.png'" in refused.stderr
    assert repository.files["docs/photo.png"] == b"own"


def test_the_cards_picture_alone_is_deleted(hub, artifact, kvq):
    artifact()
    Path("mine-2/tuning.png").write_bytes(b"of the tuned artifact")
    assert kvq("push", "mine-2", "user/repo").exit_code == 0
    repository = hub.repositories["user/repo"]
    repository.commit({**repository.files, "photo.png": b"own"}, "a picture")
    Path("mine-2/tuning.png").unlink()
    assert kvq("push", "mine-2", "user/repo", "--force").exit_code == 0
    assert repository.files["photo.png"] == b"own" and "tuning.png" not in repository.files


def test_nothing_private_is_pushed_to_a_public_repository(hub, pushed):
    hub.repositories["user/repo"] = repository = Repository()
    refused = pushed(2, "--private")
    assert refused.exit_code == 2 and "user/repo exists and is public: make it private on the Hub" in refused.stderr
    assert list(repository.files) == [".gitattributes"]
    repository.private = True
    assert pushed(2, "--private").exit_code == 0


def test_damaged_artifacts_are_not_pushed(hub, artifact, fails):
    artifact()
    path = Path("mine-2/tensors.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    fails("push", "mine-2", "user/repo", code=1, says="tensors.safetensors was altered")
    fails("push", "mine-2", "repo", code=2, says="give the repository as USER/REPO")
    assert not hub.repositories


def test_private_repositories_need_a_token(hub, pushed, monkeypatch, fails):
    assert pushed(2, "--private").exit_code == 0 and hub.repositories["user/repo"].private
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    fails("inspect", "user/repo", code=1, says="log in if it is private (`hf auth login`, HF_TOKEN)")
    fails("push", "mine-2", "user/other", "--quiet", code=1, says="HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_artifact("user/repo").method_config["bits"] == 2


def test_names_that_are_neither_folder_nor_repository(hub, fails):
    fails("inspect", "user/nothing", code=1, says="no artifact at user/nothing: neither a folder nor a repository")
    hub.repositories["user/gated"] = Repository(gated=True)
    fails("inspect", "user/gated", code=1, says="user/gated is gated: accept its terms")
    hub.requests.clear()
    for name in ("nothing", "./nothing", "../nothing", "/no/thing", "a/b/c"):
        with pytest.raises(KvqError, match=f"no artifact at {Path(name)}: not a folder"):
            load_artifact(name)
    assert not hub.requests


def test_a_folder_of_that_name_comes_first(hub, pushed, artifact):
    pushed(2)
    artifact(4)
    Path("user").mkdir()
    Path("mine-4").rename("user/repo")
    hub.requests.clear()
    assert load_artifact("user/repo").method_config["bits"] == 4 and not hub.requests


def test_a_mistyped_path_is_not_looked_up(hub, pushed):
    pushed(2)
    Path("user").mkdir()
    hub.requests.clear()
    with pytest.raises(KvqError, match="no artifact at user/repo: not a folder .make one with `kvq calibrate --out"):
        load_artifact("user/repo")
    assert not hub.requests
    assert load_artifact("user/repo@main").method_config["bits"] == 2


def test_altered_files_are_refused_by_name(hub, pushed):
    pushed()
    repository = hub.repositories["user/repo"]
    tensors = repository.files["tensors.safetensors"]
    sha = repository.commit({**repository.files, "tensors.safetensors": tensors[:-1] + b"x"}, "altered")
    says = f"user/repo@{sha}/tensors.safetensors was altered .*: remove .* to download it again, or ask its author"
    with pytest.raises(KvqError, match=says) as raised:
        load_artifact("user/repo")
    assert "\n" not in str(raised.value) and "calibrate again" not in str(raised.value)
    with pytest.raises(KvqError, match=says):
        verified_config("user/repo")


def test_without_the_hub_the_cached_snapshot_is_read(hub, pushed, monkeypatch):
    from huggingface_hub import constants

    pushed()
    commit, digest = hub.repositories["user/repo"].refs["main"], load_artifact("user/repo").digest
    with socket.socket() as closed:  # a port at which nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert load_artifact("user/repo").digest == digest
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("user/repo", f"user/repo@{commit}"):
        assert load_artifact(name).digest == digest
    with pytest.raises(KvqError, match="no artifact at user/other: not a folder, never downloaded, and the"):
        load_artifact("user/other")


def test_commands_take_ids(hub, pushed, kvq):
    pushed()
    shown = kvq("inspect", "user/repo", "--json")
    assert json.loads(shown.stdout)["method"]["name"] == "temporalkv"
    refused = kvq("generate", "hi", "--artifact", "user/repo")
    assert re.search(r"artifact user/repo@\w+ belongs to the model 'mine'", refused.stderr), refused.stderr
    refused = kvq("eval", "--compare", "fp16,user/repo", "--samples", 1)
    assert re.search(r"artifact user/repo@\w+ belongs to the model 'mine'", refused.stderr), refused.stderr


def test_a_given_option_that_needs_another_calibration_is_refused(hub, pushed):
    pushed()
    assert read_config(Path("mine-2"))["method"]["bits"] == 2
    with pytest.raises(UsageError, match="bits=4: the artifact user/repo@.* was calibrated with bits=2"):
        attach(tiny_model(), "user/repo:bits=4")


def test_servers_get_the_folder_of_the_snapshot(hub, pushed):
    pushed()
    artifact = load_artifact("user/repo")
    given = ServedMethod.of(artifact).additional_config()
    folder = Path(given["kvq"]["artifact"])
    assert folder.name == hub.repositories["user/repo"].refs["main"] and read_config(folder) == artifact.config
