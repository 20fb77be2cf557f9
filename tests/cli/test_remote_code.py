"""Python code of a model's folder runs only with --trust-remote-code, and nothing asks on stdin whether to run it."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvq_cli.cli.app import app
from kvq_cli.errors import KvqError
from kvq_cli.models import configured_shape, load_model
from kvq_cli.reference import model_path

#: Arguments that each command needs to reach its model; a command without an entry is run with --model alone.
ARGUMENTS = {
    "recommend": ["--memory", "8GB"],
    "generate": ["a prompt", "-n", 1],
    "eval": ["--task", "perplexity", "--seqlen", 320, "--samples", 1],
    "analyze": ["entropy", "--samples", 1, "--seqlen", 16],
    "plan": ["--memory", "8GB"],
    "serve": ["--dry-run"],
    "bench generate": ["--context", 16, "--batch", 1, "--tokens", 1, "--rounds", 1],
    "bench calibrate": ["--samples", 2, "--seqlen", 64],
    "reproduce": ["table-temporalkv-6", "--quiet"],
}
#: Commands that read the model's config only; vLLM reads the rest for `serve`.
CONFIG_ONLY = ("bits", "plan", "serve")
CODE = """
from pathlib import Path

Path({marker!r}).write_text("run")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def commands_with_a_model() -> list[str]:
    """Every command with --model, read from the app."""
    found = []

    def walk(command, words):
        for name, sub in getattr(command, "commands", {}).items():
            walk(sub, [*words, name])
        if any("--model" in parameter.opts for parameter in command.params):
            found.append(" ".join(words))

    walk(typer.main.get_command(app), [])
    return found


COMMANDS = commands_with_a_model()


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that the folder's code writes when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "code was run"


@pytest.fixture
def own_code(tmp_path, marker):
    """`own_code("config")`: a model folder whose config.json (or "tokenizer") names Python code in the folder."""

    def make(part: str, model_type: str = "own"):
        folder = tmp_path / part
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(model_path())
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "own.py").write_text(CODE.format(marker=str(marker)))
        if part == "config":
            classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
            edit(folder / "config.json", model_type=model_type, auto_map=classes)
        else:
            classes = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
            edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)
        return folder

    return make


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_commands_with_a_model_are_found():
    assert {"generate", "chat", "eval", "calibrate", "bench generate", "bits", "plan", "analyze"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_the_config_is_refused_in_one_line(fails, own_code, marker, command):
    words = [*command.split(), *ARGUMENTS.get(command, [])]
    fails(*words, "--model", own_code("config"), code=1, says="--trust-remote-code", input="y\n")
    assert not marker.exists()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in (*CONFIG_ONLY, "reproduce")])
def test_code_of_the_tokenizer_is_refused_in_one_line(fails, own_code, marker, command):
    words = [*command.split(), *ARGUMENTS.get(command, [])]
    fails(*words, "--model", own_code("tokenizer"), code=1, says="--trust-remote-code", input="y\n")
    assert not marker.exists()


@pytest.mark.parametrize("command", CONFIG_ONLY)
def test_commands_that_read_the_config_alone_run_no_code_of_the_tokenizer(kvq, own_code, marker, command):
    done = kvq(command, *ARGUMENTS.get(command, []), "--model", own_code("tokenizer"), input="y\n")
    assert done.exit_code == 0 and not marker.exists()


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_loading_in_python_refuses_by_default(own_code, marker, part):
    folder = own_code(part)
    with pytest.raises(KvqError, match=f"{folder}.*--trust-remote-code"):
        load_model(str(folder))
    assert not marker.exists()


def test_a_config_with_code_that_transformers_does_not_need_loads_without_it(own_code, marker):
    """As in the repositories of models that transformers learned later."""
    folder = own_code("config", model_type="llama")
    assert type(load_model(str(folder)).model) is LlamaForCausalLM
    assert configured_shape(str(folder)).head_dim == 32
    assert not marker.exists()


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_the_flag_runs_the_code(own_code, marker, part):
    loaded = load_model(str(own_code(part)), trust_remote_code=True)
    own = loaded.model if part == "config" else loaded.tokenizer
    assert type(own).__name__ == {"config": "OwnModel", "tokenizer": "OwnTokenizer"}[part]
    assert marker.exists() and loaded.label.endswith("(trusted remote code)")


def test_eval_names_the_trusted_code(kvq, own_code, marker):
    words = ["eval", *ARGUMENTS["eval"], "--method", "kivi", "--model", own_code("config"), "--trust-remote-code"]
    done = kvq(*words, "--json")
    assert done.exit_code == 0, done.stderr
    assert marker.exists()
    assert json.loads(done.stdout)["config"]["model_args"]["trust_remote_code"] is True
    assert "with its own Python code (--trust-remote-code)" in done.stderr


def test_eval_of_other_models_names_none(kvq):
    done = kvq("eval", *ARGUMENTS["eval"], "--method", "kivi", "--json")
    assert "trust_remote_code" not in json.loads(done.stdout)["config"]["model_args"]
