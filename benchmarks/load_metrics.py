"""Counters that the stack's processes keep of themselves, scraped in Prometheus' text form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SCRAPE_SECONDS = 20.0

_WRITES = ("CreateWorkflowExecution", "UpdateWorkflowExecution", "ConflictResolveWorkflowExecution")

Labels = frozenset[tuple[str, str]]


@dataclass
class Page:
    """The series of one process, or of several that were scraped one after the other."""

    series: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series of that name with at least these labels; 0 where there is none."""
        wanted = frozenset(labels.items())
        return sum(value for (found, has), value in self.series.items() if found == name and wanted <= has)

    def update(self, text: str, **labels: str) -> None:
        """Take a page in; its series replace earlier ones of the same labels. `labels` are added to each."""
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None or line.startswith("#"):
                continue
            name, inside, value = match.groups()
            has = frozenset([*_LABEL.findall(inside or ""), *labels.items()])
            self.series[name, has] = float(value)


class Scraper:
    """Asks the processes of a stack, and keeps the last answer of one that does not answer in time."""

    def __init__(self, addresses: Mapping[str, str], session_url: str, admin_key: str) -> None:
        self._targets = {name: (f"http://{address}/metrics", "") for name, address in addresses.items()}
        self._targets["session-server"] = (f"{session_url}/metrics", f"Bearer {admin_key}")
        self.page = Page()
        self.num_unanswered = 0

    async def scrape(self) -> None:
        async with httpx.AsyncClient(timeout=_SCRAPE_SECONDS, trust_env=False) as client:
            for name, (url, key) in self._targets.items():
                try:
                    answer = await client.get(url, headers={"authorization": key} if key else {})
                except httpx.TransportError:
                    self.num_unanswered += 1
                    continue
                self.page.update(answer.text, process=name)


@dataclass(frozen=True)
class Counts:
    """What the whole stack has done since it started; differences of two are what happened between."""

    episodes: float
    """Executions of `run_episode` that ended, of whatever outcome."""
    episode_seconds: float
    """Their time, together."""
    collections: float
    turns: float
    """Sampled by the session server; those that were served again are not counted."""
    workflow_tasks: float
    failed_workflow_tasks: float
    timed_out_workflow_tasks: float
    """Not answered within the server's limit of 10 s."""
    heartbeat_timeouts: float
    """Activities given to another worker because no heartbeat came in time."""
    activity_timeouts: float
    """Of every kind."""
    failed_activities: float
    requests_failed: float
    """Calls of workers to Temporal that were answered with an error, retried or not."""
    session_errors: float
    activity_waits: float
    activity_wait_seconds: float
    """From schedule to start, summed over rollout activities."""
    workflow_wait_seconds: float
    journal_writes: float
    journal_seconds: float
    heartbeats: float
    temporal_writes: float
    """Of workflow state to Temporal's database: each starts, changes or ends one."""
    sticky_timeouts: float
    """Workflow tasks that the worker which has the workflow in its cache did not take in time: any other may then, and
    reads the history anew."""

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(**{name: value - vars(earlier)[name] for name, value in vars(self).items()})


def count(page: Page, rollout_queue: str) -> Counts:
    """Read the page. Core's latencies are in milliseconds."""
    activity = "temporal_activity_execution_latency"
    workflow = "temporal_workflow_task_execution_latency"
    timeout = "TimerActiveTaskWorkflowTaskTimeout"
    return Counts(
        episodes=page.total(f"{activity}_count", activity_type="run_episode"),
        episode_seconds=page.total(f"{activity}_sum", activity_type="run_episode") / 1000,
        collections=page.total(f"{activity}_count", activity_type="collect_samples"),
        turns=page.total("everroll_session_turns_total", source="sampled"),
        workflow_tasks=page.total(f"{workflow}_count"),
        failed_workflow_tasks=page.total("temporal_workflow_task_execution_failed"),
        timed_out_workflow_tasks=page.total("start_to_close_timeout", operation=timeout),
        heartbeat_timeouts=page.total("activity_task_timeout", timeout_type="Heartbeat"),
        activity_timeouts=page.total("activity_task_timeout"),
        failed_activities=page.total("temporal_activity_execution_failed"),
        requests_failed=page.total("temporal_request_failure"),
        session_errors=page.total("everroll_session_errors_total"),
        activity_waits=page.total("temporal_activity_schedule_to_start_latency_count", task_queue=rollout_queue),
        activity_wait_seconds=page.total("temporal_activity_schedule_to_start_latency_sum", task_queue=rollout_queue)
        / 1000,
        workflow_wait_seconds=page.total("temporal_workflow_task_schedule_to_start_latency_sum") / 1000,
        journal_writes=page.total("everroll_session_journal_seconds_count"),
        journal_seconds=page.total("everroll_session_journal_seconds_sum"),
        heartbeats=page.total("temporal_request", operation="RecordActivityTaskHeartbeat"),
        temporal_writes=sum(page.total("persistence_requests", operation=name) for name in _WRITES),
        sticky_timeouts=page.total("schedule_to_start_timeout", operation=timeout),
    )
