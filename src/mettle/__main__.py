"""``python -m mettle``: the command line."""

from mettle.cli import main

main()
