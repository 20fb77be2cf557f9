"""Errors that the command line reports in one line.

Every failure that a user can cause or fix is raised as one of these; the command line prints the message and exits with
`exit_code`. The message names the flag, file or value to change.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class KvqError(Exception):
    """The run failed (exit code 1): a missing file, a damaged artifact, activations with NaN, a full disk."""

    exit_code = 1


class NotFiniteError(KvqError):
    """Activations with NaN or infinity: the model, or what the compressed cache makes of it, leaves its dtype's range.

    method: the label of the compared method that was attached; empty where there is no comparison.
    """

    method = ""


class WorkerDiedError(KvqError):
    """The workers of a task died, each time that it was repeated (exit code 1). Finished steps are kept."""


class UsageError(KvqError):
    """The request is invalid (exit code 2): an unknown method or option, unsupported bits, an empty prompt."""

    exit_code = 2


@contextmanager
def reading(what: object, advice: str = "", kind: type[KvqError] = KvqError) -> Iterator[None]:
    """Raise a `kind` that names `what` for any error of a library that reads it inside the block.

    What is no fault of `what` passes: a KvqError, an interrupt, memory or a disk that is full, output that nobody
    reads.
    """
    try:
        yield
    except (KvqError, BrokenPipeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust, in tokenizers, is no Exception
        if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise kind(f"{what}: {reason(error)}" + (f"; {advice}" if advice else "")) from error


def reason(error: BaseException) -> str:
    """The first line of an error's message, and the next one where that ends with a colon; its type if it may not be
    clear without."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = re.sub(r"[ \t]+\n", "\n", str(error).strip("* \t\r\n"))  # NLTK frames its message
    text = " ".join(re.split(r"(?<!:)\n", lines)[0].split())
    if isinstance(error, (OSError, ValueError, ImportError, RuntimeError)) and not isinstance(error, RecursionError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'kivi'?` for the end of a message about an unknown name; empty where no known name is similar.

    prefix: put before the known name.
    """
    from difflib import get_close_matches

    similar = get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {prefix + similar[0]!r}?" if similar else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or of the machine. On a CPU, PyTorch's allocator raises a RuntimeError."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )
