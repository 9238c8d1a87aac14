"""A reinforcement learning loop as most are: asyncio.gather over episodes, train, save, publish. Nothing else is kept.

    python -m benchmarks.plain_loop MODEL ENGINE_URL DIRECTORY [--groups 4] [--episodes 4] [--turns 4]

For comparison in `benchmarks.durability`. Model and optimizer are saved after every step, which is more often than most
loops do. Killed within a step, it starts that step again: its turns are lost. An engine that does not answer ends it.
Each turn is a line of DIRECTORY/seen.jsonl, each step a line of DIRECTORY/steps.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from everroll.tokens.renderer import ChatRenderer, load_renderer
from tests.chaos.agent import append_line
from tests.chaos.world import STOP_TOKEN_IDS
from tests.session_helpers import model_section
from worker.waiting import wait_for_servers

_TIMEOUT_SECONDS = 60.0
_MAX_TOKENS = 32


@dataclass
class Trajectory:
    """What one episode sampled."""

    token_ids: list[int]  # [T]
    sampled: list[bool]  # [T]
    reward: float


class Loop:
    """One process that does everything but sample."""

    def __init__(self, options: argparse.Namespace, http: httpx.AsyncClient) -> None:
        self.options = options
        self.http = http
        self.directory: Path = options.directory
        self.renderer: ChatRenderer = load_renderer(model_section(options.model))
        self.step, path = self._find_checkpoint()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if self.step:
            self.optimizer.load_state_dict(torch.load(path / "optimizer.pt"))

    def _find_checkpoint(self) -> tuple[int, Path]:
        saved = sorted(self.directory.glob("checkpoint-*"))
        return (int(saved[-1].name.rpartition("-")[2]), saved[-1]) if saved else (0, self.options.model)

    async def run(self) -> None:
        await self._publish(self._find_checkpoint()[1])
        while True:
            prompts = [f"say {self.step * self.options.groups + group}" for group in range(self.options.groups)]
            episodes = [
                self._play(prompt, f"{self.step}-{group}-{member}")
                for group, prompt in enumerate(prompts)
                for member in range(self.options.episodes)
            ]
            trajectories = await asyncio.gather(*episodes)
            self._train(trajectories)
            self.step += 1
            path = self._save()
            await self._publish(path)
            append_line(self.directory / "steps.jsonl", json.dumps({"step": self.step, "at": time.time()}))

    async def _play(self, prompt: str, session: str) -> Trajectory:
        token_ids: list[int] = []
        sampled: list[bool] = []
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for turn in range(self.options.turns):
            prompt_ids = self.renderer.render(messages, None)
            added = prompt_ids[len(token_ids) :] if prompt_ids[: len(token_ids)] == token_ids else prompt_ids
            if len(added) == len(prompt_ids):
                token_ids, sampled = [], []
            completion = await self._generate(prompt_ids)
            token_ids += [*added, *completion]
            sampled += [False] * len(added) + [True] * len(completion)
            text = self.renderer.parse(completion, prompt_ids, None).content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on, {turn}"}]
            note = {"session": session, "turn": turn, "pid": os.getpid(), "at": time.time(), "tokens": len(completion)}
            append_line(self.directory / "seen.jsonl", json.dumps(note))
        return Trajectory(token_ids, sampled, sum(token_ids) % 7 / 7)

    async def _generate(self, prompt_ids: list[int]) -> list[int]:
        params = {"max_new_tokens": _MAX_TOKENS, "stop_token_ids": STOP_TOKEN_IDS}
        answer = await self.http.post("/generate", json={"input_ids": prompt_ids, "sampling_params": params})
        answer.raise_for_status()
        output: list[int] = answer.json()["output_ids"]
        return output

    def _train(self, trajectories: list[Trajectory]) -> None:
        mean = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
        for trajectory in trajectories:
            ids_T = torch.tensor(trajectory.token_ids)
            logits_TV: Tensor = self.model(input_ids=ids_T[None]).logits[0]
            logprobs_T = logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
            mask_T = torch.tensor(trajectory.sampled[1:])
            torch.autograd.backward(-(trajectory.reward - mean) * logprobs_T[mask_T].mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _save(self) -> Path:
        path = self.directory / f"checkpoint-{self.step:06d}"
        temporary = self.directory / "unfinished"
        self.model.save_pretrained(temporary)
        torch.save(self.optimizer.state_dict(), temporary / "optimizer.pt")
        temporary.rename(path)
        return path

    async def _publish(self, path: Path) -> None:
        answer = await self.http.post("/update_weights_from_disk", json={"model_path": str(path)})
        answer.raise_for_status()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("engine")
    parser.add_argument("directory", type=Path)
    for name, default in (("groups", 4), ("episodes", 4), ("turns", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    await wait_for_servers([f"{options.engine}/health"], _TIMEOUT_SECONDS)
    async with httpx.AsyncClient(base_url=options.engine, timeout=_TIMEOUT_SECONDS) as http:
        await Loop(options, http).run()


if __name__ == "__main__":
    asyncio.run(main())
