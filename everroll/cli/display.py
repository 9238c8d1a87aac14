"""Show a followed run: a live panel on a terminal, plain lines otherwise."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everroll.cli.progress import (
    Progress,
    describe_groups,
    draw_bar,
    draw_sparkline,
    format_counts,
    format_rate,
    format_reward,
    list_attention,
    reward_scale,
)
from everroll.contracts.training import StepRecord

_PLAIN_SECONDS = 10.0
_BAR_WIDTH = 40
_REWARD_BAR_WIDTH = 20


class Display(Protocol):
    """Where progress goes."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, now_seconds: float, progress: Progress) -> None: ...


def make_display(console: Console, url: str | None) -> Display:
    return LiveDisplay(console, url) if console.is_terminal else PlainDisplay(console)


class LiveDisplay:
    """Redraws a few lines in place; other output of the same console goes above them."""

    def __init__(self, console: Console, url: str | None) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._url = url

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, now_seconds: float, progress: Progress) -> None:
        self._live.update(render_progress(progress, self._url), refresh=True)


class PlainDisplay:
    """Prints a line when a step is done and every ten seconds, and at once what a person should know."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_step: int | None = None
        self._last_line = ""
        self._last_attention: list[str] = []
        self._last_seconds = 0.0

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, now_seconds: float, progress: Progress) -> None:
        step = progress.status.step if progress.status else None
        line = progress.describe()
        due = now_seconds - self._last_seconds >= _PLAIN_SECONDS
        if line != self._last_line and (due or step != self._last_step):
            self._print(line)
            self._last_step, self._last_line, self._last_seconds = step, line, now_seconds
        attention = list_attention(progress.view) if progress.view else []
        for text in attention:
            if text not in self._last_attention:
                self._print(text)
        self._last_attention = attention

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def render_progress(progress: Progress, url: str | None) -> RenderableType:
    """The live panel."""
    status = progress.status
    if status is None:
        return Text(progress.describe())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    steps = progress.ordered_steps
    rewards = draw_sparkline([record.mean_reward for record in steps], *reward_scale(steps))
    bar = draw_bar(status.step, status.num_steps, _BAR_WIDTH).ljust(_BAR_WIDTH, "░")
    table.add_row("step", f"{bar} {status.step}/{status.num_steps}  {status.phase.value}")
    table.add_row("mean reward", f"{format_reward(status.mean_reward)}  {rewards}")
    table.add_row("groups", describe_groups(status).removeprefix("groups "))
    table.add_row("tokens/s", format_rate(progress.rate.compute()))
    table.add_row("aborts", format_counts(status.unusable_episodes))
    if status.evaluations:
        table.add_row("evaluation", Text(status.evaluations[-1].describe()))
    if status.last_cause is not None:
        table.add_row("last cause", Text(str(status.last_cause)))
    for line in list_attention(progress.view) if progress.view else ():
        table.add_row("attention", Text(line, style="yellow"))
    return Group(table, Text(f"web UI  {url}")) if url else table


def render_steps(steps: list[StepRecord]) -> RenderableType:
    """Reward by step, sampled tokens, and seconds spent."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("step", "reward"):
        table.add_column(name, justify="right")
    table.add_column("", min_width=_REWARD_BAR_WIDTH)
    for name in ("episodes", "tokens", "rollout", "train", "publish", "aborts"):
        table.add_column(name, justify="right")
    _, high = reward_scale(steps)
    for record in steps:
        table.add_row(
            str(record.step),
            format_reward(record.mean_reward),
            draw_bar(record.mean_reward, high, _REWARD_BAR_WIDTH),
            str(record.num_episodes),
            str(record.num_sampled_tokens),
            *([f"{value:.1f} s" for value in record.seconds] if record.seconds else ["-"] * 3),
            str(sum(record.unusable.values())),
        )
    return table
