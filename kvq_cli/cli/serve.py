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
from kvq_cli.cli.resolve import resolve
from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.vllm.command import ServePlan

#: Seconds that vLLM has to end after its --shutdown-timeout, before it is killed.
_TEARDOWN = 15
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the command; start no server.")]


def serve(
    ctx: typer.Context,
    method: opt.MethodToServe = None,
    bits: opt.Bits = None,
    artifact: opt.ArtifactDir = None,
    set_: opt.Set = None,
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
    the methods, their windows and what they cost.
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
    if compression.is_default:
        plan = _default_plan(model, bits, dtype, trust_remote_code, flags, out)
    else:
        options = _options(method, artifact, set_)
        attachable = resolve(model, method, bits, artifact, options, trust_remote_code=trust_remote_code)
        plan = prepare(attachable, model, dtype, trust_remote_code, flags)
    arguments = plan.arguments()
    if not missing:
        check_arguments(arguments)
    out.note(plan.summary())
    if missing:
        out.note(f"vLLM's flags are not checked: {missing}")
    if _is_open(flags):
        out.note("vLLM listens on all interfaces, without a key: give --host 127.0.0.1, or a key in VLLM_API_KEY")
    print(shlex.join(["vllm", *masked(arguments)]))
    if not dry_run:
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
    from kvq_cli.cli.resolve import DEFAULT_METHOD
    from kvq_cli.vllm.served import served_options

    given = opt.method_options(pairs)
    return given if artifact is not None else served_options(method or DEFAULT_METHOD, given)
