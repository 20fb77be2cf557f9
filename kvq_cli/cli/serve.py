"""`kvq serve`: a vLLM server whose cache is compressed by a method of kvq."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.cli.resolve import resolve
from kvq_cli.errors import KvqError, UsageError

#: Seconds that vLLM has to end after its --shutdown-timeout, before it is killed.
_TEARDOWN = 15
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the command; start no server.")]


def serve(
    ctx: typer.Context,
    method: opt.MethodOrDefault = None,
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
    attachable = resolve(
        model, method, bits, artifact, _options(method, artifact, set_), trust_remote_code=trust_remote_code
    )
    flags += ["--trust-remote-code"] if trust_remote_code else []
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
