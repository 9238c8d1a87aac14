"""Run one server as a process, with its settings from the command line.

The settings models live beside the servers and import torch or a web stack; they are loaded only when such a command
is called, so that the rest of the command line stays quick.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from everroll.cli.errors import BAD_INPUT, FAILED, CommandError
from everroll.cli.settings_options import read_settings
from everroll.logs import configure_logging


@dataclass(frozen=True)
class ServerProcess:
    """A server that can be run as a process of its own."""

    name: str
    """Name of the command."""
    module: str
    settings: str
    """Name of the settings model in `module`; the function `serve(settings)` stands beside it."""
    extra: str
    """Extra of the package that the server needs."""
    help: str
    start_errors: tuple[str, ...]
    """Errors of `serve` that a person can mend, as `module:name`."""

    def run(self, arguments: Sequence[str]) -> None:
        """Read the settings off the command line and the environment, and serve until stopped.

        Raises:
            CommandError: bad options, a package is missing, or the server cannot start as configured.
        """
        try:
            module = vars(importlib.import_module(self.module))
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("everroll"):
                raise
            raise CommandError(
                f"`everroll {self.name}` needs the package {error.name}; "
                f"install it with: pip install 'everroll[{self.extra}]'"
            ) from error
        settings = read_settings(module[self.settings], f"everroll {self.name}", self.help, arguments, os.environ)
        configure_logging(self.name)
        try:
            module["serve"](settings)
        except Exception as error:
            if f"{type(error).__module__}:{type(error).__qualname__}" in self.start_errors:
                # What the system refused, such as an address, may be had a moment later; a supervisor tries again.
                code = FAILED if isinstance(error.__cause__, OSError) else BAD_INPUT
                raise CommandError(f"everroll {self.name}: {error}", code) from error
            raise
