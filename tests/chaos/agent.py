"""The agent of chaos runs: two turns, a reward that is a function of what was sampled, and a line per turn it saw."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from everroll.agents import Episode
from tests.conversation import converse

NUM_TURNS = 2
_CLIENT_TIMEOUT_SECONDS = 10.0
_CLIENT_RETRIES = 200


async def run(episode: Episode) -> dict[str, float]:
    """Play an episode with a stock client that asks again for as long as the episode may last.

    `episode.args["seen"]` is a file: each turn is appended to it when the agent has seen it.
    """
    client = episode.openai().with_options(timeout=_CLIENT_TIMEOUT_SECONDS, max_retries=_CLIENT_RETRIES)
    digest = hashlib.sha256()
    turn = 0
    async for answer in converse(episode, client, int(episode.args.get("turns", NUM_TURNS))):
        digest.update((answer.choices[0].message.content or "").encode())
        usage = answer.usage
        note = {
            "session": episode.key.session_id,
            "group": episode.key.group,
            "turn": turn,
            "pid": os.getpid(),
            "at": time.time(),
            "tokens": usage.completion_tokens if usage else 0,
            "created": answer.created,
            "digest": digest.hexdigest()[:16],
        }
        append_line(Path(episode.args["seen"]), json.dumps(note))
        turn += 1
    return {"reward": digest.digest()[0] / 255}


def append_line(path: Path, text: str) -> None:
    """One write, so that lines of several processes do not mix and a kill leaves none in halves."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, text.encode() + b"\n")
    finally:
        os.close(handle)
