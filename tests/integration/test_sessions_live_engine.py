"""A conversation through the session server and the embedded engine, held to a plain forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everroll.contracts.spec import SamplingSpec
from everroll.sessions.client import CollectedSamples
from everroll.tokens.renderer import load_renderer
from tests.engine_helpers import Reference, running_engine
from tests.session_helpers import TOOLS, USER, FakeEngine, model_section, run_stack
from tests.small_run import make_model

NUM_TURNS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("live")
    make_model(directory, max_length=4096)
    return directory


async def test_recorded_logprobs_are_those_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    """I2, with a temperature: what the trainer will compute for these tokens is what was recorded."""
    sampling = SamplingSpec(temperature=0.8, max_tokens=200, stop_token_ids=list(range(100)))
    renderer = load_renderer(model_section(checkpoint))
    with running_engine(checkpoint) as url:
        engine = FakeEngine(base_url=url)
        async with run_stack(renderer, checkpoint, tmp_path / "journal.db", [engine]) as stack:
            handle = await stack.open(sampling=sampling)
            messages = [USER]
            for turn in range(NUM_TURNS):
                reply = await stack.chat(handle, *messages, tools=TOOLS)
                messages += [reply, {"role": "user", "content": f"go on {turn}"}]
            collected = await stack.client.collect("s", None, {})
    assert isinstance(collected, CollectedSamples)
    (sample,) = collected.sample_set.samples
    assert sample.num_turns == NUM_TURNS
    ids = sample.token_ids.tolist()
    logprobs = torch.tensor(Reference(checkpoint).logprobs(ids[:1], ids[1:], temperature=0.8))
    mask = torch.tensor(sample.loss_mask)[1:]
    recorded = torch.tensor(sample.sampler_logprobs)[1:]
    torch.testing.assert_close(recorded[mask], logprobs[mask], atol=1e-4, rtol=0)
