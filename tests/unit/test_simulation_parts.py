"""Distributions and arguments of the simulation."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from everroll.simulation.agent import AgentArgs
from everroll.simulation.distributions import build_distribution


def test_a_distribution_has_the_quantiles_it_was_given() -> None:
    distribution = build_distribution(2.0, 20.0)
    generator = random.Random(0)
    drawn = sorted(distribution.draw(generator) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(2.0, rel=0.05)
    assert drawn[19_000] == pytest.approx(20.0, rel=0.1)


def test_without_a_percentile_it_is_a_constant() -> None:
    assert build_distribution(0.3, None).draw(random.Random(0)) == 0.3
    assert build_distribution(0.0, None).draw(random.Random(0)) == 0.0


@pytest.mark.parametrize("args", [{"tool_seconds": 5, "tool_p95_seconds": 1}, {"turns": 0}, {"tols": 1}])
def test_arguments_that_make_no_sense(args: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        AgentArgs.model_validate(args)
