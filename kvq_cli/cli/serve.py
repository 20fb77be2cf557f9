"""`kvq serve`: a vLLM server whose cache is compressed by a method of kvq."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.resolve import resolve

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.vllm.command import ServePlan
    from kvq_cli.vllm.prefix_store.settings import StoreSettings
    from kvq_cli.vllm.prefix_store.stock import StockPlan

#: Seconds that vLLM has to end after its --shutdown-timeout, before it is killed.
_TEARDOWN = 15
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the command; start no server.")]
PrefixStore = Annotated[
    str | None,
    typer.Option(
        "--prefix-store",
        metavar="DIR",
        help="Store full blocks of prompts in this folder, which servers share. Without --method, the cache is vLLM's.",
    ),
]
PrefixStoreSize = Annotated[
    str | None,
    typer.Option("--prefix-store-size", metavar="SIZE", help="Size of the folder (default: 20GiB)."),
]
PrefixStoreArtifact = Annotated[
    str | None,
    typer.Option(
        "--prefix-store-artifact",
        metavar="DIR|raw",
        help="klt's artifact, with whose codes blocks are stored (default: of 4 bits, in artifacts/MODEL); raw: as "
        "they are.",
    ),
]


def serve(
    ctx: typer.Context,
    method: opt.MethodToServe = None,
    bits: opt.Bits = None,
    artifact: opt.ArtifactDir = None,
    set_: opt.Set = None,
    prefix_store: PrefixStore = None,
    prefix_store_size: PrefixStoreSize = None,
    prefix_store_artifact: PrefixStoreArtifact = None,
    dry_run: DryRun = False,
    model: opt.Model = "reference",
    trust_remote_code: opt.TrustRemoteCode = False,
    accept_license: opt.AcceptLicense = False,
    dtype: opt.Dtype = "auto",
    quiet: opt.LongQuiet = False,
) -> None:
    """Serve a model with vLLM (extra `vllm`) and a compressed cache. Other flags, such as --port, are passed to vLLM.

    Without --method, the model's artifact of klt is served, if it has one, else kivi.

    Checks the method and its artifact against the model, computes the block size, prints the `vllm serve` command and
    runs it. Exits with code 1 if a server process dies, so that a supervisor can restart it. docs/SERVING.md has
    the methods, their windows and what they cost. Layers with a sliding window stay in vLLM's own cache, in 16 bits.
    """
    if "-h" in ctx.args:  # as a word: typer would also find it in vLLM's -dph
        print(ctx.get_help())
        raise typer.Exit
    if ctx.args and not ctx.args[0].startswith("-"):  # as in `vllm serve MODEL`
        raise UsageError(f"{ctx.args[0]}: give the model as --model {ctx.args[0]}")
    out = Output(quiet=quiet)
    if method is not None:
        from kvq_cli.methods.registry import method_class

        method_class(method)  # an unknown name is reported before PyTorch is imported
    from kvq_cli.vllm.flags import masked
    from kvq_cli.vllm.parse import check_arguments, parsed_flags
    from kvq_cli.vllm.prepare import prepare

    missing = _missing_vllm(dry_run)
    flags = list(ctx.args) if missing else parsed_flags(ctx.args)
    flags += ["--trust-remote-code"] if trust_remote_code else []
    compression = opt.CompressionOptions(method, bits, artifact, set_)
    if prefix_store is None and (prefix_store_size or prefix_store_artifact):
        raise UsageError("--prefix-store-size and --prefix-store-artifact need --prefix-store DIR")
    if prefix_store_artifact is None and not compression.is_default and method != "fp16":
        prefix_store_artifact = "raw"  # pages of other methods hold codes already
    store = _store(prefix_store, prefix_store_size, prefix_store_artifact, model, trust_remote_code, out)
    plan: ServePlan | StockPlan
    if store is not None and compression.is_default and bits is None:
        from kvq_cli.vllm.prefix_store.stock import stock_plan

        plan = stock_plan(store, model, dtype, trust_remote_code, flags)
    elif compression.is_default and store is None:
        plan = _default_plan(model, bits, dtype, trust_remote_code, flags, out)
    else:
        options = _options(method, artifact, set_)
        attachable = resolve(model, method, bits, artifact, options, trust_remote_code=trust_remote_code)
        plan = prepare(attachable, model, dtype, trust_remote_code, flags, store)
    arguments = plan.arguments()
    if not missing:
        check_arguments(arguments)
    out.note(plan.summary())
    if missing:
        out.note(f"vLLM's flags are not checked: {missing}")
    if _is_open(flags):
        out.note("vLLM listens on all interfaces, without a key: give --host 127.0.0.1, or a key in VLLM_API_KEY")
    seed = {} if store is None else {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    print(shlex.join([*(f"{name}={value}" for name, value in seed.items()), "vllm", *masked(arguments)]))
    if not dry_run:
        os.environ.update(seed)
        from kvq_cli.vllm.supervise import supervise

        sys.stdout.flush()
        raise typer.Exit(supervise(arguments, plan.shutdown_timeout + _TEARDOWN))


def _default_plan(
    model: str, bits: float | None, dtype: str, trust_remote_code: bool, flags: Sequence[str], out: Output
) -> ServePlan:
    """The plan of a server with the model's artifact of klt at `bits`, or with the method without one; notes which.
    Raises UsageError, with the artifact's name, for one that cannot be served."""
    from kvq_cli.cli.best_artifact import PREFERRED, default_method, method_line
    from kvq_cli.methods.base import Method
    from kvq_cli.vllm.checks import check_flags
    from kvq_cli.vllm.prepare import belongs_to, prepare

    def fits(artifact: Artifact) -> bool:
        return belongs_to(artifact, model, trust_remote_code)

    check_flags(flags)  # an error of flags that no method has names no artifact
    attachable, reason, notes = default_method(model, bits, fits, only=PREFERRED)
    try:
        plan = prepare(attachable, model, dtype, trust_remote_code, flags)
    except UsageError as error:
        if isinstance(attachable, Method):
            raise
        raise UsageError(f"{attachable.path}, the default of {model} (--method has others): {error}") from None
    for note in (*notes, method_line(plan.served.method, attachable, reason)):
        out.note(note)
    return plan


