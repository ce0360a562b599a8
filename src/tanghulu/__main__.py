"""``python -m tanghulu``: the same as the ``tanghulu`` command."""

from tanghulu.cli.main import main

main()
