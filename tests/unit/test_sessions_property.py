"""Random conversations with retries, lost replies, failures, branches, restarts and take-overs between two servers,
against a plain account of them.

Checked after each: every trained run of tokens is one engine call, bit for bit, on exactly the prompt it was sampled
from (I2); every call that was answered is trained once; whatever an agent saw survives a restart (I7); and no request
was sampled twice unless its first call failed or was not recorded because its server had been deposed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everroll.engines.base import Completion, EngineUnavailableError, GenerateRequest
from everroll.sessions.core import SessionCore, SessionLimits, TurnAnswer
from everroll.sessions.errors import EngineAwayError, NotOwnerError
from everroll.sessions.journal import Journal, open_journal
from everroll.sessions.turns import ChatRequest, TurnMaker
from everroll.sessions.upstream import Upstream
from everroll.tokens.renderer import ChatRenderer, Message, load_renderer
from everroll.tokens.samples import SampleSet, decode_samples
from tests.postgres_helpers import create_database
from tests.session_helpers import TOOL_CALL_TEXT, build_tokenizer, model_section, write_model_dir

_TOKENIZER = build_tokenizer()
_IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Journals that are opened and closed hundreds of times need no disk: nothing here cuts its power."""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(model_section(write_model_dir(tmp_path_factory.mktemp("model"))))


