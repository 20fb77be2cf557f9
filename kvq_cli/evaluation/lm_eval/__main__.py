"""The command line of lm-eval with the model `kvq`: `python -m kvq_cli.evaluation.lm_eval --model kvq ...`."""

from __future__ import annotations

import sys

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.lm_eval.tasks import require_lm_eval


def main() -> None:
    """Run lm-eval; a KvqError ends in one line on stderr and its exit code, as in kvq's own commands."""
    try:
        require_lm_eval("--model kvq")
        from lm_eval.__main__ import cli_evaluate

        import kvq_cli.evaluation.lm_eval.registered_model  # noqa: F401

        cli_evaluate()
    except KvqError as error:
        print(f"kvq: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
