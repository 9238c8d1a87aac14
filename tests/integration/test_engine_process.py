"""The engine as a process of its own: start, key, termination."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MambaConfig, MambaForCausalLM

from everroll.engines.base import EngineRejectedError, EngineUnavailableError, GenerateRequest
from everroll.engines.embedded.model import UnsupportedModelError, load_model
from everroll.engines.embedded.server import API_KEY_VARIABLE
from everroll.engines.http import open_client_session
from everroll.engines.sglang import SGLangEngine
from tests.engine_helpers import MAX_CONTEXT, VOCAB_SIZE, make_checkpoint, running_engine, wait_for_info

SERVE = """
import logging, sys
from everroll.engines.embedded.server import EngineSettings, serve
logging.basicConfig(level=logging.INFO)
serve(EngineSettings(model_path=sys.argv[1], port=0, num_threads=1))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("process") / "model")


@contextmanager
def engine_process(model_path: Path, api_key: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, read from its log."""
    environment = os.environ | {API_KEY_VARIABLE: api_key}
    command = [sys.executable, "-c", SERVE, str(model_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the engine ended without a word about its address"
                found = re.search(r"on (http://127\.0\.0\.1:\d+)", line)
            yield process, found[1]
        finally:
            if process.poll() is None:
                process.kill()


async def wait_until_healthy(engine: SGLangEngine) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                return await engine.check_health()
            except EngineUnavailableError:
                await asyncio.sleep(0.02)


async def test_a_key_is_asked_for_and_termination_answers_what_is_in_flight(checkpoint: Path) -> None:
    with engine_process(checkpoint, api_key="secret") as (process, url):
        async with open_client_session() as session:
            keyless, wrong = SGLangEngine(url, session), SGLangEngine(url, session, api_key="Secret")
            engine = SGLangEngine(url, session, api_key="secret")
            await wait_until_healthy(keyless)
            for refused in (keyless, wrong):
                with pytest.raises(EngineRejectedError, match="401") as caught:
                    await refused.generate(GenerateRequest("r", [1], 1))
                assert caught.value.status == 401
                with pytest.raises(EngineRejectedError, match="401"):
                    await refused.update_weights(str(checkpoint), 1)
            assert len((await engine.generate(GenerateRequest("r", [1], 2))).token_ids) == 2

            await engine.pause("in_place")
            call = asyncio.ensure_future(engine.generate(GenerateRequest("long", [1], MAX_CONTEXT - 1)))
            await wait_for_info(url, lambda info: info["num_waiting"] == 1, api_key="secret")
            process.send_signal(signal.SIGTERM)
            with pytest.raises(EngineUnavailableError, match="the engine is stopping"):
                await call
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_missing_model_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode != 0
    assert f"{tmp_path / 'nowhere'}: no such directory" in result.stderr


def test_models_with_another_kind_of_memory_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        load_model(str(tmp_path / "mamba"), torch.device("cpu"), torch.float32)


async def test_text_is_there_when_the_checkpoint_has_a_tokenizer(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(checkpoint / "tokenizer.json"))
    with running_engine(checkpoint) as url:
        async with aiohttp.ClientSession() as session:
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
            async with session.post(f"{url}/generate", json=body) as response:
                answer = await response.json()
    assert answer["text"] == " ".join(f"w{token}" for token in answer["output_ids"])
    assert "output_token_logprobs" not in answer["meta_info"]