@dataclass
class CountingEngine:
    """Samples a new text at every call, with log-probabilities of its own."""

    calls: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Those that are recorded, or are about to be."""
    num_sampled: int = 0
    fail_next: bool = False
    base_url: str = "counting"

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0)
        if self.fail_next:
            self.fail_next = False
            raise EngineUnavailableError("POST", self.base_url, "told to fail")
        number = self.num_sampled
        self.num_sampled += 1
        text = f"reply {number}" + (TOOL_CALL_TEXT if number % 3 == 2 else "") + "<|im_end|>"
        ids = _TOKENIZER.encode(text).ids
        logprobs = [-(number + 1) / (index + 7) for index in range(len(ids))]
        completion = Completion(ids, logprobs, [number] * len(ids), "stop", number)
        self.calls.append((list(request.token_ids), completion))
        return completion


@dataclass
class Account:
    """What the test knows: conversations that agents hold, and every request answered so far."""

    conversations: list[list[Message]] = field(default_factory=lambda: [[]])
    answered: list[tuple[list[Message], Message]] = field(default_factory=list)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "retry", "lose", "fail", "twice", "restart", "take over", "late"]),
        st.integers(0, 7),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=14,
)


class Harness:
    """Plays steps against a core that can be thrown away and built anew on its journal, or left for another one."""

    def __init__(self, renderer: ChatRenderer, url: str) -> None:
        self._renderer, self._url = renderer, url
        self.session_id = uuid.uuid4().hex
        self.engine = CountingEngine()
        self.account = Account()

    async def start(self) -> None:
        self._journals: list[Journal] = []
        self._cores: list[SessionCore] = []
        for _ in range(2):
            journal = await open_journal(self._url, "normal")  # without a lease: each may claim what the other holds
            maker = TurnMaker(self._renderer, Upstream([self.engine]))
            self._journals.append(journal)
            self._cores.append(SessionCore(journal, maker, SessionLimits(1000, 10**6, 10)))
        self.core = self._cores[0]

    async def stop(self) -> None:
        for core, journal in zip(self._cores, self._journals, strict=True):
            await core.close()
            await journal.close()

    async def play(self, step: Step) -> None:
        kind, which, text = step
        account = self.account
        if kind == "restart":
            await self.stop()
            await self.start()
            await self.check_all_is_remembered()
        elif kind == "take over":
            self.core = self._cores[which % 2]
        elif kind == "late":
            await self.answer_late(which, text)
        elif kind == "retry":
            if account.answered:
                messages, reply = account.answered[which % len(account.answered)]
                assert await self.ask(messages) == reply
        else:
            conversation = account.conversations[which % len(account.conversations)]
            request = [*conversation, next_message(conversation, text)]
            await self.send(kind, request)

    async def send(self, kind: str, request: list[Message]) -> None:
        if kind == "fail":
            self.engine.fail_next = not self.is_answered(request)
            if self.engine.fail_next:
                with pytest.raises(EngineAwayError):
                    await self.ask(request)
                return
        if kind == "lose":
            lost = asyncio.create_task(self.ask(request))
            await asyncio.sleep(0)
            lost.cancel()
        copies = 2 if kind == "twice" else 1
        replies = await self.ask_at_once(request, copies)
        assert all(reply == replies[0] for reply in replies)
        if not self.is_answered(request):
            self.account.answered.append((request, replies[0]))
            self.account.conversations.append([*request, replies[0]])

    async def answer_late(self, which: int, text: int) -> None:
        """The session is taken over during a call: its answer is not recorded, and its agent is sent on."""
        conversation = self.account.conversations[which % len(self.account.conversations)]
        request = [*conversation, next_message(conversation, text)]
        await self.core.create(self.session_id, None, None)
        if self.is_answered(request):
            return
        late = asyncio.create_task(self.core.turn(self.session_id, ChatRequest(messages=request)))
        await asyncio.sleep(0)
        self.core = next(core for core in self._cores if core is not self.core)
        await self.core.create(self.session_id, None, None)
        try:
            reply = (await late).turn.reply
        except NotOwnerError:
            self.engine.calls.pop()
            reply = await self.ask(request)
        self.account.answered.append((request, reply))
        self.account.conversations.append([*request, reply])

    def is_answered(self, request: list[Message]) -> bool:
        return any(messages == request for messages, _ in self.account.answered)

    async def ask(self, messages: list[Message]) -> Message:
        (reply,) = await self.ask_at_once(messages, 1)
        return reply

    async def ask_at_once(self, messages: list[Message], copies: int) -> list[Message]:
        """Ask as through the servers' relay: a core that finds that it was deposed is asked again, and claims.

        Copies in flight share one engine call, so that at most one was sampled in vain and recorded nowhere.
        """
        request = ChatRequest(messages=messages)
        for _ in range(2):
            calls = [self.core.turn(self.session_id, request) for _ in range(copies)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            if not any(isinstance(outcome, NotOwnerError) for outcome in outcomes):
                break
            self.engine.calls.pop()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome.turn.reply for outcome in outcomes if isinstance(outcome, TurnAnswer)]

    async def check_all_is_remembered(self) -> None:
        num_calls = len(self.engine.calls)
        for messages, reply in self.account.answered:
            assert await self.ask(messages) == reply
        assert len(self.engine.calls) == num_calls

    async def check_samples(self) -> None:
        collected = await self.core.collect(self.session_id, None, {})
        if not self.account.answered:
            assert not isinstance(collected, bytes)
            return
        assert isinstance(collected, bytes)
        trained = list_trained_calls(decode_samples(collected))
        made = [(prompt, call.token_ids, as_floats(call.logprobs)) for prompt, call in self.engine.calls]
        assert sorted(map(repr, trained)) == sorted(map(repr, made))
        assert len(made) == len(self.account.answered)


def next_message(conversation: list[Message], text: int) -> Message:
    calls: list[Any] = conversation[-1].get("tool_calls", []) if conversation else []
    if calls:
        return {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"result {text}"}
    return {"role": "user", "content": f"message {text}"}


def as_floats(values: Any) -> list[float]:
    floats: list[float] = np.asarray(values, dtype=np.float32).tolist()
    return floats


def list_trained_calls(samples: SampleSet) -> list[tuple[list[int], list[int], list[float]]]:
    """Each maximal run of trained tokens: everything before it, the run, and its log-probabilities."""
    calls = []
    for sample in samples.samples:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
        for start, end in edges.reshape(-1, 2).tolist():
            run = sample.token_ids[start:end].tolist()
            calls.append((sample.token_ids[:start].tolist(), run, sample.sampler_logprobs[start:end].tolist()))
    return calls


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_no_token_is_lost_doubled_or_changed(renderer: ChatRenderer, steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as directory:
        asyncio.run(play_all(renderer, str(Path(directory) / "journal.db"), steps))


@pytest.fixture(scope="module")
def postgres_url() -> str:
    return create_database()


@settings(max_examples=10, deadline=None)
@given(steps=STEPS)
def test_nor_over_postgresql(renderer: ChatRenderer, postgres_url: str, steps: list[Step]) -> None:
    asyncio.run(play_all(renderer, postgres_url, steps))


async def play_all(renderer: ChatRenderer, url: str, steps: list[Step]) -> None:
    harness = Harness(renderer, url)
    await harness.start()
    await harness.core.create(harness.session_id, None, None)
    for step in steps:
        await harness.play(step)
    await harness.check_samples()
    await harness.stop()
    await harness.start()
    await harness.check_all_is_remembered()
    await harness.check_samples()
    await harness.stop()
