"""Options shared by several subcommands, each defined once as an `Annotated` type, and groups of options.

A subcommand declares `seed: Seed = 0`, or a group (`model_options: ModelOptions`, see `option_groups`). Flags take
precedence over `--config FILE.yaml`, and the file over defaults. Keys of the YAML file are flag names without leading
dashes; a list stands for comma-separated values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq_cli import packaged
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import Rule, Values, unless
from kvq_cli.errors import UsageError, reading
from kvq_cli.files import MAX_SETTINGS, read_text
from kvq_cli.gguf_models import is_gguf

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvq_cli.cli.sizes import ModelSize
    from kvq_cli.distributed import Workers
    from kvq_cli.models import LoadedModel

SHARED, METHOD, WORKERS = "Shared options", "Compression", "Workers"  # panels of the help text
_shared = partial(typer.Option, rich_help_panel=SHARED)
_method = partial(typer.Option, rich_help_panel=METHOD)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; UsageError if the file is missing, unreadable or contains something else."""
    import yaml

    with reading(f"--config {path}", kind=UsageError):
        try:
            content = yaml.safe_load(read_text(path, MAX_SETTINGS))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must contain `flag: value` lines, not a {type(content).__name__}")
    return content


def _as_flag(value: Any) -> Any:
    """Convert a YAML value to the form in which it is typed on the command line."""
    if isinstance(value, dict):  # `hybrid: off` is a boolean in YAML
        switches = {True: "on", False: "off"}
        return [f"{key}={switches[item] if isinstance(item, bool) else _as_flag(item)}" for key, item in value.items()]
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return str(value)
    return value


