"""The keys of a run file, read off the pydantic models: name, type, bounds, default and documentation of each.

One source for both the messages about faults in a run file and the reference in docs/run-file.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from everroll.contracts.spec import RunSpec

JsonSchema = dict[str, Any]
"""A JSON schema as pydantic writes it; its values are of any JSON type."""

Path = tuple[str, ...]


@dataclass(frozen=True)
class RunFileField:
    """One key of a run file."""

    path: Path
    allowed: str
    """Type and bounds in words, e.g. `an integer, at least 1`."""
    required: bool
    default: str | None
    """As written in TOML; None when there is no default, or the default is to leave the key out."""
    doc: str

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class RunFileSection:
    """One table of a run file, with the keys that stand directly in it."""

    path: Path
    doc: str
    required: bool
    fields: tuple[RunFileField, ...]

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@functools.cache
def run_file_sections() -> tuple[RunFileSection, ...]:
    """All tables of a run file, in the order in which the models declare them; nested ones follow their parent."""
    schema = RunSpec.model_json_schema()
    return tuple(_walk_sections(schema, schema["$defs"], ()))


@functools.cache
def run_file_fields() -> dict[Path, RunFileField]:
    """All keys that hold values (not tables) by path."""
    return {field.path: field for section in run_file_sections() for field in section.fields}


def _walk_sections(schema: JsonSchema, definitions: dict[str, JsonSchema], parent: Path) -> Iterator[RunFileSection]:
    required = set(schema.get("required", ()))
    for name, value in schema["properties"].items():
        reference = _find_reference(value)
        if reference is None:
            continue
        path = (*parent, name)
        section = definitions[reference.rsplit("/", 1)[1]]
        yield RunFileSection(
            path=path,
            doc=section.get("description", "").split("]: ", 1)[-1],
            required=name in required,
            fields=tuple(_section_fields(section, path)),
        )
        yield from _walk_sections(section, definitions, path)


def _find_reference(schema: JsonSchema) -> str | None:
    """The table that stands under a key, or may; None if the key holds a value."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    return str(options[0]["$ref"]) if len(options) == 1 and "$ref" in options[0] else None


def _section_fields(schema: JsonSchema, parent: Path) -> Iterator[RunFileField]:
    required = set(schema.get("required", ()))
    for name, value in schema["properties"].items():
        if _find_reference(value) is not None:
            continue
        yield RunFileField(
            path=(*parent, name),
            allowed=describe_schema(value),
            required=name in required,
            default=_toml_default(value, (*parent, name)),
            doc=value.get("description", ""),
        )


def describe_schema(schema: JsonSchema) -> str:
    """What a value may be, in words: `a number, above 0, at most 10`."""
    if "anyOf" in schema:
        options = [describe_schema(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(options)
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
    return ", ".join([_describe_type(schema), *_describe_bounds(schema)])


def _describe_type(schema: JsonSchema) -> str:
    kind = schema["type"]
    if kind == "array" and "prefixItems" in schema:
        items = "; ".join(describe_schema(item) for item in schema["prefixItems"])
        return f"a list of {len(schema['prefixItems'])} values ({items})"
    if kind == "array":
        item = describe_schema(schema["items"]).removeprefix("an ").removeprefix("a ")
        return f"a list of {item}s"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"a table with values that are each {describe_schema(schema['additionalProperties'])}"
    names = {
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "boolean": "true or false",
        "object": "a table",
    }
    return str(names[kind])


def _describe_bounds(schema: JsonSchema) -> Iterator[str]:
    if "minimum" in schema:
        yield f"at least {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']}"
    if "maximum" in schema:
        yield f"at most {schema['maximum']}"
    if "exclusiveMaximum" in schema:
        yield f"below {schema['exclusiveMaximum']}"
    if "pattern" in schema:
        yield f"matching {schema['pattern']}"
    if "minItems" in schema and "prefixItems" not in schema:
        yield f"not fewer than {schema['minItems']}"


def _toml_default(schema: JsonSchema, path: Path) -> str | None:
    default = schema["default"] if "default" in schema else _factory_default(path)
    return None if default is None else json.dumps(default)


def _factory_default(path: Path) -> Any:
    """The default that a field's factory makes; JSON schema does not show those."""
    model: Any = RunSpec
    for name in path[:-1]:
        annotation = model.model_fields[name].annotation
        # The table of a key that may be left out stands in a union with None.
        model = next((option for option in get_args(annotation) if option is not type(None)), annotation)
    field = model.model_fields[path[-1]]
    return None if field.default_factory is None else field.default_factory()
