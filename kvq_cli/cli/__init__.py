"""Command line of kvq: one module per subcommand parses options, calls the library and prints. No heavy imports."""

import sys


def main() -> None:
    """Entry point of `kvq`. It imports the app itself, so that Ctrl-C during imports exits with 130, too."""
    try:
        from kvq_cli.cli.app import app

        app(prog_name="kvq")
    except KeyboardInterrupt:
        sys.exit(130)
