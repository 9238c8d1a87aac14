"""Commands that run one server process, with an option for each field of its settings.

The settings models live beside the servers and import torch or a web stack; they are loaded only when such a command
is called, so that the rest of the command line stays quick. An option's documentation is that of the field.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from everroll.cli.errors import CommandError


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

    def run(self, arguments: Sequence[str]) -> None:
        """Read the settings off the command line and the environment, and serve until stopped.

        Raises:
            CommandError: bad options, or a package is missing.
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
        settings = read_settings(module[self.settings], f"everroll {self.name}", self.help, arguments)
        module["serve"](settings)


def read_settings(model: type[BaseModel], program: str, help: str, arguments: Sequence[str]) -> BaseModel:
    """Settings from options, else from the environment, else their defaults.

    Raises:
        CommandError: values that the model refuses, one line each.
        SystemExit: unknown options, and after `--help`.
    """
    prefix = program.upper().replace(" ", "_").replace("-", "_")
    parser = argparse.ArgumentParser(prog=program, description=help, allow_abbrev=False)
    for name, field in model.model_fields.items():
        _add_option(parser, name, field, environment_name(prefix, name))
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    for name in model.model_fields:
        variable = environment_name(prefix, name)
        if name not in given and variable in os.environ:
            given[name] = os.environ[variable]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise CommandError(_describe_faults(error)) from error


def environment_name(prefix: str, field: str) -> str:
    """Environment variable of a field; the admin key is the same for all processes."""
    return "EVERROLL_ADMIN_KEY" if field == "admin_key" else f"{prefix}_{field.upper()}"


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo, variable: str) -> None:
    """One option; its value stays text, since the model converts and checks it."""
    annotation = _without_none(field.annotation)
    flag = "--" + name.replace("_", "-")
    notes = ["required"] if field.is_required() else _describe_default(field)
    help_text = f"{field.description or ''} [{', '.join([*notes, f'env: {variable}'])}]".strip().replace("%", "%%")
    if annotation is bool:
        parser.add_argument(flag, dest=name, help=help_text, action=argparse.BooleanOptionalAction, default=None)
    elif get_origin(annotation) in (list, tuple):
        parser.add_argument(flag, dest=name, help=help_text, action="append", metavar="VALUE")
    else:
        parser.add_argument(flag, dest=name, help=help_text, metavar="VALUE")


def _describe_default(field: FieldInfo) -> list[str]:
    default = field.get_default(call_default_factory=True)
    return [] if default in (None, "") else [f"default: {default}"]


def _describe_faults(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        option = "--" + str(item["loc"][0]).replace("_", "-") if item["loc"] else "settings"
        given = "" if item["type"] == "missing" else f" (given: {item['input']!r})"
        lines.append(f"{option}: {item['msg']}{given}")
    return "\n".join(lines)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        options = [option for option in get_args(annotation) if option is not NoneType]
        return options[0] if len(options) == 1 else annotation
    return annotation
