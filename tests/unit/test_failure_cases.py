"""`docs/failure-cases.md` names tests that exist, for every case that it must cover."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    *(f"A{n}" for n in range(1, 13)),
    *(f"B{n}" for n in range(1, 7)),
    *(f"C{n}" for n in range(1, 12)),
    *(f"D{n}" for n in range(1, 11)),
    *("E1", "E2", "E3", "E4"),
    *(f"F{n}" for n in range(1, 6)),
]


def test_every_case_has_tests_that_exist() -> None:
    text = (ROOT / "docs" / "failure-cases.md").read_text()
    rows = [
        line.split(" | ") for line in text.splitlines() if re.match(r"\| \w+(, \w+)* \| ", line) and "`tests/" in line
    ]
    assert not set(CASES) - {case for row in rows for case in row[0].removeprefix("| ").split(", ")}
    for row in rows:
        names = re.findall(r"`(tests/\S+)::(\w+)`", row[-1])
        assert names, row
        for path, function in names:
            tree = ast.parse((ROOT / path).read_text())
            defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
            assert function in defined, f"{path}::{function}"
