"""The curriculum hook: a user's function that chooses the prompts of the next block of groups.

It is called once for each block, its answer is kept in the run's history, and groups are dispensed from there: no
crash can skip or double a prompt, whatever the function does. For equal seeds to give equal runs it must be a pure
function of what it is given.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everroll.contracts.training import StepRecord
from everroll.data.dataset import Dataset
from everroll.failures import ConfigurationError
from everroll.seeds import derive_seed


@dataclass(frozen=True)
class Block:
    """What a curriculum is asked about: the groups `first_group` up to `first_group + num_groups`."""

    first_group: int
    num_groups: int
    seed: int
    """`data.seed` of the run file."""
    dataset: Dataset
    """All prompts, by index. Reading one reads the file: keep what you compute over all, by `dataset.fingerprint`."""
    args: dict[str, Any]
    """`data.curriculum.args` of the run file."""
    steps: list[StepRecord]
    """The latest finished steps, oldest first; empty unless `data.curriculum.use_steps` is set."""

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + self.num_groups)

    def random(self) -> random.Random:
        """A generator of this block's own, from the seed and the block's place."""
        return random.Random(derive_seed(self.seed, "curriculum", self.first_group))


class CurriculumError(Exception):
    """The curriculum's function raised, or its answer is not a prompt index for each group."""


def choose_prompts(path: str, block: Block) -> list[int]:
    """Call the function `module:name`.

    Raises:
        ConfigurationError: it cannot be imported.
        CurriculumError: it failed; the cause is kept.
    """
    function = _load(path)
    try:
        answer = function(block)
    except Exception as error:
        raise CurriculumError(f"curriculum {path} raised {type(error).__name__}: {error}") from error
    return _check(answer, path, block)


def _load(path: str) -> Callable[[Block], Sequence[int]]:
    module_name, _, name = path.partition(":")
    try:
        function = vars(importlib.import_module(module_name))[name]
    except (ImportError, KeyError) as error:
        raise ConfigurationError(
            f"curriculum {path!r} cannot be imported by this rollout worker: {error}. Is its package installed, or in "
            f"the directory that the worker was started from?"
        ) from error
    return function  # type: ignore[no-any-return]


def _check(answer: object, path: str, block: Block) -> list[int]:
    try:
        prompts = [int(item) for item in answer]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise CurriculumError(f"curriculum {path} must return prompt indices, not {answer!r:.200}") from error
    if len(prompts) != block.num_groups:
        raise CurriculumError(f"curriculum {path} returned {len(prompts)} prompts for {block.num_groups} groups")
    strange = next((prompt for prompt in prompts if not 0 <= prompt < len(block.dataset)), None)
    if strange is not None:
        raise CurriculumError(f"curriculum {path} chose prompt {strange}; the data set has {len(block.dataset)}")
    return prompts
