"""Aborts and pauses: what groups report to their run, what the run keeps of it, and what it says."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from everroll.contracts.base import Payload
from everroll.contracts.outcomes import Cause
from everroll.contracts.spec import EngineKind


class AbortSummary(Payload):
    """Aborts of one group with the same server and cause since its last report. Times are Unix seconds."""

    cause: Cause
    """The latest."""
    count: int
    first_at: float
    last_at: float


class EpisodesReport(Payload):
    """Signal of a group to its run: how its episodes ended since its last report."""

    group: int
    num_collected: int
    """Episodes that were collected, whatever their agents did."""
    failed: dict[str, int] = Field(default_factory=dict)
    """Those of them that gave no verdict, by cause kind."""
    aborts: list[AbortSummary] = Field(default_factory=list)


class ServerTrouble(Payload):
    """Aborts that name one server. Times are Unix seconds."""

    model_config = ConfigDict(frozen=False)

    server: str | None
    """None for aborts that no server is to blame for (no model call recorded)."""
    cause: Cause
    """The latest."""
    count: int = 0
    first_at: float = 0.0
    last_at: float = 0.0


class BudgetState(Payload):
    """What the abort budget remembers; carried through continue-as-new."""

    model_config = ConfigDict(frozen=False)

    window: str = ""
    """The last episodes, oldest first: `c` for collected; for an aborted one the letter of the server to blame."""
    blamed: dict[str, ServerTrouble] = Field(default_factory=dict)
    """By letter: the servers that the window blames, with the aborts that are in it. `first_at` may be that of an
    earlier one, if there have been some ever since."""
    troubles: list[ServerTrouble] = Field(default_factory=list)
    """Aborts since the last success."""
    relapses: int = 0
    """Pauses that ended because the server answered its probe, without a success since: it does not work all the same.
    """
    paused_at: float | None = None
    """When the first pause since the last success began, in Unix seconds."""


class Pause(Payload):
    """Why the run starts nothing new. Times are Unix seconds."""

    message: str
    since: float
    server: str | None = None
    """The run goes on by itself when this server answers again."""
    requested: bool = False
    """True if a person asked for it."""


class HoldRequest(Payload):
    """Signal of a run to its groups. Signals can overtake each other: the highest number holds."""

    number: int
    held: bool


class AwaitServerRequest(Payload):
    """Input of `await_server`: return when this server answers again."""

    server: str
    probe_seconds: float


class WatchEnginesRequest(Payload):
    """Input of `watch_engines`: return when an engine has lost the run's weights."""

    engine_urls: list[str]
    engine_kind: EngineKind
    version: int
    """What the run has published."""
    poll_seconds: float


class WatchEnginesResult(Payload):
    lost: dict[str, int]
    """Engines that were started anew, with the version that they serve now."""


class SurveyRequest(Payload):
    """Input of `survey_groups`."""

    run: str
    groups: list[int]


class Waiting(Payload):
    """One activity that has not finished, or a workflow that no worker goes on with, by name."""

    group: int | None = None
    """None: the run's own."""
    activity: str
    """The activity's id, such as `episode-3-0`, or its type for the run's own; `workflow task` for the workflow."""
    stage: str
    """What its last heartbeat said, or why it does not run."""
    attempt: int
    since: float
    """When it was scheduled, in Unix seconds."""
    last_heartbeat: float | None = None
    last_failure: str = ""
    stuck: bool = False
    """True if no worker has taken it, its worker is silent, or it is tried again: somebody should look."""

    @property
    def subject(self) -> str:
        """Whose it is, and which."""
        return f"{'the run' if self.group is None else f'group {self.group}'} {self.activity}"


class Survey(Payload):
    """What a run waits for: first what is stuck, then the longest waiting."""

    taken_at: float
    waiting: list[Waiting] = Field(default_factory=list)
    num_waiting: int = 0
    """All of them; `waiting` is cut short."""
