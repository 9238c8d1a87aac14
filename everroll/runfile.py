"""Load a run file: TOML in, a checked `RunSpec` with absolute paths out.

All faults are reported at once, each with its dotted path and how to mend it.

Relative paths: what a run reads (`data.path`, `model.path`, `train.kl_reference`) is found from the directory of the
run file, so that a run file and its data move together; what it writes (`run.output_dir`, `services.store_url`) goes
below the working directory. A path given by an override is relative to the working directory, as on any command line.
"""

from __future__ import annotations

import copy
import difflib
import glob
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everroll import gguf
from everroll.contracts.spec import RunSpec
from everroll.data.locations import is_glob, is_url
from everroll.runfile_fields import run_file_fields, run_file_sections

TomlTable = dict[str, Any]
"""A parsed TOML table; its values are of any TOML type."""

Location = tuple[int | str, ...]

_INPUT_PATHS = (
    ("run", "batches_from"),
    ("data", "path"),
    ("model", "path"),
    ("eval", "path"),
    ("eval", "sets"),
    ("train", "kl_reference"),
)
_DATA_PATHS = (("data", "path"), ("eval", "path"), ("eval", "sets"))
_HUB_NAME = re.compile(r"^[\w-]+/[\w.-]+$")


@dataclass(frozen=True)
class Fault:
    """One fault in a run file."""

    path: str
    """Dotted path of the key, or empty when the fault is in the file as a whole."""
    text: str
    """What is wrong and how to mend it."""

    def __str__(self) -> str:
        return f"{self.path}{self.text}" if self.path else self.text


class RunFileError(ValueError):
    """A run file cannot be used. `faults` holds everything that is wrong with it."""

    def __init__(self, source: str, faults: list[Fault]) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {fault}" for fault in faults))
        self.source = source
        self.faults = tuple(faults)


def load_run_file(
    path: Path,
    overrides: Mapping[str, str] | None = None,
    *,
    services: Mapping[str, Any] | None = None,
    check_files: bool = True,
) -> RunSpec:
    """Read, override and check a run file.

    Args:
        path: the TOML file.
        overrides: dotted path to value, written as in TOML (`1e-3`, `true`, `[1, 2]`); text that is not TOML is taken
            as a string.
        services: values for keys of [services] that neither the file nor an override sets.
        check_files: also check that the data and the model exist here; turn off when only the workers see them.

    Raises:
        RunFileError: with all faults.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFileError(str(path), [Fault("", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise RunFileError(str(path), [Fault("", f"is not UTF-8 text: {error}")]) from error
    except tomllib.TOMLDecodeError as error:
        raise RunFileError(str(path), [Fault("", f"is not valid TOML: {error}")]) from error
    faults = _apply_overrides(data, overrides or {})
    return _build_spec(data, str(path), path.resolve().parent, faults, services or {}, check_files)


def spec_from_mapping(data: Mapping[str, Any], base_dir: Path, *, check_files: bool = True) -> RunSpec:
    """As `load_run_file`, from a mapping in place of a file; input paths are relative to `base_dir`.

    Raises:
        RunFileError: with all faults.
    """
    return _build_spec(copy.deepcopy(dict(data)), "run specification", base_dir.resolve(), [], {}, check_files)


def _build_spec(
    data: TomlTable,
    source: str,
    base_dir: Path,
    faults: list[Fault],
    services: Mapping[str, Any],
    check_files: bool,
) -> RunSpec:
    _fill_services(data, services)
    model_as_written = _get_text(data, "model", "path")
    _resolve_paths(data, base_dir)
    spec, found = _validate(data)
    faults = faults + found
    if check_files:
        faults += _file_faults(data, model_as_written)
    if spec is None or faults:
        raise RunFileError(source, faults)
    return _unpack_model(spec, source) if check_files else spec


def _unpack_model(spec: RunSpec, source: str) -> RunSpec:
    """Put the directory that a GGUF file is unpacked to in its place; the first time takes a while."""
    path = Path(spec.model.path)
    if path.suffix != gguf.SUFFIX:
        return spec
    try:
        directory = gguf.unpack_gguf(path, gguf.name_unpacked(path, Path.cwd() / gguf.UNPACKED_DIR))
    except gguf.GgufError as error:
        raise RunFileError(source, [Fault("model.path", f": {error}")]) from error
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(directory)})})


# Overrides


def _apply_overrides(data: TomlTable, overrides: Mapping[str, str]) -> list[Fault]:
    """Set each dotted key in `data`; returns faults for those that cannot be set."""
    faults = []
    for dotted, text in overrides.items():
        keys = tuple(dotted.split("."))
        value = parse_toml_value(text)
        if keys in _INPUT_PATHS or keys[:2] == ("eval", "sets"):
            value = _absolute_input(value, Path.cwd())
        table: Any = data
        for key in keys[:-1]:
            table = table.setdefault(key, {}) if isinstance(table, dict) else table
        if isinstance(table, dict):
            table[keys[-1]] = value
        else:
            faults.append(Fault(dotted, f": cannot be set, since {'.'.join(keys[:-1])} is not a table"))
    return faults


def parse_toml_value(text: str) -> Any:
    """A value as in TOML (`1e-3`, `true`, `[1, 2]`); text that is not TOML is taken as a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


