"""Command-line options and environment variables for a settings model: one for each field, those of nested models too.

Values stay text where the model can convert it; an option's documentation is that of its field.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from everroll.cli.errors import CommandError
from everroll.contracts.base import word_fault


@dataclass(frozen=True)
class SettingOption:
    """One field of a settings model, or of a model nested in it."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def environment_name(self, prefix: str) -> str:
        return "_".join((prefix, *self.path)).upper()

    @property
    def kind(self) -> Any:
        """The field's type without `None` and annotations: a class, or a generic's origin."""
        annotation = self.field.annotation
        if get_origin(annotation) in (Union, UnionType):
            options = [option for option in get_args(annotation) if option is not NoneType]
            annotation = options[0] if len(options) == 1 else str
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        return get_origin(annotation) or annotation

    def describe(self, prefix: str) -> str:
        default = self.field.get_default(call_default_factory=True)
        notes = ["required"] if self.field.is_required() else []
        if not notes and default not in (None, "", [], {}):
            notes.append(f"default: {default}")
        notes.append(f"env: {self.environment_name(prefix)}")
        return f"{self.field.description or ''} [{', '.join(notes)}]".strip().replace("%", "%%")


def list_options(model: type[BaseModel], parent: tuple[str, ...] = ()) -> Iterator[SettingOption]:
    """An option for each field; fields of nested models come with the name of the field that holds them."""
    for name, field in model.model_fields.items():
        option = SettingOption((*parent, name), field)
        if isinstance(option.kind, type) and issubclass(option.kind, BaseModel):
            yield from list_options(option.kind, option.path)
        else:
            yield option


def read_settings(
    model: type[BaseModel], program: str, help: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> BaseModel:
    """Settings from options, else from the environment, else their defaults.

    Raises:
        CommandError: values that the model refuses, one line each.
        SystemExit: unknown options, and after `--help`.
    """
    prefix = program.replace(" ", "_").replace("-", "_")
    parser = argparse.ArgumentParser(prog=program, description=help, allow_abbrev=False)
    options = list(list_options(model))
    for option in options:
        _add_option(parser, option, prefix)
    given = vars(parser.parse_args(arguments))
    # A nested model that must be there is begun, so that what is missing in it is named as an option.
    values: dict[str, Any] = {option.path[0]: {} for option in options if len(option.path) > 1}
    for option in options:
        value = given[option.key]
        if value is None:
            value = _from_environment(option, environment.get(option.environment_name(prefix)))
        if value is not None:
            _set(values, option.path, value)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise CommandError(_describe_faults(error)) from error


def _add_option(parser: argparse.ArgumentParser, option: SettingOption, prefix: str) -> None:
    help_text = option.describe(prefix)
    if option.kind is bool:
        parser.add_argument(
            option.flag, dest=option.key, help=help_text, action=argparse.BooleanOptionalAction, default=None
        )
    elif option.kind in (list, tuple):
        parser.add_argument(option.flag, dest=option.key, help=help_text, nargs="+", metavar="VALUE")
    elif option.kind is dict:
        parser.add_argument(option.flag, dest=option.key, help=help_text, type=_parse_json, metavar="JSON")
    else:
        parser.add_argument(option.flag, dest=option.key, help=help_text, metavar="VALUE")


def _from_environment(option: SettingOption, text: str | None) -> Any:
    if text is None:
        return None
    if option.kind in (list, tuple):
        return text.split()
    return _parse_json(text) if option.kind is dict else text


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _describe_faults(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        names = [part for part in item["loc"] if isinstance(part, str)]
        option = "--" + "-".join(names).replace("_", "-") if names else "settings"
        # What concerns all settings together would print them all, a journal's password among them.
        given = "" if item["type"] == "missing" or not names else f" (given: {item['input']!r})"
        lines.append(f"{option}: {word_fault(item['msg'])}{given}")
    return "\n".join(lines)
