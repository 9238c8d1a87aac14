"""Prometheus sees every group's fate and every unusable episode by cause."""

from __future__ import annotations

import httpx
from temporalio.client import Client
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

from everroll.client import EverrollClient
from everroll.local.ports import choose_port
from everroll.temporal import build_plugin
from tests.conftest import TemporalServer
from tests.simulation import Simulation, abort, build_spec


async def test_prometheus(temporal_server: TemporalServer, run_name: str, task_queue: str) -> None:
    address = f"127.0.0.1:{choose_port(0)}"
    runtime = Runtime(telemetry=TelemetryConfig(metrics=PrometheusConfig(bind_address=address)))
    temporal = await Client.connect(temporal_server.address, plugins=[build_plugin()], runtime=runtime)
    client = EverrollClient(temporal)
    simulation = Simulation()
    simulation.collect = lambda key: (
        abort(key) if (key.group, key.member) == (1, 0) else simulation.build_collected(key)
    )
    async with simulation.workers(temporal, task_queue):
        await client.start(build_spec(run_name, task_queue, rollout={"on_unusable": "drop"}))
        await client.result(run_name)
        async with httpx.AsyncClient(timeout=60) as http:
            lines = (await http.get(f"http://{address}/metrics")).text.splitlines()
    series = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if run_name in line}

    def value(name: str, *labels: str) -> float:
        return sum(number for key, number in series.items() if key.startswith(name) and all(x in key for x in labels))

    assert value("everroll_groups_settled", 'fate="dropped"', 'cause="transport"') == 1
    assert value("everroll_groups_settled", 'fate="trained"') == 4
    assert value("everroll_episodes_unusable", 'cause="transport"') == 1
    assert value("everroll_episodes_played") == 10
    assert value("everroll_step{") == 2
