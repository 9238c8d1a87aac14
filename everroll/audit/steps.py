"""I3: the run directory against the run's history. Pure.

A step is applied when its record is on disk. The history says which batch was handed over for it; the record says which
batch was trained and what weights came out; metrics, weights and checkpoints must tell the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, SealedDirectory, StepRecordFile
from everroll.audit.lineage import check_lineage
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import TrainResult

RECORDS = "steps are on record once, in order"
BATCHES = "each step trained the batch that was recorded for it"
METRICS = "metrics have one line per step, in order"
WEIGHTS = "weights and checkpoints are those of their step"
_I3 = Invariant.STEPS


def check_steps(
    account: Account, files: RunFiles, train: TrainSection, findings: Findings, *, is_open: bool = False
) -> None:
    """Compare what was handed over, what is on record, and what is kept.

    Of a run that `is_open` the files are those of steps that the history knows (`openness`); what a step leaves before
    its record may be there already, and what a later one lets go of may be gone.
    """
    _check_records(account, files, findings)
    for step, record in sorted(files.records.items()):
        _check_record(step, record, account, findings)
    check_lineage(account, files, train, findings)
    _check_metrics(files, findings)
    if not is_open:
        _check_unheard(account, files, findings)
    for directory in files.weights:
        own = files.records.get(directory.step)
        _check_directory(directory, {*own.weights_sha256.items()} if own else set(), findings)
    for directory in files.checkpoints:
        own = files.records.get(directory.step)
        made = {*(own.checkpoint_sha256 or {}).items()} if own else set()
        request = account.requests.get(directory.step)
        # Without its request, the settings of a step may be others than the run has now: those of a fork's origin.
        if own is not None and (request or not made) and _is_shared(request.train if request else train):
            made |= {*own.weights_sha256.items()}
        _check_directory(directory, made, findings)
        _check_state(directory, own, findings)
    if not is_open:
        _check_newest(files, findings)


def _is_shared(train: TrainSection) -> bool:
    """Whether checkpoints hold the files that engines load, not float32 masters, or the model below its adapters."""
    return train.publish_dtype == "float32" and train.lora.rank == 0


def _check_records(account: Account, files: RunFiles, findings: Findings) -> None:
    for step, text in files.unreadable.items():
        breach = _breach(step, f"the step's record cannot be read: {text}", "a record", "none that can be read")
        findings.add(RECORDS, breach)
    for step in sorted({*account.applied, *range(1, account.by_record + 1)}):
        breach = _breach(step, "the step was applied, and is not on record", "a record", "none")
        findings.expect(RECORDS, step in files.records or step in files.unreadable, breach)
    handed = set(account.requests)
    for step in sorted(files.records):
        breach = _breach(step, "a step is on record that the run never asked for", "no record", "a record")
        findings.expect(RECORDS, step in handed or step <= account.by_record, breach)


def _check_record(step: int, record: StepRecordFile, account: Account, findings: Findings) -> None:
    request, answer = account.requests.get(step), account.applied.get(step)
    if request is not None:
        known = [(item.group, item.manifest.sha256, item.manifest.uri) for item in request.batch]
        found = [(item.group, item.manifest.sha256, item.manifest.uri) for item in record.batch]
        breach = _breach(step, "another batch was trained than was handed over", _names(known), _names(found))
        pairs = zip(known, found, strict=False)
        first = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if first is not None:
            breach = breach.model_copy(update={"group": found[first][0]})
        findings.expect(BATCHES, known == found, breach)
    groups = [item.group for item in record.batch]
    breach = _breach(step, "the batch is not ordered by group", str(sorted(groups)), str(groups))
    findings.expect(BATCHES, groups == sorted(set(groups)), breach)
    found_step, version = record.result.step, record.result.weights.version
    breach = _breach(step, "the record is that of another step", f"step {step}", f"step {found_step}, {version=}")
    findings.expect(RECORDS, (found_step, version) == (step, step), breach)
    if answer is not None:
        values = _find_difference(answer, record.result)
        breach = _breach(step, "the run was told other results than are on record")
        findings.expect(RECORDS, values is None, breach.model_copy(update=values or {}))


def _find_difference(told: TrainResult, recorded: TrainResult) -> dict[str, str] | None:
    """Field and both values of what differs; what was looked up differs in that alone."""
    if told.weights != recorded.weights:
        return {"field": "weights", "expected": str(told.weights), "found": str(recorded.weights)}
    name = _find_other(told.metrics, recorded.metrics)
    return None if name is None else _show(name, told.metrics, recorded.metrics)


def _find_other(left: Mapping[str, float], right: Mapping[str, float]) -> str | None:
    """The first metric that differs. One that is not a number equals itself."""
    return next((name for name in sorted({*left, *right}) if repr(left.get(name)) != repr(right.get(name))), None)


def _show(name: str, known: Mapping[str, float], found: Mapping[str, float]) -> dict[str, str]:
    values = {
        key: repr(side[name]) if name in side else "none" for key, side in (("expected", known), ("found", found))
    }
    return {"field": name, **values}


def _check_metrics(files: RunFiles, findings: Findings) -> None:
    """A line is written just before the record, so the last one may be ahead of the records by one."""
    steps = [step for step, _ in files.metric_lines]
    wanted = list(range(1, len(steps) + 1))
    first = next((index for index, step in enumerate(steps) if step != wanted[index]), None)
    if first is not None:
        text = f"line {first + 1} of metrics.jsonl is of another step"
        findings.add(METRICS, _breach(wanted[first], text, f"step {wanted[first]}", f"step {steps[first]}"))
    if files.malformed_line is not None:
        text = f"line {files.malformed_line} of metrics.jsonl is no step's"
        findings.add(METRICS, _breach(len(steps) + 1, text, "a step and its metrics", "something else"))
    for step, values in files.metric_lines:
        record = files.records.get(step)
        if record is not None:
            own = record.result.metrics
            name = _find_other(own, values)
            breach = _breach(step, f"metrics.jsonl tells another {name} than the step's record")
            if name is not None:
                breach = breach.model_copy(update=_show(name, own, values))
            findings.expect(METRICS, name is None, breach)
    for step in sorted(set(files.records) - set(steps)):
        findings.add(METRICS, _breach(step, "the step has no line in metrics.jsonl", "one line", "none"))


def _check_unheard(account: Account, files: RunFiles, findings: Findings) -> None:
    """Nothing is left of steps that nobody took.

    The one after the newest on record may have been under way when the run ended: its line, weights and checkpoint are
    written before its record.
    """
    newest = max([*files.records, *files.unreadable], default=0)
    under_way = newest + 1 if newest + 1 in account.requests and newest + 1 not in account.applied else newest
    left = [(step, "a line in metrics.jsonl") for step, _ in files.metric_lines]
    left += [(one.step, f"{one.path}") for one in (*files.weights, *files.checkpoints)]
    for step, what in left:
        breach = _breach(step, "something is left of a step that is not on record", "nothing", what)
        check = METRICS if what.endswith(".jsonl") else WEIGHTS
        findings.expect(check, step <= under_way, breach)


def _check_directory(directory: SealedDirectory, made: set[tuple[str, str]], findings: Findings) -> None:
    """Files are those of the manifest, and what the step's record has hashes of is what it `made`: weights, and all
    files of a checkpoint."""
    step = directory.step
    if directory.manifest is None:
        findings.expect(WEIGHTS, False, _breach(step, f"{directory.path} has no manifest", "a manifest", "none"))
        return
    listed = {name: entry.sha256 for name, entry in directory.manifest.files.items()}
    for name in sorted({**listed, **directory.hashes}):
        known, found = listed.get(name, "not listed"), directory.hashes.get(name, "missing")
        findings.expect(WEIGHTS, known == found, _breach(step, f"{directory.path / name} was changed", known, found))
    for name, known in sorted(made):
        found = directory.hashes.get(name, "missing")
        breach = _breach(step, f"{directory.path / name} is not what the step made", known, found)
        findings.expect(WEIGHTS, known == found, breach)


def _check_state(directory: SealedDirectory, record: StepRecordFile | None, findings: Findings) -> None:
    """A checkpoint says of itself what it is, and carries its step's record."""
    step = directory.step
    breach = _breach(step, "the checkpoint says it is of another step", str(step), str(directory.state_step))
    findings.expect(WEIGHTS, directory.state_step == step, breach)
    if record is not None and record.parent_sha256 is not None:
        breach = _breach(step, "the step's record has no hashes of its checkpoint", "hashes", "none")
        findings.expect(WEIGHTS, record.checkpoint_sha256 is not None, breach)
    if record is not None:
        record = record.model_copy(update={"checkpoint_sha256": None})  # it cannot hold its own
        known = record.model_dump_json()
        found = directory.state_record.model_dump_json() if directory.state_record else "none"
        first = next((at for at, (left, right) in enumerate(zip(known, found, strict=False)) if left != right), 0)
        near = slice(max(0, first - 40), first + 80)
        text = "the checkpoint carries another record of its step than the run directory"
        findings.expect(WEIGHTS, known == found, _breach(step, text, known[near], found[near]))


def _check_newest(files: RunFiles, findings: Findings) -> None:
    newest = max(files.records, default=0)
    held = {directory.step for directory in files.weights}
    if newest:
        breach = _breach(newest, "the weights of the newest step are gone", "a directory", "none")
        findings.expect(WEIGHTS, newest in held, breach)


def _names(batch: list[tuple[int, str, str]]) -> str:
    return ", ".join(f"group {group} ({sha256[:12]} at {uri})" for group, sha256, uri in batch)


def _breach(step: int, message: str, expected: str | None = None, found: str | None = None) -> Breach:
    return Breach(invariant=_I3, step=step, message=message, expected=expected, found=found)
