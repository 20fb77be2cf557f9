"""Errors that the command line reports in one line.

Every failure that a user can cause or fix is raised as one of these; the command line prints the message and exits with
`exit_code`. The message names the flag, file or value to change.
"""


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


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the GPU or of the machine. On a CPU, PyTorch's allocator raises a RuntimeError."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )
