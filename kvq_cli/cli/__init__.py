"""The command line: one file per subcommand (parse, call, print). No algorithm lives here, and no heavy import."""

import sys


def main() -> None:
    """Entry point of `kvq`. The imports stand inside, so that Ctrl-C during them ends like any other."""
    try:
        from kvq_cli.cli.app import app

        app(prog_name="kvq")
    except KeyboardInterrupt:
        sys.exit(130)
