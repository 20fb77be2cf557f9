"""`kvq serve --dry-run` where vLLM is installed: what its parser and its configuration refuse is an error at once."""

from __future__ import annotations

import json
import shlex

import pytest


@pytest.fixture
def dry(kvq, folder):
    """`dry("--port", "1")` -> the words of the command, or the error, of a dry run with these flags."""

    def run(*flags: object, code: int = 0):
        result = kvq("serve", "--model", folder, "--method", "kivi", "--dry-run", "--quiet", *flags)
        assert result.exit_code == code, result.stderr
        if code == 0:
            return shlex.split(result.stdout)
        assert not result.stdout
        return result.stderr

    return run


@pytest.fixture
def file(tmp_path):
    """`file(port=1)`: a configuration file of vLLM."""

    def write(**values: object):
        path = tmp_path / "server.yaml"
        path.write_text(json.dumps({name.replace("_", "-"): value for name, value in values.items()}))
        return path

    return write


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prot", "8123"), "unrecognized arguments: --prot 8123"),
        (("--tensor-parallel", "2"), "unrecognized arguments: --tensor-parallel 2"),  # kvq would not see its meaning
        (("--api-k", "mine"), "unrecognized arguments: --api-k ***"),
        (("--port", "8123", "other"), "unrecognized arguments: other"),
        (("--port", "all"), "argument --port: invalid int value: 'all'"),
        (("--max-model-len", "100000"), "max_model_len (100000) is greater than the derived max_model_len"),
        (("--gpu-memory-utilization", "3"), "vLLM: gpu_memory_utilization: Input should be less than or equal to 1"),
        (("--enable-auto-tool-choice",), "--enable-auto-tool-choice requires --tool-call-parser"),
        (("--chat-template", "no/such.jinja"), "no/such.jinja"),
        (("--config", "none.yaml"), "--config none.yaml: "),
    ],
)
def test_refused_before_a_server_starts(dry, flags, message):
    error = dry(*flags, code=2)
    assert error.startswith("kvq: error: ") and message in error and error.count("\n") == 1


def test_accepted(dry):
    flags = ("-tp=1", "-cc.cudagraph_mode=NONE", "--max_model_len", "1k", "-O0", "--no-enable-sleep-mode")
    assert dry(*flags)[-len(flags) :] == list(flags)


def test_flags_of_a_file_come_before_those_of_the_command_line(dry, file):
    path = file(port=1, block_size=64, enable_sleep_mode=False, api_key=["mine", "yours"], shutdown_timeout=5)
    words = dry("--port", "2", f"--config={path}", "--seed=1")
    assert words[-7:] == ["--no-enable-sleep-mode", "--api-key", "***", "***", "--port", "2", "--seed=1"]
    for name, value in {"--block-size": "64", "--shutdown-timeout": "5", "--port": "1"}.items():
        assert words[words.index(name) + 1] == value
    assert not any("config=" in word for word in words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, "unrecognized arguments: --prot 1"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is not supported by kvq"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: kvq serve sets it"),
        ({"model": "other"}, "has model: remove it there, and give kvq serve --model"),
        ({"dtype": "bfloat16"}, "has dtype: remove it there, and give kvq serve --dtype"),
    ],
)
def test_refused_in_a_file(dry, file, values, message):
    assert message in dry("--config", file(**values), code=2)
