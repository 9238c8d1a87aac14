"""Imports point one way: contracts <- rest of everroll <- activities, trainer <- worker; nothing imports the CLI."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("everroll", "workflows", "activities", "worker", "trainer")


def find_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(*parts: str) -> list[Path]:
    return sorted(ROOT.joinpath(*parts).rglob("*.py"))


def assert_no_import(paths: list[Path], *forbidden: str) -> None:
    for path in paths:
        bad = {name for name in find_imports(path) for room in forbidden if name == room or name.startswith(room + ".")}
        assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def test_everroll_imports_none_of_the_four() -> None:
    assert_no_import(modules("everroll"), "workflows", "activities", "worker", "trainer", "tests", "examples")


def test_contracts_import_only_pydantic_and_themselves() -> None:
    allowed = {"pydantic", "everroll"} | set(sys.stdlib_module_names)
    for path in modules("everroll", "contracts"):
        for name in find_imports(path):
            assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
            if name.startswith("everroll"):
                assert name.startswith("everroll.contracts"), f"{path.name} imports {name}"


def test_nothing_imports_the_command_line() -> None:
    outside = [path for room in ROOMS for path in modules(room) if "cli" not in path.relative_to(ROOT).parts]
    assert_no_import(outside, "everroll.cli")


def test_trainer_knows_no_temporal_and_no_http() -> None:
    assert_no_import(modules("trainer"), "temporalio", "httpx", "aiohttp", "workflows", "activities", "worker")


def test_activities_do_not_import_workflows_or_worker() -> None:
    assert_no_import(modules("activities"), "workflows", "worker")


def test_workflows_import_contracts_outcomes_and_policies_only() -> None:
    for path in modules("workflows"):
        for name in find_imports(path):
            room = name.split(".")[0]
            assert room in {"temporalio", "workflows", "everroll"} | set(sys.stdlib_module_names), (path.name, name)
            if room == "everroll" and name != "everroll":
                assert name.startswith(("everroll.contracts", "everroll.seeds")), (path.name, name)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("everroll.contracts.training", ["temporalio", "torch", "httpx", "aiohttp", "starlette", "numpy"]),
        ("everroll.client", ["torch", "transformers", "renderers", "starlette", "numpy", "aiohttp"]),
        ("everroll.cli.main", ["torch", "transformers", "renderers", "starlette", "numpy"]),
        ("activities.episodes", ["torch", "transformers", "renderers", "starlette"]),
        ("trainer", ["temporalio", "httpx", "starlette"]),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: list[str]) -> None:
    script = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]"