# Services and paths


def _fill_services(data: TomlTable, services: Mapping[str, Any]) -> None:
    section = data.setdefault("services", {})
    if isinstance(section, dict):
        for key, value in services.items():
            section.setdefault(key, value)


def _resolve_paths(data: TomlTable, base_dir: Path) -> None:
    """Make paths absolute in place; defaults of output paths are written out, since they too become absolute."""
    for section, key in _INPUT_PATHS:
        table = data.get(section)
        if isinstance(table, dict) and table.get(key):
            table[key] = _absolute_input(table[key], base_dir)
    output = _get_text(data, "run", "output_dir", ".everroll/runs")
    if output:
        data["run"]["output_dir"] = str(_absolute(output, Path.cwd()))
    store = _get_text(data, "services", "store_url", ".everroll/store")
    if store and "://" not in store:
        data["services"]["store_url"] = str(_absolute(store, Path.cwd()))


def _get_text(data: TomlTable, section: str, key: str, default: str = "") -> str:
    """A string value, the default if the key is not set, or nothing if what stands there is of another type."""
    table = data.get(section)
    if not isinstance(table, dict):
        return ""
    value = table.get(key, default)
    return value if isinstance(value, str) else ""


def _absolute_input(value: Any, base_dir: Path) -> Any:
    """Paths and globs, alone, in a list or by name, made absolute; URLs, and what is no text, as they are."""
    if isinstance(value, dict):
        return {name: _absolute_input(item, base_dir) for name, item in value.items()}
    if isinstance(value, list):
        return [_absolute_input(item, base_dir) for item in value]
    return resolve_input(value, base_dir) if isinstance(value, str) else value


def resolve_input(text: str, base_dir: Path) -> str:
    """A path or glob made absolute; a URL as it is."""
    return text if is_url(text) else str(_absolute(text, base_dir))


def _absolute(text: str, base_dir: Path) -> Path:
    return Path(base_dir, Path(text).expanduser()).resolve()


def _file_faults(data: TomlTable, model_as_written: str) -> Iterator[Fault]:
    """Checks of what the run will read, made even when other faults exist."""
    yield from _data_faults(data)
    yield from _reference_faults(data)
    text = _get_text(data, "model", "path")
    if text.endswith(gguf.SUFFIX):
        if not Path(text).is_file():
            yield Fault("model.path", f": no file {text}; correct the path")
    elif text and not Path(text).is_dir():
        yield Fault("model.path", f": no directory {text}; {_mend_model(text, model_as_written)}")
    elif text and not Path(text, "config.json").is_file():
        yield Fault("model.path", f": {text} holds no config.json; name a checkpoint directory in Hugging Face layout")


def find_input_faults(spec: RunSpec) -> list[Fault]:
    """What a run reads as long as it goes on, and is not there: prompts, and the model that it is held close to.

    A relative path is one below a worker's directory, and not looked for here.
    """
    data = spec.model_dump(mode="json")
    return [*_data_faults(data, relative=False), *_reference_faults(data, relative=False)]


def _data_faults(data: TomlTable, *, relative: bool = True) -> Iterator[Fault]:
    for section, key in _DATA_PATHS:
        table = data.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        for name, paths in (value if isinstance(value, dict) else {"": value}).items():
            dotted = f"{section}.{key}.{name}" if name else f"{section}.{key}"
            for text in paths if isinstance(paths, list) else [paths]:
                if relative or Path(str(text).removeprefix("file://")).is_absolute():
                    yield from _path_faults(dotted, text)