def as_defaults(ctx: typer.Context, values: Mapping[str, Any], where: str, hidden: Collection[str] = ()) -> None:
    """Make `values`, by flag names without leading dashes, the defaults of the command's parameters.

    UsageError, after `where`, for an unknown one, or one of the `hidden` parameters.
    """
    hidden = {"config", "help", *hidden}
    known = [parameter for parameter in ctx.command.params if parameter.name not in hidden]
    by_name = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in known
        for name in [parameter.name or "", *parameter.opts]
    }
    defaults = {}
    for key, value in values.items():
        parameter = by_name.get(str(key).replace("-", "_"))
        if parameter is None:
            valid = sorted(p.opts[0].lstrip("-") for p in known)
            raise UsageError(f"{where}: unknown key {str(key)!r}; valid: {', '.join(valid)}")
        with reading(f"{where}: {key}", kind=UsageError):  # a mapping may hold itself
            value = _as_flag(value)
        repeatable = getattr(parameter, "multiple", False)
        if isinstance(value, list):
            value = [str(v) for v in value] if repeatable else ",".join(str(v) for v in value)
        elif repeatable and value is not None:
            value = [str(value)]
        if value is not None:
            defaults[parameter.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _apply_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a `--config` file the defaults of the command's parameters."""
    if path is not None and not ctx.resilient_parsing:
        as_defaults(ctx, read_yaml(path), f"--config {path}")
    return path


def _accept_license(ctx: typer.Context, accepted: bool) -> bool:
    """Accept terms of use while the command runs."""
    if accepted and not ctx.resilient_parsing:
        ctx.with_resource(packaged.accepted_licenses())
    return accepted


def _compresses(values: Values) -> bool:
    """Whether one of the methods is not fp16."""
    if values.get("compare") is not None:
        return bool(values.get("artifact")) or any(name != "fp16" for name in listed(values["compare"]))
    return values.get("method") != "fp16" or bool(values.get("artifact"))


def listed(text: str) -> list[str]:
    """The names that an option joins by commas; see `names` for those that must not be empty."""
    return [name.strip() for name in text.split(",")]


def artifact_method(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """Name and bits of an artifact's method, from its config alone. Raises KvqError for a damaged one, which is
    reported when it is loaded."""
    from kvq_cli.artifact import local_folder, read_config
    from kvq_cli.artifact.schema import check_form

    method = read_config(local_folder(folder))["method"]
    bits = {"bits": method["bits"]} if "bits" in method else {}
    check_form({"name": method.get("name"), **bits}, {"name": str, "bits?": float}, f"{folder}: method")
    return method["name"], bits


def _shared_notes(values: Values, flag: str) -> Iterator[str]:
    """Which of the compared methods an option of `--set` or `--bits` does not reach."""
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import has_option, parse

    if values.get("compare") is None:  # as in commands without --compare
        return
    named = {text: artifact_method(text) if is_artifact(text) else parse(text) for text in listed(values["compare"])}
    for key in ["bits"] if flag == "--bits" else method_options(values["set_"]):
        shown = flag if flag == "--bits" else f"--set {key}"
        own = [text for text, (name, options) in named.items() if has_option(name, key) and key in options]
        lacking = [text for text, (name, _) in named.items() if name != "fp16" and not has_option(name, key)]
        reading = [text for text, (name, _) in named.items() if has_option(name, key) and text not in own]
        if not reading and (own or key == "bits"):
            yield f"{shown} has no effect: " + (f"set in {', '.join(own)}" if own else "no method has it")
        elif reading and (own or lacking):
            missing = [f"{', '.join(lacking)} (no such option)"] * bool(lacking)
            missing += [f"{', '.join(own)} (its own)"] * bool(own)
            yield f"{shown} applies to {', '.join(reading)}; not to {' and '.join(missing)}"


of_compared = Rule(_shared_notes)
_builtin = ("reference", *packaged.MODELS)
needs_code = unless(
    lambda values: values["model"] not in _builtin and not is_gguf(values["model"]),
    "the model has no Python code of its own",
)
needs_license = unless(
    lambda values: values["model"] in packaged.MODELS and packaged.MODELS[values["model"]].terms is not None,
    "kvq asks for no terms of use of this model",
)
needs_compression = unless(
    lambda values: _compresses(values) or bool(values.get("load_cache")),  # a saved cache is of one kind of prefill
    "fp16 compresses nothing",
)


Model = Annotated[
    str,
    _shared(
        "--model",
        metavar="NAME",
        help="`reference` (built in), `smollm2` or `gemma3-270m` (packages), a Hugging Face model id, a folder, or a "
        ".gguf file.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _shared("--trust-remote-code", help="Run the Python code in the model's folder or repository, if it needs any."),
    needs_code,
]
AcceptLicense = Annotated[
    bool,
    _shared(
        "--accept-license",
        callback=_accept_license,
        help="Accept the terms of use that the first use of `gemma3-270m` shows.",
    ),
    needs_license,
]
Device = Annotated[
    str, _shared("--device", metavar="NAME", help="Device: auto (a GPU if there is one), cpu, cuda, cuda:0, ...")
]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"],
    _shared("--dtype", help="Dtype of weights and activations; auto: that of the stored weights."),
]
Seed = Annotated[int, _shared("--seed", min=0, max=2**32 - 1, help="Random seed.")]
Config = Annotated[
    Path | None,
    _shared(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=_apply_config,
        help="Read options from a YAML file; flags take precedence.",
    ),
]
Json = Annotated[bool, _shared("--json", help="Print one JSON document to stdout and everything else to stderr.")]
Quiet = Annotated[bool, _shared("--quiet", "-q", help="Print no progress and no notes to stderr.")]
#: Of a command that passes on short options.
LongQuiet = Annotated[bool, _shared("--quiet", help="Print no progress and no notes to stderr.")]

MethodName = Annotated[
    str | None, _method("--method", metavar="NAME", help="Compression method; `kvq methods` lists them.")
]
MethodOrDefault = Annotated[
    str | None,
    _method("--method", metavar="NAME", help="Compression method (default: kivi); `kvq methods` lists them."),
]
MethodOrBest = Annotated[
    str | None,
    _method(
        "--method",
        metavar="NAME",
        help="Compression method; `kvq methods` lists them, fp16: no compression (default: the artifact in "
        "artifacts/MODEL of klt, else with the lowest calibration error, at --bits, 2 bits if not given; without one, "
        "or with --set: kivi).",
    ),
]

MethodToServe = Annotated[
    str | None,
    _method(
        "--method",
        metavar="NAME",
        help="Compression method; `kvq methods` lists them, fp16: no compression (default: klt's artifact in "
        "artifacts/MODEL at --bits, 2 bits if not given; without one, or with --set: kivi).",
    ),
]


def _bits(text: str) -> float:
    """A number of bits: whole, or with a fraction, which some methods have."""
    try:
        bits = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None
    return int(bits) if bits.is_integer() else bits


Bits = Annotated[
    float | None,
    _method("--bits", metavar="N", parser=_bits, help="Bits per cached number (default: the method's)."),
    of_compared,
]
#: Of a command whose default is not the method's.
BitsWithDefault = Annotated[float | None, _method("--bits", metavar="N", parser=_bits, help="Bits per cached number.")]
#: The default folder of an artifact, in help texts.
DEFAULT_ARTIFACT = (
    "artifacts/MODEL/METHOD-BITSbit, with options that differ from their defaults appended, such as "
    "klt-2bit-join-keys-on"
)
ArtifactDir = Annotated[
    Path | None,
    _method(
        "--artifact",
        metavar="DIR",
        help=f"Folder of a calibrated artifact, or USER/REPO[@REVISION] on the Hugging Face Hub (default: "
        f"{DEFAULT_ARTIFACT}).",
    ),
]
Set = Annotated[
    list[str] | None,
    _method(
        "--set", metavar="OPTION=VALUE", help="An option of the method (`kvq methods NAME` lists them); repeatable."
    ),
    of_compared,
]
Prefill = Annotated[
    Literal["exact", "compressed"],
    _method(
        "--prefill",
        help="Prompt tokens attend to each other in full precision (exact) or to the compressed cache (compressed).",
    ),
    needs_compression,
]

Backend = Annotated[
    Literal["auto", "triton", "torch"],
    _shared(
        "--backend",
        help="Decode attention by Triton kernels or PyTorch; auto: kernels on a GPU if they support the method's "
        "storage format, else PyTorch.",
    ),
]


@dataclass(frozen=True)
class CompressionOptions:
    """The compression method, or its artifact, and its options."""

    method: MethodOrBest = None
    bits: Bits = None
    artifact: ArtifactDir = None
    set_: Set = None

    @property
    def is_default(self) -> bool:
        """Whether no method was chosen: the model's best artifact is used, if it has one."""
        return self.method is None and self.artifact is None and not self.set_


@dataclass(frozen=True)
class LoadOptions:
    """The model, its device and dtype, and the seed."""

    model: Model = "reference"
    trust_remote_code: TrustRemoteCode = False
    accept_license: AcceptLicense = False
    device: Device = "auto"
    dtype: Dtype = "auto"
    seed: Seed = 0

    def load(self) -> LoadedModel:
        """Load the model."""
        from kvq_cli.models import load_model

        return load_model(self.model, self.device, self.dtype, trust_remote_code=self.trust_remote_code)

    def size(self) -> ModelSize:
        """Return the model's shape, bytes of weights and context, without its weights."""
        from kvq_cli.cli.sizes import model_size

        return model_size(None, self.model, self.trust_remote_code)


@dataclass(frozen=True)
class ModelOptions(LoadOptions):
    """The model, and the attention backend."""

    backend: Backend = "auto"


WorkerCount = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Number of worker processes on this machine, run by Ray (extra `ray`); results are the same as with one "
        "process.",
        rich_help_panel=WORKERS,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on all machines of a Ray cluster: its address, or auto (docs/SWEEPS.md).",
        rich_help_panel=WORKERS,
    ),
]


