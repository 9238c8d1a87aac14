"""The command line, `everroll`. Command modules import what they need when they run, so that `--help` is quick."""
