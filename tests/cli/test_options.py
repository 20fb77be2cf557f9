"""Shared options: the YAML file, `--set`, and comma-separated lists."""

import json
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvq_cli.cli import options as opt
from kvq_cli.cli.app import KvqGroup
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build


@pytest.fixture
def run(tmp_path):
    """Write a YAML file, run a command that prints what it got: `run(yaml, *flags)`."""
    app = typer.Typer(cls=KvqGroup)
    app.callback()(lambda: None)

    @app.command()
    def show(
        context: Annotated[str, typer.Option("--context")] = "512",
        max_new: Annotated[int, typer.Option("--max-new", min=1)] = 7,
        bits: opt.Bits = None,
        set_: opt.Set = None,
        as_json: opt.Json = False,
        config: opt.Config = None,
    ) -> None:
        print(json.dumps([context, max_new, bits, opt.method_options(set_), as_json]))

    def call(yaml: str, *flags: str):
        path = tmp_path / "options.yaml"
        path.write_text(yaml)
        return CliRunner().invoke(app, ["show", *flags, "--config", str(path)])

    return call


def test_flags_override_yaml_and_yaml_overrides_defaults(run):
    yaml = "context: [256, 512]\nmax-new: 3\nset: {sinks: 4, pre_rope: true}\njson: true\n"
    assert json.loads(run("").stdout) == ["512", 7, None, {}, False]
    assert json.loads(run(yaml).stdout) == ["256,512", 3, None, {"sinks": "4", "pre_rope": "on"}, True]
    assert json.loads(run(yaml, "--max-new", "9", "--bits", "4").stdout)[:3] == ["256,512", 9, 4]
    assert json.loads(run(yaml, "--set", "sinks=1").stdout)[3] == {"sinks": "1"}


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("contxt: 5", "unknown key 'contxt'; valid: bits, context, json, max-new, set"),
        ("- 1", "not a list"),
        ("a: [", "not YAML"),
        ("max_new: 0", "--max-new"),
        ("config: other.yaml", "unknown key 'config'"),
        ("json: maybe", "json"),
    ],
)
def test_bad_yaml_is_one_line(run, yaml, says):
    result = run(yaml)
    assert result.exit_code == 2, result.output
    assert says in result.stderr and len(result.stderr.splitlines()) == 1


def test_missing_yaml_is_named(fails):
    fails("generate", "x", "--config", "gone.yaml", code=2, says="--config gone.yaml: No such file")


def test_numbers_and_names():
    assert opt.numbers("512, 1024", "--context") == [512, 1024]
    assert opt.names("fp16, kivi", "--compare") == ["fp16", "kivi"]
    for bad in ("", "0", "-1", "a", "1,,2", "1.5"):
        with pytest.raises(UsageError, match="--context"):
            opt.numbers(bad, "--context")
    with pytest.raises(UsageError, match="--compare"):
        opt.names("fp16,,kivi", "--compare")


@pytest.mark.parametrize("pair", ["sinks", "=8", ""])
def test_set_needs_both_sides(pair):
    with pytest.raises(UsageError, match="OPTION=VALUE"):
        opt.method_options([pair])


def test_switches_of_yaml_are_those_of_set(run):
    """YAML reads `off` as a boolean; options of words take `off` itself."""
    found = json.loads(run("set: {hybrid: off, normalize_keys: yes, sinks: 1}\n").stdout)[3]
    assert found == {"hybrid": "off", "normalize_keys": "on", "sinks": "1"}
    assert build("temporalkv", **found) == build("temporalkv", hybrid="off", normalize_keys=True, sinks=1)
