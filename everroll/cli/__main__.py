"""`python -m everroll.cli`: the command line where no console script is at hand."""

from everroll.cli.main import main

main()