def _path_faults(dotted: str, text: Any) -> Iterator[Fault]:
    if not isinstance(text, str) or not text or is_url(text) or Path(text.removeprefix("file://")).is_file():
        return
    if not is_glob(text):
        yield Fault(dotted, f": no file {text}; create it (JSONL, one prompt a line) or correct the path")
    elif not glob.glob(text, recursive=True):
        yield Fault(dotted, f": no file matches {text}; correct it")


def _reference_faults(data: TomlTable, *, relative: bool = True) -> Iterator[Fault]:
    text = _get_text(data, "train", "kl_reference")
    if text and (relative or Path(text).is_absolute()) and not Path(text, "config.json").is_file():
        yield Fault("train.kl_reference", f": no checkpoint directory {text}; name one in Hugging Face layout")


def _mend_model(path: str, as_written: str) -> str:
    if _HUB_NAME.match(as_written):
        return f"correct the path, or download the model first: hf download {as_written} --local-dir {path}"
    return "correct the path"


# Validation


def _validate(data: TomlTable) -> tuple[RunSpec | None, list[Fault]]:
    """Validate, and report all faults.

    Pydantic runs checks across fields only once the fields themselves are valid. Therefore what was found faulty is
    taken out and the rest is validated again, until nothing new is found.
    """
    remaining = copy.deepcopy(data)
    faults: dict[str, Fault] = {}
    removed: set[Location] = set()
    while True:
        try:
            # Through JSON: strict mode then takes a list for a tuple, and an integer for a float, but nothing else.
            spec = RunSpec.model_validate_json(json.dumps(remaining, default=str), strict=True)
            return (None if faults else spec), list(faults.values())
        except ValidationError as error:
            progress = False
            for item in error.errors(include_url=False):
                location = _field_location(item["loc"])
                if location in removed:
                    continue
                faults.setdefault(_dotted(location), _describe(item["type"], location, item["msg"], data))
                removed.add(location)
                progress = _remove(remaining, location) or progress
            if not progress:
                return None, list(faults.values())


def _field_location(location: Location) -> Location:
    """The key that holds the fault: without positions in lists, keys of free tables, and arms of unions."""
    fields = run_file_fields()
    prefixes = (location[:length] for length in range(1, len(location) + 1))
    return next((prefix for prefix in prefixes if prefix in fields), location)


def _describe(kind: str, location: Location, message: str, data: TomlTable) -> Fault:
    path = _dotted(location)
    field = run_file_fields().get(_names(location))
    if kind == "extra_forbidden":
        return Fault(path, f": unknown key{_suggest(_names(location))}")
    if kind == "missing":
        return Fault(path, _describe_missing(_names(location)))
    if kind in ("value_error", "assertion_error"):
        return Fault(path, (": " if path else "") + message.split(", ", 1)[-1])
    given = json.dumps(_look_up(data, location), default=str)
    allowed = field.allowed if field else "a table"
    return Fault(path, f" = {given}: must be {allowed}")


def _describe_missing(path: tuple[str, ...]) -> str:
    field = run_file_fields().get(path)
    if field:
        return f": required, but missing; give {field.allowed} ({field.doc})"
    needed = [field.path[-1] for field in run_file_fields().values() if field.path[:-1] == path and field.required]
    return f": required, but missing; add a table [{'.'.join(path)}]" + (f" with {', '.join(needed)}" if needed else "")


def _suggest(path: tuple[str, ...]) -> str:
    """The nearest valid name: of the same table if one is near, else a key of that name elsewhere."""
    valid = [*run_file_fields(), *(section.path for section in run_file_sections())]
    siblings = {known[-1]: known for known in valid if known[:-1] == path[:-1]}
    near = difflib.get_close_matches(path[-1], siblings, n=1)
    if near:
        return f"; did you mean {'.'.join(siblings[near[0]])}?"
    elsewhere = {known[-1]: known for known in valid}
    near = difflib.get_close_matches(path[-1], elsewhere, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {'.'.join(elsewhere[near[0]])}?"
    return f"; valid here: {', '.join(siblings)}" if siblings else ""


def _names(location: Location) -> tuple[str, ...]:
    return tuple(part for part in location if isinstance(part, str))


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _look_up(data: Any, location: Location) -> Any:
    for part in location:
        data = data[part]
    return data


def _remove(data: Any, location: Location) -> bool:
    """Take out what stands at `location`; false if nothing does (a missing key, or a fault of the whole file)."""
    if not location:
        return False
    try:
        del _look_up(data, location[:-1])[location[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True