def _store(
    folder: str | None, size: str | None, artifact: str | None, model: str, trust_remote_code: bool, out: Output
) -> StoreSettings | None:
    """The store of prefixes; None: there is none. Raises UsageError, KvqError for an artifact that is missing, damaged
    or another model's."""
    if folder is None:
        return None
    from kvq_cli.models import model_config, model_source
    from kvq_cli.vllm.prefix_store.settings import DEFAULT_BITS, DEFAULT_SIZE, StoreSettings
    from kvq_cli.vllm.prepare import belongs_to, check_weights

    if artifact is None:
        from kvq_cli.cli.best_artifact import PREFERRED, best_artifact

        def fits(own: Artifact) -> bool:
            return belongs_to(own, model, trust_remote_code)

        found, notes = best_artifact(model, DEFAULT_BITS, fits, PREFERRED)
        for note in notes:
            out.note(note)
        if found is None:
            raise UsageError(
                f"--prefix-store: no {DEFAULT_BITS}-bit artifact of klt for {model}; make one with `kvq calibrate "
                f"--model {model} --method klt --bits {DEFAULT_BITS}`, or give --prefix-store-artifact DIR, or raw"
            )
        artifact = str(found.path)
    settings = StoreSettings(folder, artifact, size or DEFAULT_SIZE)
    _ = settings.capacity  # refuses a size that is none
    if (codes := settings.load_codes()) is not None:
        config = model_config(model, trust_remote_code)
        codes.check_config(config, model)
        check_weights(codes, config, model_source(model), model, trust_remote_code)
    return settings


def _missing_vllm(dry_run: bool) -> KvqError | None:
    """What keeps vLLM from checking its flags; raises it unless this is a dry run, which does without."""
    from kvq_cli.vllm.plugin import check_version

    try:
        check_version()
    except KvqError as error:
        if not dry_run:
            raise
        return error
    return None


def _is_open(flags: Sequence[str]) -> bool:
    """Whether neither an address nor a key says who may connect."""
    from kvq_cli.vllm.flags import flag_value

    given = any(flag_value(flags, name) is not None for name in ("--host", "--uds", "--api-key"))
    return not given and not os.environ.get("VLLM_API_KEY")


def _options(method: str | None, artifact: object, pairs: list[str] | None) -> dict[str, str]:
    """`--set`, and for methods without an artifact what a server sets unless it is given."""
    from kvq_cli.resolve import DEFAULT_METHOD
    from kvq_cli.vllm.served import served_options

    given = opt.method_options(pairs)
    return given if artifact is not None else served_options(method or DEFAULT_METHOD, given)
