"""vLLM's own parser and checks, so that flags which it refuses are an error before a server starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.vllm.flags import flag_name, flag_value, masked, without

#: Flags of a `--config` file that are kvq's own on the command line.
_KVQ = ("--model", "--dtype", "--trust-remote-code")


def parsed_flags(flags: Sequence[str]) -> list[str]:
    """The flags, after those of the file that `--config` names. Raises UsageError unless vLLM's parser takes them."""
    words, file = list(flags), flag_value(flags, "--config")
    if file is not None:
        with _refusals(f"--config {file}"):
            of_file = _parser().load_config_file(file)
        for name in set(_KVQ) & set(map(flag_name, of_file)):
            raise UsageError(f"--config {file} has {name[2:]}: remove it there, and give kvq serve {name}")
        words = [*of_file, *without(flags, ["--config"])]
    with _refusals():
        _parser().parse_args(["MODEL", *words])
    return words


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UsageError unless vLLM takes the arguments `serve MODEL --flag ...` together."""
    with _refusals():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.common.cli_args import validate_parsed_serve_args

        args = _parser().parse_args(list(arguments[1:]))
        args.model = args.model_tag
        validate_parsed_serve_args(args)
        engine = AsyncEngineArgs.from_cli_args(args)
        if _has_device():
            engine.create_engine_config()
        else:
            engine.create_model_config()


@cache
def _parser() -> Any:
    """The parser of `vllm serve`, of unabbreviated flags: kvq finds those that concern it by their names."""
    _has_device()
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError("vLLM: " + " ".join(masked(message.split())))

    return make_arg_parser(Parser(allow_abbrev=False))


@cache
def _has_device() -> bool:
    """Whether vLLM finds a device; without one its parser needs another platform: that of `vllm bench`."""
    from vllm import platforms

    found = not platforms.current_platform.is_unspecified()
    if not found:
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    return found


@contextmanager
def _refusals(about: str = "vLLM") -> Iterator[None]:
    """Raise UsageError for any failure of vLLM; print nothing, since the server logs the same when it starts."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    except KvqError:
        raise
    except Exception as error:
        raise UsageError(f"{about}: {_reason(error)}") from error
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """The text of an error; of pydantic's, whose text has the values of all flags, the field and the message alone."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"]])
