"""Options that several subcommands share, each defined once as an `Annotated` type, and groups of them.

A subcommand writes `seed: Seed = 0`, or takes a group of options (`computing: Computing`, see `groups`). Defaults <
`--config FILE.yaml` < flags. Keys of the YAML file are the flags' names without the leading dashes; a list stands for
values joined by commas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvq_cli.cli.output import Output
from kvq_cli.errors import UsageError

SHARED, METHOD = "Shared options", "Compression"  # panels of the help text
_shared = partial(typer.Option, rich_help_panel=SHARED)
_method = partial(typer.Option, rich_help_panel=METHOD)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; UsageError where it is missing, unreadable or something else."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"--config {path}: must hold `flag: value` lines, not a {type(found).__name__}")
    return found


def _as_flag(value: Any) -> Any:
    """A YAML value in the form in which the flag would be typed."""
    if isinstance(value, dict):
        return [f"{key}={_as_flag(item)}" for key, item in value.items()]
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return str(value)
    return value


def _apply_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of this command's parameters."""
    if path is None or ctx.resilient_parsing:
        return path
    parameters = {}
    for parameter in ctx.command.params:
        for name in [parameter.name, *parameter.opts]:
            parameters[name.lstrip("-").replace("-", "_")] = parameter
    defaults = {}
    for key, value in read_yaml(path).items():
        parameter = parameters.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name in ("config", "help"):
            valid = sorted(p.opts[0].lstrip("-") for p in ctx.command.params if p.name not in ("config", "help"))
            raise UsageError(f"--config {path}: unknown key {str(key)!r}; valid: {', '.join(valid)}")
        value = _as_flag(value)
        several = getattr(parameter, "multiple", False)
        if isinstance(value, list):
            value = [str(v) for v in value] if several else ",".join(str(v) for v in value)
        elif several and value is not None:
            value = [str(value)]
        if value is not None:
            defaults[parameter.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


Model = Annotated[
    str, _shared("--model", metavar="NAME", help="`reference` (built in), a Hugging Face id, or a folder.")
]
Device = Annotated[str, _shared("--device", metavar="NAME", help="auto, cpu, cuda, cuda:0, ...")]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"], _shared("--dtype", help="Numbers the model computes in.")
]
Seed = Annotated[int, _shared("--seed", min=0, max=2**32 - 1, help="Same seed, same result.")]
Config = Annotated[
    Path | None,
    _shared(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=_apply_config,
        help="Read options from a YAML file; flags win over it.",
    ),
]
Json = Annotated[bool, _shared("--json", help="Print one JSON document to stdout, all else to stderr.")]
Quiet = Annotated[bool, _shared("--quiet", "-q", help="No progress and no notes on stderr.")]

MethodName = Annotated[
    str | None, _method("--method", metavar="NAME", help="Compression method; `kvq methods` lists them.")
]
Bits = Annotated[int | None, _method("--bits", metavar="N", help="Bits per cached number (default: the method's).")]
ArtifactDir = Annotated[
    Path | None,
    _method(
        "--artifact",
        metavar="DIR",
        help="A calibrated artifact (default: artifacts/MODEL/METHOD-BITSbit).",
    ),
]
Set = Annotated[
    list[str] | None, _method("--set", metavar="OPTION=VALUE", help="An option of the method; may be repeated.")
]
Prefill = Annotated[
    Literal["exact", "compressed"],
    _method("--prefill", help="Whether the prompt attends to itself exactly or to its compressed cache."),
]

Backend = Annotated[
    Literal["auto", "triton", "torch"],
    _shared(
        "--backend",
        help="Who computes attention while decoding: Triton kernels or PyTorch; auto: kernels on a GPU where they can "
        "read what the method stores.",
    ),
]


@dataclass(frozen=True)
class Compression:
    """The method to compress with."""

    method: MethodName = None
    bits: Bits = None
    artifact: ArtifactDir = None
    set_: Set = None


@dataclass(frozen=True)
class Computing:
    """The model, and where and how it computes."""

    model: Model = "reference"
    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: Backend = "auto"
    seed: Seed = 0


@dataclass(frozen=True)
class Reporting:
    """What a command prints. `config` has been read when a command runs."""

    config: Config = None
    as_json: Json = False
    quiet: Quiet = False

    def output(self) -> Output:
        return Output(as_json=self.as_json, quiet=self.quiet)


def method_options(pairs: list[str] | None) -> dict[str, str]:
    """`--set sinks=8 --set hybrid=off` as keyword arguments of `methods.registry.build`, which reads the values."""
    found = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair}: must be OPTION=VALUE, like --set sinks=8")
        found[key.strip().replace("-", "_")] = value.strip()
    return found


def numbers(text: str, flag: str) -> list[int]:
    """`512,1024` as whole numbers above zero; `flag` names the option in the error."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{flag} {text}: must be whole numbers above 0, joined by commas, like {flag} 512,1024")
    return found


def names(text: str, flag: str) -> list[str]:
    """`fp16,kivi` as a list without blanks; `flag` names the option in the error."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise UsageError(f"{flag} {text!r}: must be names joined by commas")
    return found
