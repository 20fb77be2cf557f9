"""Invalid input ends in exit code 1 or 2 and one line that says what to change; no partial files remain."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from random_artifacts import random_parts
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvq_cli.artifact import save_artifact
from kvq_cli.artifact.format import _checksum
from kvq_cli.methods.registry import build
from kvq_cli.reference import model_path

COMMANDS = {
    "generate": ["generate", "what the prompt says", "-n", 2],
    "eval": ["eval", "--task", "perplexity", "--seqlen", 128, "--samples", 1],
    "chat": ["chat"],
    "bench": ["bench", "generate", "--context", 16, "--batch", 1, "--tokens", 1, "--rounds", 1, "--bits", 3],
}


def save_model(folder, head_dim=32, broken=False):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if broken:  # only where a text has this word
        model.model.embed_tokens.weight[tokenizer(" the", add_special_tokens=False)["input_ids"][0]] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
@torch.no_grad()
def made(tmp_path_factory):
    """Folders: a tiny model, one with a NaN for one word, one with an odd head_dim, and an artifact of the first."""
    root = tmp_path_factory.mktemp("made")
    model = save_model(root / "tiny")
    save_model(root / "broken", broken=True)
    save_model(root / "odd", head_dim=24)
    parts = random_parts(build("channelkv", bits=2), model, str(root / "tiny"))
    save_artifact(root / "artifact", *parts, "card")
    return root


@pytest.fixture
def artifact(made, tmp_path):
    """A copy of the artifact that a test may damage."""
    return shutil.copytree(made / "artifact", tmp_path / "artifact")


def test_undamaged_artifact_works(kvq, made, artifact):
    result = kvq("generate", "a prompt", "-n", 2, "--model", made / "tiny", "--artifact", artifact, "--json")
    assert json.loads(result.stdout)["method"]["artifact"] == str(artifact)


@pytest.mark.parametrize("command", ["generate", "eval", "chat"])
def test_artifact_of_another_model_is_refused(fails, artifact, made, command):
    fails(*COMMANDS[command], "--artifact", artifact, code=2, says=f"belongs to the model '{made / 'tiny'}'")


@pytest.mark.parametrize("command", ["generate", "eval", "chat"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "newer", "edited", "no tensors", "no config"])
def test_damaged_artifact_error_names_the_file(fails, made, artifact, command, damage):
    tensors, config = artifact / "tensors.safetensors", artifact / "config.json"
    document = json.loads(config.read_text())
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif damage == "flipped":
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
    elif damage == "newer":
        config.write_text(json.dumps({**document, "format": document["format"] + 1}))
    elif damage == "edited":
        config.write_text(json.dumps({**document, "method": {**document["method"], "sinks": 7}}))
    else:
        (tensors if damage == "no tensors" else config).unlink()
    name = tensors.name if damage in ("cut", "flipped", "no tensors") else config.name
    flags = ["--model", made / "tiny", "--artifact", artifact]
    fails(*COMMANDS[command], *flags, code=1, says=f"{artifact / name}")


@pytest.mark.parametrize(("flags", "says"), [(["--method", "fp16"], "holds channelkv"), (["--bits", 4], "with bits=2")])
def test_flags_contradicting_the_artifact_are_refused(fails, artifact, flags, says):
    fails(*COMMANDS["generate"], "--artifact", artifact, *flags, code=2, says=says)


@pytest.mark.parametrize("command", COMMANDS)
def test_model_folder_without_config_is_an_error(fails, tmp_path, command):
    (tmp_path / "empty").mkdir()
    fails(
        *COMMANDS[command], "--model", "empty", code=1, says="--model empty: not a model folder: config.json is missing"
    )


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_unsupported_head_dim_is_refused(fails, made, command):
    fails(*COMMANDS[command], "--method", "kivi", "--model", made / "odd", code=2, says="head_dim=24")


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_nan_error_names_the_layer(fails, made, command):
    words = (*COMMANDS[command], "--quiet", "--method", "kivi", "--model", made / "broken")  # without progress
    fails(*words, code=1, says="layer 0: the keys contain NaN")


def test_missing_data_set_is_an_error(fails):
    perplexity = ["eval", "--task", "perplexity", "--samples", 1]
    fails(*perplexity, "--dataset", "gone.txt", code=2, says="gone.txt")
    fails(*perplexity, "--dataset", "wikitext2", code=1, says="wikitext2")


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_unwritable_output_folder_is_an_error(fails, made, tmp_path, command):
    (tmp_path / "file").write_text("in the way")
    flags = ["--model", made / "tiny", "--out", "file/out", "--quiet"]
    fails(*COMMANDS[command], *flags, code=1, says="file/out")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize("command", ["eval", "bench"])
def test_output_folder_without_permission_is_an_error(fails, made, tmp_path, command):
    (tmp_path / "locked").mkdir(mode=0o500)
    flags = ["--model", made / "tiny", "--out", "locked/out", "--quiet"]
    fails(*COMMANDS[command], *flags, code=1, says="Permission denied")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval", "bench"])
def test_full_disk_leaves_no_partial_files(made, tmp_path, command):
    """A limit on the size of files stands in for a full disk: writing beyond it fails in the same way."""
    words = [str(word) for word in [*COMMANDS[command], "--model", made / "tiny", "--out", tmp_path / "out", "--quiet"]]
    limited = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "from kvq_cli.cli import main\n"
        f"sys.argv = ['kvq', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", limited], capture_output=True, text=True, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert done.returncode == 1 and len(errors) == 1 and "File too large" in errors[0], done.stderr
    left = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.stat().st_size]
    assert all(path.suffix == ".jsonl" for path in left), left


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_interrupt_during_work(kvq_process, tmp_path, command):
    long = {"generate": ["generate", "a", "-n", 3000], "eval": ["eval", "--task", "perplexity", "--out", "out"]}
    process = kvq_process(*long[command])
    seen = process.stdout.read(1) if command == "generate" else None
    if command == "eval":
        while not (tmp_path / "out").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, (seen, stderr)
    assert "kvq: interrupted" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("place", ["name", "key"])
def test_escapes_of_an_artifact_do_not_reach_the_terminal(kvq, made, artifact, place):
    path = artifact / "config.json"
    document = json.loads(path.read_text())
    document["model"] |= {"name": "\x1b]0;title\x07"} if place == "name" else {"\x1b]0;title\x07": 1}
    path.write_text(json.dumps({**document, "checksum": _checksum(document)}))
    for words in (["inspect", artifact], [*COMMANDS["generate"], "--model", made / "tiny", "--artifact", artifact]):
        result = kvq(*words)
        assert result.exit_code == 1 and "config.json: model" in result.stderr
        assert "\x1b" not in result.output and "\x1b" not in result.stderr


def test_escapes_in_a_message_are_shown(fails):
    fails("inspect", "gone\x1b[2J", code=1, says="no artifact at gone\\x1b[2J")


LONG = "a" * 2**20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "x", "--set", LONG], "like --set sinks=8"),
        (["generate", "x", "--set", f"{LONG}=1", "--method", "kivi"], "its options are: bits"),
        (["generate", "x", f"--{LONG}"], "No such option"),
        (["generate", "x", "--dtype", LONG], "auto"),
        (["generate", "x", "--config", "long.yaml"], "unknown key"),
        (["inspect", LONG.replace("aaaa", "a / ")], "File name too long"),
    ],
)
def test_long_values_are_shortened_in_messages(kvq, tmp_path, words, says):
    (tmp_path / "long.yaml").write_text(f"? {LONG[:500_000]}\n: 1\n")
    result = kvq(*words)
    assert result.exit_code and says in result.stderr
    assert " characters ...] " in result.stderr and len(result.stderr) < 2000


def test_long_values_are_shortened_in_notes(capsys):
    from kvq_cli.cli.output import Output

    Output().note(f"first\nof {LONG}: last")
    assert capsys.readouterr().err.startswith("first\nof aaa")
    Output().warn(f"of {LONG}: last")
    warned = capsys.readouterr().err
    assert len(warned) < 2000 and warned.startswith("kvq: warning: of aaa") and warned.endswith("aaa: last\n")


@pytest.mark.parametrize("command", ["calibrate", "tune"])
def test_this_folder_is_no_new_folder(fails, made, command):
    fails(command, "--model", made / "tiny", "--out", ".", code=2, says="--out .: give the name of a new folder")


def test_a_method_that_fails_is_named_also_when_quiet(kvq, made, monkeypatch):
    from kvq_cli.evaluation import runner

    evaluate = runner.evaluate
    failed = {"failed": {"kivi-1bit": "layer 1: the keys contain NaN"}}
    monkeypatch.setattr(runner, "evaluate", lambda *args, **options: evaluate(*args, **options) | failed)
    result = kvq(*COMMANDS["eval"], "--model", made / "tiny", "--method", "fp16", "--quiet")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "kvq: warning: left out: kivi-1bit: layer 1: the keys contain NaN\n"
