"""Errors that end the program in one line.

Every failure a user can cause or mend is raised as one of these; the command line prints the message
and exits with `exit_code`. The message names the flag, file or value to change.
"""


class KvqError(Exception):
    """The run failed (exit code 1): a missing file, a damaged artifact, not-a-number activations, a full disk."""

    exit_code = 1


class UsageError(KvqError):
    """The request is wrong (exit code 2): an unknown method or option, bits a method cannot do, an empty prompt."""

    exit_code = 2
