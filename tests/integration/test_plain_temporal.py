"""Runs without Everroll's command line or client: the `temporal` program, and temporalio alone, as the README shows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from temporalio.client import Client

from everroll.client import EverrollClient
from everroll.contracts.training import TrainingRunRequest
from everroll.local.temporal_binary import find_temporal
from tests.conftest import TemporalServer
from tests.simulation import Simulation, build_spec

README = Path(__file__).resolve().parents[2] / "README.md"


def write_input(directory: Path, run: str, task_queue: str) -> Path:
    path = directory / "run.json"
    path.write_text(TrainingRunRequest(spec=build_spec(run, task_queue)).model_dump_json(exclude_none=True))
    return path


async def test_temporal_workflow_start(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    line = next(line for line in README.read_text().splitlines() if line.startswith("temporal workflow start"))
    words = line.replace("everroll/my-run", f"everroll/{run_name}").split()
    words[words.index("--task-queue") + 1] = task_queue
    words[words.index("--input-file") + 1] = str(write_input(tmp_path, run_name, task_queue))
    plain = await Client.connect(temporal_server.address)
    async with Simulation().workers(client.temporal, task_queue):
        process = await asyncio.create_subprocess_exec(
            str(find_temporal()),
            *words[1:],
            *("--address", temporal_server.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, output.decode()
        result = await asyncio.wait_for(plain.get_workflow_handle(f"everroll/{run_name}").result(), 60)
    assert result["steps"] == 2
    assert result["trained_groups"] == 4


async def test_temporalio_client_as_in_the_readme(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "start_workflow(" in block
    )
    code = code.replace("127.0.0.1:7233", temporal_server.address).replace("everroll/my-run", f"everroll/{run_name}")
    code = code.replace('"run.json"', repr(str(write_input(tmp_path, run_name, task_queue))))
    code = code.replace('task_queue="everroll"', f"task_queue={task_queue!r}")
    body = "\n".join(f"    {line}" for line in code.splitlines())
    scope: dict[str, object] = {}
    exec(f"async def main():\n{body}\n    return result", scope)  # the README's own code, inside a coroutine
    async with Simulation().workers(client.temporal, task_queue):
        main = scope["main"]
        assert callable(main)
        result = await asyncio.wait_for(main(), 60)
    assert result["steps"] == 2
    assert json.loads((tmp_path / "run.json").read_text())["spec"]["run"]["name"] == run_name
