"""The curriculum hook: what the function gets, and what it may answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from everroll.data.curriculum import Block, CurriculumError, choose_prompts
from everroll.failures import ConfigurationError
from everroll.prompts import load_dataset

HERE = __name__


def easy_to_hard(block: Block) -> list[int]:
    levels = [prompt.metadata["level"] for prompt in block.dataset]
    order = sorted(range(len(levels)), key=lambda index: (levels[index], index))
    return [order[group % len(order)] for group in block.groups]


def weighted(block: Block) -> list[int]:
    weights = [1 + prompt.metadata["level"] * 9 for prompt in block.dataset]
    return block.random().choices(range(len(block.dataset)), weights, k=block.num_groups)


def short(block: Block) -> list[int]:
    return [0]


def outside(block: Block) -> list[int]:
    return [6] * block.num_groups


def text(block: Block) -> str:
    return "easy"


def raises(block: Block) -> list[int]:
    raise KeyError("level")


@pytest.fixture
def build_block(tmp_path: Path) -> Callable[[int], Block]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": "?", "metadata": {"level": 1 - n % 2}}) + "\n" for n in range(6)))
    dataset = load_dataset(path)
    return lambda first: Block(first, 4, seed=7, dataset=dataset, args={}, steps=[])


def test_easy_to_hard(build_block: Callable[[int], Block]) -> None:
    chosen = choose_prompts(f"{HERE}:easy_to_hard", build_block(0))
    chosen += choose_prompts(f"{HERE}:easy_to_hard", build_block(4))
    assert chosen == [1, 3, 5, 0, 2, 4, 1, 3]


def test_weighted_sampling_depends_on_seed_and_place_only(build_block: Callable[[int], Block]) -> None:
    chosen = [choose_prompts(f"{HERE}:weighted", build_block(first)) for first in range(0, 400, 4)]
    assert chosen == [choose_prompts(f"{HERE}:weighted", build_block(first)) for first in range(0, 400, 4)]
    assert chosen[0] != chosen[1]
    flat = [prompt for block in chosen for prompt in block]
    assert 0.85 < sum(prompt % 2 == 0 for prompt in flat) / len(flat) < 0.97


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "returned 1 prompts for 4 groups"),
        ("outside", "chose prompt 6; the data set has 6"),
        ("text", "must return prompt indices, not 'easy'"),
        ("raises", "raised KeyError: 'level'"),
    ],
)
def test_a_wrong_answer_is_an_error(build_block: Callable[[int], Block], name: str, message: str) -> None:
    with pytest.raises(CurriculumError, match=message):
        choose_prompts(f"{HERE}:{name}", build_block(0))


def test_a_function_that_is_not_there(build_block: Callable[[int], Block]) -> None:
    for path in ("no_such_module:order", f"{HERE}:no_such_function"):
        with pytest.raises(ConfigurationError, match="cannot be imported by this rollout worker"):
            choose_prompts(path, build_block(0))
