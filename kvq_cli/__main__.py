"""`python -m kvq_cli` runs the `kvq` command."""

from kvq_cli.cli import main

main()
