"""A terminated run of the real parts is resumed, and the audit proves it as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everroll.cli.main import app
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.training import ResumeRequest
from everroll.sessions.server import open_app
from everroll.sessions.settings import SessionServerSettings
from everroll.tokens.renderer import load_renderer
from tests.audit_helpers import FinishedRun, build_run_spec
from tests.conftest import TemporalServer
from tests.engine_helpers import running_engine
from tests.integration.test_orchestration import wait_for_status
from tests.session_helpers import ADMIN_KEY, model_section, serve_app
from tests.small_run import make_model, write_prompts
from worker.build import build_worker
from worker.settings import Role, WorkerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_a_resumed_run_is_audited_as_one(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Terminated with groups in flight: they are taken over, and every token of every step is accounted for."""
    make_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl", 5)
    settings = WorkerSettings(task_queue=task_queue, admin_key=ADMIN_KEY, torch_threads=1, graceful_shutdown_seconds=0)
    handle = client.temporal.get_workflow_handle(names.run_workflow_id(run_name))
    with running_engine(tmp_path / "model") as engine_url:
        server = SessionServerSettings(
            model=model_section(tmp_path / "model"),
            engine_urls=[engine_url],
            journal=str(tmp_path / "sessions.sqlite"),
        )
        async with contextlib.AsyncExitStack() as stack:
            serving = await stack.enter_async_context(open_app(server, load_renderer(server.model), ADMIN_KEY))
            session_url = await stack.enter_async_context(serve_app(serving))
            for role in Role:
                worker = await stack.enter_async_context(build_worker(role, client.temporal, settings))
                await stack.enter_async_context(worker)
            spec = build_run_spec(tmp_path, run_name, task_queue, session_url, engine_url)
            spec = spec.model_copy(update={"run": spec.run.model_copy(update={"num_steps": 3})})
            await client.start(spec)
            await wait_for_status(
                client,
                run_name,
                lambda view: view.status is not None and view.status.step == 1 and bool(view.status.groups_in_flight),
            )
            await handle.terminate()
            await client.resume_ended(spec, ResumeRequest(changes={"train.learning_rate": 2e-3}))
            async with asyncio.timeout(100):
                result = await client.result(run_name)
    assert result.trained_groups == 6
    arguments = FinishedRun(tmp_path, run_name, temporal_server).arguments()
    told = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
    assert told.exit_code == 0, told.output
    report = json.loads(told.output)
    assert report["fates"] == {"trained": 6}
    assert report["num_steps"] == 3
    assert any("resumed from its directory" in note for note in report["notes"])
