"""`python -m kvq_cli` is `kvq`."""

from kvq_cli.cli import main

main()