@dataclass(frozen=True)
class WorkerOptions:
    """Where the work runs."""

    workers: WorkerCount = None
    ray: RayAddress = None

    def connected(self, device: str = "cpu") -> AbstractContextManager[Workers | None]:
        """The workers inside the block; None: this process. UsageError or KvqError without them."""
        from kvq_cli.distributed import connected

        return connected(self.workers, self.ray, device)

    def address(self) -> AbstractContextManager[str | None]:
        """The address of the cluster for commands that run inside the block; None: they run in their own process."""
        from kvq_cli.distributed import cluster_address

        return cluster_address(self.workers, self.ray)


@dataclass(frozen=True)
class OutputOptions:
    """Output format, and the YAML file of options, which was applied before the command runs."""

    config: Config = None
    as_json: Json = False
    quiet: Quiet = False

    def output(self) -> Output:
        return Output(as_json=self.as_json, quiet=self.quiet)


def method_options(pairs: list[str] | None) -> dict[str, str]:
    """Parse `--set sinks=8 --set hybrid=off` to keyword arguments of `methods.registry.build`."""
    options = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair}: must be OPTION=VALUE, like --set sinks=8")
        options[key.strip().replace("-", "_")] = value.strip()
    return options


def numbers(text: str, flag: str) -> list[int]:
    """Parse `512,1024` to positive integers; UsageError naming `flag` for anything else."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise UsageError(f"{flag} {text}: must be whole numbers above 0, joined by commas, like {flag} 512,1024")
    return values


def names(text: str, flag: str) -> list[str]:
    """Parse `fp16,kivi` to a list of names; UsageError naming `flag` if one is empty."""
    values = listed(text)
    if not all(values):
        raise UsageError(f"{flag} {text!r}: must be names joined by commas")
    return values
