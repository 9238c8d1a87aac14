"""`everroll audit` on a real finished run: it passes, and each planted corruption is found where it was planted."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everroll.audit.evidence import (
    Dispensed,
    Generation,
    GroupHistory,
    Published,
    RunFiles,
    RunHistory,
    Settled,
    StepCompleted,
    StepScheduled,
)
from everroll.audit.report import AuditReport, HistoryGoneError, Invariant
from everroll.cli.main import run_command_line
from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import GroupManifest, GroupResult
from everroll.contracts.spec import TrainSection
from everroll.contracts.steering import SteeringRecord
from everroll.contracts.training import RunState
from everroll.sessions.digest import digest_samples
from everroll.sessions.reading import RecordedSession
from everroll.tokens.samples import SampleSet, decode_samples
from tests.audit_helpers import (
    FinishedRun,
    Tampered,
    audit_tampered,
    change_first,
    edited_json,
    first_sampled,
    flip_token,
    make_finished_run,
    mask_in,
    nudge_logprob,
    reseal,
    rewrite_blob,
)
from tests.conftest import TemporalServer
from tests.session_helpers import find_free_port

Cli = Callable[..., tuple[int, str, str]]
SESSION = "audited-1-0-0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, temporal_server: TemporalServer) -> FinishedRun:
    queue = f"audited-{uuid.uuid4().hex[:8]}"
    return make_finished_run(tmp_path_factory.mktemp("finished"), "audited", queue, temporal_server)


@pytest.fixture
def tampered(finished: FinishedRun, tmp_path: Path) -> FinishedRun:
    return finished.copy(tmp_path / "copy")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["everroll", *arguments])
        level = logging.getLogger("temporalio").level
        try:
            code = run_command_line()
        finally:
            logging.getLogger("temporalio").setLevel(level)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def audit_json(cli: Cli, run: FinishedRun) -> tuple[int, dict[str, Any]]:
    code, output, _ = cli(*run.arguments(), "--json")
    return code, json.loads(output)


def test_an_honest_run_passes(cli: Cli, finished: FinishedRun) -> None:
    code, output, error = cli(*finished.arguments())
    assert (code, error) == (0, "")
    assert "audit passed" in output
    assert "run audited, completed: 2 steps, 4 groups (4 trained)" in output
    code, report = audit_json(cli, finished)
    assert code == 0
    assert report["passed"]
    assert report["num_episodes"] == 8
    assert report["num_sampled_tokens"] > 50
    assert {line["invariant"] for line in report["checks"]} == {"I1", "I2", "I3", "I5", "I6"}
    assert all(line["num_checked"] > 0 for line in report["checks"])


# Planted on disk, found by the command


def test_a_flipped_token_in_the_store(cli: Cli, tampered: FinishedRun) -> None:
    reference = sample_reference(tampered, 1, 1)
    sample = decode_samples(tampered.store.get(reference)).samples[0]
    position = first_sampled(sample)
    rewrite_blob(tampered.store, reference, lambda sample: flip_token(sample, position))
    code, report = audit_json(cli, tampered)
    assert code == 1
    changed, differs = report["breaches"][:2]
    assert reference.sha256 in changed["message"]
    assert (differs["group"], differs["member"], differs["sample"], differs["position"]) == (1, 1, 0, position)
    assert differs["field"] == "token_ids"
    known = int(sample.token_ids[position])
    assert (differs["expected"], differs["found"]) == (str(known), str(known ^ 1))
    code, output, _ = cli(*tampered.arguments())
    assert code == 1
    shown = " ".join(output.split())  # wherever the lines were broken
    assert f"I2 step 1, group 1, member 1, sample 0, token {position}: token_ids differs" in shown
    assert "audit FAILED" in output


def test_a_missing_blob(cli: Cli, tampered: FinishedRun) -> None:
    (tampered.store.root / sample_reference(tampered, 2, 0).uri).unlink()
    code, report = audit_json(cli, tampered)
    assert code == 1
    assert (report["breaches"][0]["group"], report["breaches"][0]["member"]) == (2, 0)
    assert "cannot read" in report["breaches"][0]["message"]


def test_a_changed_reward_in_the_store(cli: Cli, tampered: FinishedRun) -> None:
    path = next((tampered.store.root / "audited" / "groups" / "00000003").glob("*.json"))
    with edited_json(path) as manifest:
        manifest["outcomes"][1]["reward"] += 0.5
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = next(breach for breach in report["breaches"] if breach["field"] == "reward")
    assert (breach["invariant"], breach["group"], breach["member"]) == ("I6", 3, 1)
    assert (float(breach["expected"]), float(breach["found"])) == (0.25 + 1 / 3, 0.75 + 1 / 3)


@pytest.mark.parametrize(
    ("column", "field"),
    [("completion_ids", "token_ids"), ("logprobs", "sampler_logprobs"), ("weight_versions", "weight_versions")],
)
def test_an_altered_row_of_the_journal(cli: Cli, tampered: FinishedRun, column: str, field: str) -> None:
    """The lowest bit of one value is flipped: one ulp of a log-probability."""
    query = f"SELECT {column} FROM turns WHERE session_id = ? AND turn_index = 0"
    ((blob,),) = tampered.select(query, SESSION)
    assert isinstance(blob, bytes)
    changed = bytes([blob[0] ^ 1]) + blob[1:]
    tampered.edit_journal(f"UPDATE turns SET {column} = ? WHERE session_id = ? AND turn_index = 0", changed, SESSION)
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = next(breach for breach in report["breaches"] if breach["field"])
    sample = decode_samples(tampered.store.get(sample_reference(tampered, 1, 0))).samples[0]
    where = (breach["session_id"], breach["sample"], breach["position"], breach["field"])
    assert where == (SESSION, 0, first_sampled(sample), field)
    assert breach["expected"] != breach["found"]


def test_a_session_that_lost_its_last_turn(cli: Cli, tampered: FinishedRun) -> None:
    tampered.edit_journal("DELETE FROM turns WHERE session_id = ? AND turn_index = 1", SESSION)
    code, report = audit_json(cli, tampered)
    assert code == 1
    assert report["breaches"][0]["session_id"] == SESSION


def test_a_session_that_is_gone(cli: Cli, tampered: FinishedRun) -> None:
    for table in ("turns", "digests", "sessions"):
        tampered.edit_journal(f"DELETE FROM {table} WHERE session_id = ?", SESSION)
    code, report = audit_json(cli, tampered)
    assert code == 1
    assert "neither turns nor a digest" in report["breaches"][0]["message"]


def test_a_step_that_was_skipped(cli: Cli, tampered: FinishedRun) -> None:
    (tampered.run_dir / "steps" / "step_000001.json").unlink()
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = report["breaches"][0]
    assert (breach["invariant"], breach["step"], breach["expected"], breach["found"]) == ("I3", 1, "a record", "none")


def test_a_step_that_was_applied_twice(cli: Cli, tampered: FinishedRun) -> None:
    metrics = tampered.run_dir / "metrics.jsonl"
    first, second = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + first + second)
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = report["breaches"][0]
    assert (breach["invariant"], breach["expected"], breach["found"]) == ("I3", "step 2", "step 1")


def test_a_batch_in_another_order(cli: Cli, tampered: FinishedRun) -> None:
    with edited_json(tampered.run_dir / "steps" / "step_000002.json") as record:
        record["batch"].reverse()
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = report["breaches"][0]
    assert (breach["invariant"], breach["step"], breach["group"]) == ("I3", 2, 3)
    assert breach["expected"].startswith("group 2 ")
    assert breach["found"].startswith("group 3 ")


@pytest.mark.parametrize("kind", ["weights", "checkpoints"])
def test_weights_that_no_step_made(cli: Cli, tampered: FinishedRun, kind: str) -> None:
    """Even when the directory's own manifest was made to fit."""
    directory = tampered.run_dir / kind / "step_000001"
    weights = directory / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.unlink()  # the copy may share the file with others
    weights.write_bytes(body)
    reseal(directory)
    code, report = audit_json(cli, tampered)
    assert code == 1
    assert [(breach["invariant"], breach["step"]) for breach in report["breaches"]] == [("I3", 1)]
    assert "is not what the step made" in report["breaches"][0]["message"]


def test_a_checkpoint_of_another_step(cli: Cli, tampered: FinishedRun) -> None:
    first, second = (tampered.run_dir / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    code, report = audit_json(cli, tampered)
    assert code == 1
    assert any("of another step" in breach["message"] for breach in report["breaches"])


def add_metrics_line(run: FinishedRun) -> None:
    """As if a third step had been taken, and only its metrics were left."""
    path = run.run_dir / "metrics.jsonl"
    line = path.read_text().splitlines()[-1].replace('"step": 2', '"step": 3')
    path.write_text(path.read_text() + line + "\n")


def break_metrics_line(run: FinishedRun) -> None:
    path = run.run_dir / "metrics.jsonl"
    path.write_text(path.read_text() + "{no step}\n")


def record_step_twice(run: FinishedRun) -> None:
    steps = run.run_dir / "steps"
    shutil.copy(steps / "step_000002.json", steps / "step_2.json")


def add_weights(run: FinishedRun) -> None:
    shutil.copytree(run.run_dir / "weights" / "step_000002", run.run_dir / "weights" / "step_000003")


def forget_record(run: FinishedRun) -> None:
    """A checkpoint whose manifest was made to fit."""
    directory = run.run_dir / "checkpoints" / "step_000002"
    state = json.loads((directory / "trainer_state.json").read_text())
    (directory / "trainer_state.json").unlink()  # the copy may share the file with others
    (directory / "trainer_state.json").write_text(json.dumps({**state, "record": None}))
    reseal(directory)


def move_manifest(run: FinishedRun) -> None:
    """The same hash, and the place of another group's manifest."""
    with edited_json(run.run_dir / "steps" / "step_000001.json") as record:
        first, second = record["batch"]
        first["manifest"]["uri"] = second["manifest"]["uri"]


def settle_as_dropped(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "settled" / "group_00000001.json") as record:
        del record["manifest"]
        record["dropped"] = {"kind": "agent", "message": "it failed"}


def forget_settled(run: FinishedRun) -> None:
    (run.run_dir / "settled" / "group_00000001.json").unlink()


def settle_unheard(run: FinishedRun) -> None:
    """A group that the run never dispensed: a resume would take it for settled."""
    settled = run.run_dir / "settled"
    with edited_json(settled / "group_00000001.json") as record:
        (settled / "group_00000009.json").write_text(json.dumps({**record, "group": 9}))


def settle_with_other_numbers(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "settled" / "group_00000001.json") as record:
        record["mean_reward"] += 0.25


def move_mark(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "steps" / "step_000001.json") as record:
        record["mark"]["next_group"] = 9


def drop_by_mark(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "checkpoints" / "step_000002" / "trainer_state.json") as state:
        state["record"]["mark"]["dropped"] = [3]
    reseal(run.run_dir / "checkpoints" / "step_000002")


def leave_request(run: FinishedRun) -> None:
    requests = run.run_dir / "requests"
    request = json.loads((requests / "step_000002.json").read_text())
    (requests / "step_000003.json").write_text(json.dumps({**request, "step": 3}))


def forget_request(run: FinishedRun) -> None:
    (run.run_dir / "requests" / "step_000002.json").unlink()


def reorder_request(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "requests" / "step_000002.json") as request:
        request["batch"].reverse()


def retune_request(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "requests" / "step_000002.json") as request:
        request["train"]["learning_rate"] = 0.5


def forget_run(run: FinishedRun) -> None:
    (run.run_dir / "run.json").unlink()


def change_settings(run: FinishedRun) -> None:
    with edited_json(run.run_dir / "run.json") as record:
        record["spec"]["train"]["learning_rate"] = 0.5


def invent_origin(run: FinishedRun) -> None:
    """Steps up to that of a fork's origin are left to the audit of another run."""
    with edited_json(run.run_dir / "run.json") as record:
        record["forked_from"] = {"run": "other", "run_dir": "/nowhere", "step": 2}


def forge_steering(run: FinishedRun) -> None:
    record = SteeringRecord(number=1, at=1.0, action="pause", by="nobody@host")
    (run.run_dir / "steering.jsonl").write_text(record.model_dump_json() + "\n")


def break_steering(run: FinishedRun) -> None:
    (run.run_dir / "steering.jsonl").write_text("garbage\n")


def lose_checkpoint(run: FinishedRun) -> None:
    shutil.rmtree(run.run_dir / "checkpoints" / "step_000002")


def settle_as_another(run: FinishedRun) -> None:
    settled = run.run_dir / "settled"
    shutil.copy(settled / "group_00000001.json", settled / "group_00000009.json")


@pytest.mark.parametrize(
    ("tamper", "text", "where"),
    [
        (add_metrics_line, "something is left of a step that is not on record", ("I3", 3, None)),
        (break_metrics_line, "line 3 of metrics.jsonl is no step's", ("I3", 3, None)),
        (record_step_twice, "step_2.json is another record of it", ("I3", 2, None)),
        (add_weights, "something is left of a step that is not on record", ("I3", 3, None)),
        (forget_record, "the checkpoint carries another record", ("I3", 2, None)),
        (move_manifest, "another batch was trained than was handed over", ("I3", 1, 0)),
        (settle_as_dropped, "on record as settled otherwise", ("I1", None, 1)),
        (forget_settled, "on record as settled otherwise", ("I1", None, 1)),
        (settle_as_another, "the record of how the group was settled is none of it", ("I1", None, 9)),
        (settle_unheard, "on record as settled that the run never dispensed", ("I1", None, 9)),
        (settle_with_other_numbers, "settled is not what the run was told", ("I1", None, 1)),
        (move_mark, "the record's mark is not the one that was handed over", ("I3", 1, None)),
        (drop_by_mark, "the checkpoint carries another record", ("I3", 2, None)),
        (leave_request, "a request is on disk that the run never made", ("I3", 3, None)),
        (forget_request, "the step's request is not on disk", ("I3", 2, None)),
        (reorder_request, "the request on disk is not the one that was handed over", ("I3", 2, None)),
        (retune_request, "the request on disk is not the one that was handed over", ("I3", 2, None)),
        (forget_run, "run.json is missing", ("I3", None, None)),
        (change_settings, "run.json holds other settings than the run had", ("I3", None, None)),
        (invent_origin, "run.json tells of another origin than the history", ("I3", None, None)),
        (forge_steering, "number 1 on record was never asked of the run", ("I3", 0, None)),
        (break_steering, "line 1 of steering.jsonl cannot be read", ("I3", None, None)),
        (lose_checkpoint, "the newest checkpoint is gone", ("I3", 2, None)),
    ],
)
def test_a_run_directory_that_tells_otherwise(
    cli: Cli, tampered: FinishedRun, tamper: Callable[[FinishedRun], None], text: str, where: tuple[object, ...]
) -> None:
    tamper(tampered)
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = next(breach for breach in report["breaches"] if text in breach["message"])
    assert (breach["invariant"], breach["step"], breach["group"]) == where
    assert all(breach["expected"] != breach["found"] for breach in report["breaches"]), "both values are shown"


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("UPDATE turns SET follows = 1 WHERE session_id = ? AND turn_index = 1", "turn 1 follows turn 1"),
        ("UPDATE turns SET follows = 55 WHERE session_id = ? AND turn_index = 1", "turn 1 follows turn 55"),
        ("UPDATE turns SET logprobs = substr(logprobs, 5) WHERE session_id = ? AND turn_index = 1", "turn 1 has ["),
        ("UPDATE turns SET added_ids = substr(added_ids, 2) WHERE session_id = ? AND turn_index = 1", "cannot be read"),
        ("INSERT OR REPLACE INTO digests (session_id, digest, num_turns) VALUES (?, '{}', 2)", "the digest kept at"),
    ],
)
def test_rows_of_the_journal_that_are_no_session(cli: Cli, tampered: FinishedRun, sql: str, text: str) -> None:
    """A finding about that session: the others are looked at all the same, and no walk goes on for ever."""
    tampered.edit_journal(sql, SESSION)
    code, report = audit_json(cli, tampered)
    assert (code, report["num_breaches"], report["num_episodes"]) == (1, 1, 7)
    (breach,) = report["breaches"]
    assert (breach["invariant"], breach["session_id"]) == ("I2", SESSION)
    assert text in breach["message"]


# What cannot be audited


def test_what_is_missing_is_said(cli: Cli, finished: FinishedRun, tmp_path: Path) -> None:
    address = ("--address", finished.temporal.address)
    arguments = finished.arguments()
    code, _, error = cli("audit", "nobody", "--journal", str(finished.journal), *address)
    assert (code, error.count("\n")) == (2, 1)
    assert "no run named 'nobody'" in error
    code, _, error = cli("audit", "audited", *address, "--dir", str(tmp_path))
    assert code == 2
    assert f"no journal at {tmp_path}/sessions.sqlite" in error
    assert "--journal" in error
    (tmp_path / "other").write_text("no database")
    code, _, error = cli("audit", "audited", *address, "--journal", str(tmp_path / "other"))
    assert code == 2
    assert "is no journal" in error
    code, _, error = cli(*arguments, "--run-dir", str(tmp_path / "nowhere"))
    assert code == 2
    assert "no run directory" in error
    code, _, error = cli(*arguments, "--address", f"127.0.0.1:{find_free_port()}")
    assert code == 2
    assert "no Temporal server answers" in error
    code, _, error = cli(*arguments, "--store", "ftp://nowhere")
    assert code == 2
    assert "ftp" in error


# Retention has passed: the rows are gone, the digests stay


def forget_turns(run: FinishedRun) -> None:
    """What retention does: a digest of every session is kept, its rows are not."""
    for manifest in run.manifests():
        for outcome in manifest.outcomes:
            assert outcome.samples is not None
            samples = decode_samples(run.store.get(outcome.samples.blob)).samples
            digest = digest_samples(outcome.key.session_id, samples, 80).model_dump_json()
            sql = "INSERT OR REPLACE INTO digests (session_id, digest, num_turns) VALUES (?, ?, 2)"
            run.edit_journal(sql, outcome.key.session_id, digest)
    run.edit_journal("DELETE FROM turns")


def test_after_retention_digests_are_compared(cli: Cli, tampered: FinishedRun) -> None:
    forget_turns(tampered)
    code, report = audit_json(cli, tampered)
    assert (code, report["num_by_digest"]) == (0, 8)
    assert any("retention has passed" in note for note in report["notes"])
    rewrite_blob(tampered.store, sample_reference(tampered, 2, 1), lambda sample: nudge_logprob(sample, 60))
    code, report = audit_json(cli, tampered)
    assert code == 1
    breach = report["breaches"][1]
    assert (breach["group"], breach["member"], breach["sample"]) == (2, 1, 0)
    assert "digest kept at release" in breach["message"]


def test_the_digest_tells_which_side_was_changed(finished: FinishedRun) -> None:
    outcome = finished.manifests()[1].outcomes[0]
    assert outcome.samples is not None
    samples = decode_samples(finished.store.get(outcome.samples.blob)).samples
    digests = {SESSION: digest_samples(SESSION, samples, 80)}

    def lie_in_the_store(source: Tampered) -> None:
        source.digests = digests
        source.change_samples = of_session(SESSION, lambda found: change_first(found, lambda s: flip_token(s, 3)))

    def lie_in_the_journal(source: Tampered) -> None:
        source.digests = digests
        source.change_session = change_completion

    (breach,) = audit_tampered(finished, lie_in_the_store).breaches[:1]
    assert "the store does not agree" in breach.message
    first, second = audit_tampered(finished, lie_in_the_journal).breaches[:2]
    assert "not those of the digest" in first.message
    assert "the journal was changed" in second.message


# Altered between reading and checking: what no hash would show


def of_session(session_id: str, change: Callable[[SampleSet], SampleSet]) -> Callable[[SampleSet], SampleSet]:
    return lambda found: change(found) if found.session_id == session_id else found


def change_completion(session: RecordedSession) -> RecordedSession:
    if session.session_id != SESSION:
        return session
    first = session.turns[0]
    ids = first.tokens.completion_ids.copy()
    ids[0] ^= 1
    changed = dataclasses.replace(first, tokens=dataclasses.replace(first.tokens, completion_ids=ids))
    return dataclasses.replace(session, turns=[changed, *session.turns[1:]])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda sample: flip_token(sample, first_sampled(sample)), "token_ids"),
        (lambda sample: flip_token(sample, 3), "token_ids"),
        (lambda sample: nudge_logprob(sample, first_sampled(sample)), "sampler_logprobs"),
        (lambda sample: mask_in(sample, first_sampled(sample) - 1), "loss_mask"),
        (lambda sample: dataclasses.replace(sample, temperature=0.5), "temperature"),
        (lambda sample: dataclasses.replace(sample, finish_reason="other"), "finish_reason"),
    ],
)
def test_samples_that_are_not_the_sessions(finished: FinishedRun, change: Any, field: str) -> None:
    def tamper(source: Tampered) -> None:
        source.change_samples = of_session(SESSION, lambda found: change_first(found, change))

    breach = find_first(audit_tampered(finished, tamper), Invariant.TOKENS)
    assert (breach.step, breach.group, breach.member, breach.sample) == (1, 1, 0, 0)
    assert breach.field == field
    sample = decode_samples(finished.store.get(sample_reference(finished, 1, 0))).samples[0]
    positions = {"loss_mask": first_sampled(sample) - 1, "sampler_logprobs": first_sampled(sample)}
    if field in positions:
        assert breach.position == positions[field]
    if field == "sampler_logprobs":
        assert breach.expected is not None
        assert breach.found is not None
        bits = [int(text.split("bits ")[1].rstrip(")"), 16) for text in (breach.expected, breach.found)]
        assert bits[1] - bits[0] == 1
    if field == "loss_mask":
        assert (breach.expected, breach.found) == ("False", "True")


def test_a_trained_prompt_token_is_found_apart_from_the_assembly(finished: FinishedRun) -> None:
    def tamper(source: Tampered) -> None:
        change = lambda found: change_first(found, lambda sample: mask_in(sample, 2))  # noqa: E731
        source.change_samples = of_session(SESSION, change)

    report = audit_tampered(finished, tamper)
    assert any("a token that was not sampled is trained" in breach.message for breach in report.breaches)


def test_a_token_of_weights_to_come(finished: FinishedRun) -> None:
    def tamper(source: Tampered) -> None:
        def age(found: SampleSet) -> SampleSet:
            versions = np.where(found.samples[0].loss_mask, 1, -1).astype(np.int32)
            return change_first(found, lambda sample: dataclasses.replace(sample, weight_versions=versions))

        source.change_samples = of_session(SESSION, age)

    breach = find_first(audit_tampered(finished, tamper), Invariant.TOKENS)
    assert (breach.expected, breach.found) == ("at most 0", "1")


def test_members_that_swapped_their_samples(finished: FinishedRun) -> None:
    def tamper(source: Tampered) -> None:
        def swap(manifest: GroupManifest) -> GroupManifest:
            first, second = manifest.outcomes
            swapped = [
                first.model_copy(update={"samples": second.samples}),
                second.model_copy(update={"samples": first.samples}),
            ]
            return manifest.model_copy(update={"outcomes": swapped}) if manifest.group == 2 else manifest

        source.change_manifest = swap

    report = audit_tampered(finished, tamper)
    first = next(breach for breach in report.breaches if "samples are those of another session" in breach.message)
    assert (first.group, first.member, first.expected, first.found) == (2, 0, "audited-2-0-0", "audited-2-1-0")
    assert any(breach.invariant is Invariant.VERDICTS and breach.member == 1 for breach in report.breaches)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        ({"status": SampleStatus.ABORTED}, "an episode without a verdict is trained"),
        ({"status": SampleStatus.FAILED}, "an episode without a verdict is trained"),
        ({"reward": None}, "an episode without a verdict is trained"),
        ({"reward": 0.0}, "the reward is not what the episode reported"),
    ],
)
def test_outcomes_that_nobody_reported(finished: FinishedRun, update: dict[str, object], text: str) -> None:
    def tamper(source: Tampered) -> None:
        def change(manifest: GroupManifest) -> GroupManifest:
            first, second = manifest.outcomes
            return manifest.model_copy(update={"outcomes": [first, second.model_copy(update=update)]})

        source.change_manifest = lambda manifest: change(manifest) if manifest.group == 3 else manifest

    report = audit_tampered(finished, tamper)
    breach = next(breach for breach in report.breaches if breach.message == text)
    assert (breach.invariant, breach.step, breach.group, breach.member) == (Invariant.VERDICTS, 2, 3, 1)


def test_a_verdict_that_the_episode_never_gave(finished: FinishedRun) -> None:
    """The manifest says completed; the group's history says that the agent failed."""

    def tamper(source: Tampered) -> None:
        def fail(history: GroupHistory) -> GroupHistory:
            episode = history.episodes[SESSION]
            assert episode.report is not None
            failed = episode.report.model_copy(update={"status": SampleStatus.FAILED})
            episodes = {**history.episodes, SESSION: dataclasses.replace(episode, report=failed)}
            return dataclasses.replace(history, episodes=episodes)

        source.change_group = lambda history: fail(history) if history.request.group == 1 else history

    breach = find_first(audit_tampered(finished, tamper), Invariant.VERDICTS)
    assert (breach.group, breach.member) == (1, 0)
    assert breach.found is not None
    assert "reported failed" in breach.found


def test_another_prompt_than_the_order_says(finished: FinishedRun) -> None:
    def tamper(source: Tampered) -> None:
        def change(history: GroupHistory) -> GroupHistory:
            episodes = dict(history.episodes)
            for session_id, episode in episodes.items():
                assert episode.report is not None
                assert episode.report.prompt_index is not None
                other = episode.report.model_copy(update={"prompt_index": (episode.report.prompt_index + 1) % 5})
                episodes[session_id] = dataclasses.replace(episode, report=other)
            return dataclasses.replace(history, episodes=episodes)

        source.change_group = lambda history: change(history) if history.request.group == 2 else history

    breach = find_first(audit_tampered(finished, tamper), Invariant.SETTLED_ONCE)
    assert breach.group == 2
    assert "another prompt" in breach.message


def test_a_verdict_that_was_given_up_for_another(finished: FinishedRun) -> None:
    """Attempt 0 is trained, and a later one had completed with a higher reward."""

    def tamper(source: Tampered) -> None:
        def play_on(history: GroupHistory) -> GroupHistory:
            first = history.episodes[SESSION]
            assert first.report is not None
            key = first.request.key.model_copy(update={"attempt": 1})
            request = first.request.model_copy(update={"key": key})
            report = first.report.model_copy(update={"key": key, "reward": 0.9})
            later = dataclasses.replace(first, request=request, report=report)
            return dataclasses.replace(history, episodes={**history.episodes, key.session_id: later})

        source.change_group = lambda history: play_on(history) if history.request.group == 1 else history

    (breach,) = audit_tampered(finished, tamper).breaches
    assert (breach.invariant, breach.group, breach.member) == (Invariant.VERDICTS, 1, 0)
    assert (breach.expected, breach.found) == ("attempts 0 to 0", "attempts 0, 1")


def renumber(**update: object) -> Callable[[Tampered], None]:
    """Member 1 of group 3 refers to its samples by other numbers; the group's history says the same."""

    def tamper(source: Tampered) -> None:
        def change(manifest: GroupManifest) -> GroupManifest:
            first, second = manifest.outcomes
            assert second.samples is not None
            samples = second.samples.model_copy(update=update)
            return manifest.model_copy(update={"outcomes": [first, second.model_copy(update={"samples": samples})]})

        source.change_manifest = lambda manifest: change(manifest) if manifest.group == 3 else manifest

    return tamper


def name_another_prompt(source: Tampered) -> None:
    source.change_manifest = lambda manifest: manifest.model_copy(update={"prompt_index": 99})


def demand_newer(source: Tampered) -> None:
    """Samples of group 3 were to be of version 5 at least when they were collected."""

    def change(history: GroupHistory) -> GroupHistory:
        episodes = {
            session_id: dataclasses.replace(
                episode, collect=episode.collect and episode.collect.model_copy(update={"min_weight_version": 5})
            )
            for session_id, episode in history.episodes.items()
        }
        return dataclasses.replace(history, episodes=episodes)

    source.change_group = lambda history: change(history) if history.request.group == 3 else history


def play_nothing(source: Tampered) -> None:
    """Completed episodes of group 3 do not say which prompt they played."""

    def change(history: GroupHistory) -> GroupHistory:
        episodes = {
            session_id: dataclasses.replace(
                episode, report=episode.report and episode.report.model_copy(update={"prompt_index": None})
            )
            for session_id, episode in history.episodes.items()
        }
        return dataclasses.replace(history, episodes=episodes)

    source.change_group = lambda history: change(history) if history.request.group == 3 else history


@pytest.mark.parametrize(
    ("tamper", "text", "field"),
    [
        (renumber(num_tokens=1), "the samples are not as many, or of other weights", "num_tokens"),
        (renumber(min_weight_version=-3), "told other numbers of the group than its members", "min_weight_version"),
        (name_another_prompt, "the manifest names another prompt than its group's", "prompt_index"),
        (demand_newer, "sampled by older weights than were demanded", "weight_versions"),
        (play_nothing, "the episode played another prompt than its group's", None),
    ],
)
def test_what_is_told_of_a_group(
    finished: FinishedRun, tamper: Callable[[Tampered], None], text: str, field: str | None
) -> None:
    breaches = audit_tampered(finished, tamper).breaches
    breach = next(breach for breach in breaches if text in breach.message and breach.group == 3)
    assert breach.field == field
    assert breach.expected != breach.found


def edit_events(change: Callable[[list[Any]], list[Any]]) -> Callable[[Tampered], None]:
    def tamper(source: Tampered) -> None:
        def edit(history: RunHistory) -> RunHistory:
            (generation,) = history.generations
            events = change(list(generation.events))
            return dataclasses.replace(history, generations=[Generation(generation.run_id, None, events)])

        source.change_run = edit

    return tamper


def drop_group(group: int) -> Callable[[list[Any]], list[Any]]:
    """As if the prompt had been skipped."""
    return lambda events: [event for event in events if getattr(getattr(event, "request", None), "group", -1) != group]


def settle_twice(group: int) -> Callable[[list[Any]], list[Any]]:
    def change(events: list[Any]) -> list[Any]:
        event = next(event for event in events if isinstance(event, Settled) and event.group == group)
        return [*events, event]

    return change


def choose_prompt(events: list[Any]) -> list[Any]:
    """Group 2 plays a prompt that nobody chose."""
    return [
        Dispensed(event.request.model_copy(update={"prompt_index": 0}))
        if isinstance(event, Dispensed) and event.request.group == 2
        else event
        for event in events
    ]


def train_twice(events: list[Any]) -> list[Any]:
    scheduled = next(event for event in events if isinstance(event, StepScheduled))
    completed = next(event for event in events if isinstance(event, StepCompleted))
    index = events.index(completed) + 1
    return [*events[:index], scheduled, completed, *events[index:]]


def skip_step(events: list[Any]) -> list[Any]:
    return [
        event
        for event in events
        if not (isinstance(event, StepScheduled) and event.request.step == 1)
        and not (isinstance(event, StepCompleted) and event.requested_step == 1)
    ]


def never_answer(events: list[Any]) -> list[Any]:
    """The first step was handed over, and nothing came of it."""
    return [event for event in events if not (isinstance(event, StepCompleted) and event.requested_step == 1)]


def reverse_batch(events: list[Any]) -> list[Any]:
    return [
        dataclasses.replace(event, request=event.request.model_copy(update={"batch": event.request.batch[::-1]}))
        if isinstance(event, StepScheduled)
        else event
        for event in events
    ]


def train_otherwise(**update: object) -> Callable[[list[Any]], list[Any]]:
    """Step 2 is handed over with something else than the run was started with."""

    def change(events: list[Any]) -> list[Any]:
        return [
            dataclasses.replace(event, request=event.request.model_copy(update=update))
            if isinstance(event, StepScheduled) and event.request.step == 2
            else event
            for event in events
        ]

    return change


def never_publish(events: list[Any]) -> list[Any]:
    """What step 1 made was trained on, and no engine was brought to it."""
    return [event for event in events if not (isinstance(event, Published) and event.version == 1)]


def never_settle(events: list[Any]) -> list[Any]:
    return [event for event in events if not (isinstance(event, Settled) and event.group == 3)]


@pytest.mark.parametrize(
    ("change", "invariant", "text", "where"),
    [
        (drop_group(1), Invariant.SETTLED_ONCE, "groups are not dispensed in order", {"group": 2}),
        (settle_twice(1), Invariant.SETTLED_ONCE, "the group was settled again", {"group": 1}),
        (
            choose_prompt,
            Invariant.SETTLED_ONCE,
            "the group was given another prompt than the curriculum chose",
            {"group": 2},
        ),
        (train_twice, Invariant.STEPS, "the step was handed to the trainer again", {"step": 1}),
        (skip_step, Invariant.STEPS, "the steps are not taken in order", {"step": 2}),
        (never_answer, Invariant.STEPS, "a step was handed over before the one before it was answered", {"step": 2}),
        (reverse_batch, Invariant.STEPS, "the batch is not the lowest-numbered ready groups in order", {"step": 1}),
        (
            train_otherwise(seed=99),
            Invariant.STEPS,
            "the trainer was told another run.seed than the run's",
            {"step": 2},
        ),
        (
            train_otherwise(train=TrainSection(learning_rate=0.5)),
            Invariant.STEPS,
            "the trainer was told another train.learning_rate than the run's",
            {"step": 2},
        ),
        (never_publish, Invariant.STEPS, "the weights of the step before were not published", {"step": 2}),
        (never_settle, Invariant.STEPS, "the batch is not the lowest-numbered ready groups in order", {"group": 3}),
    ],
)
def test_histories_that_did_not_happen(
    finished: FinishedRun,
    change: Callable[[list[Any]], list[Any]],
    invariant: Invariant,
    text: str,
    where: dict[str, int],
) -> None:
    report = audit_tampered(finished, edit_events(change))
    breach = next(breach for breach in report.breaches if breach.message == text)
    assert breach.invariant is invariant
    assert {name: value for name, value in breach.model_dump().items() if name in where} == where


def tell_otherwise(**update: object) -> Callable[[Tampered], None]:
    """The run's own result counts otherwise."""

    def tamper(source: Tampered) -> None:
        def change(history: RunHistory) -> RunHistory:
            assert history.result is not None
            return dataclasses.replace(history, result=history.result.model_copy(update=update))

        source.change_run = change

    return tamper


@pytest.mark.parametrize(
    ("update", "name", "values"),
    [
        ({"trained_groups": 5}, "trained", ("4", "5")),
        ({"dropped_groups": {"agent": 1}}, "dropped", ("{}", "{'agent': 1}")),
    ],
)
def test_a_result_that_counts_otherwise(
    finished: FinishedRun, update: dict[str, object], name: str, values: tuple[str, str]
) -> None:
    (breach,) = audit_tampered(finished, tell_otherwise(**update)).breaches
    assert breach.message == f"the run's result tells of other groups {name} than its history"
    assert (breach.expected, breach.found) == values


def cut_before_step_2(events: list[Any]) -> list[Any]:
    return events[: next(i for i, one in enumerate(events) if isinstance(one, StepScheduled) and one.request.step == 2)]


def reopen(change: Callable[[list[Any]], list[Any]]) -> Callable[[Tampered], None]:
    """The history as it was when the run was open."""

    def tamper(source: Tampered) -> None:
        def edit(history: RunHistory) -> RunHistory:
            (generation,) = history.generations
            generation = dataclasses.replace(generation, events=change(list(generation.events)))
            return dataclasses.replace(history, state="running", result=None, generations=[generation])

        source.change_run = edit

    return tamper


def test_a_dropped_group_that_is_on_record_as_trainable(finished: FinishedRun) -> None:
    """Group 3 has not been trained yet, and the run was told that it was dropped."""

    def drop(events: list[Any]) -> list[Any]:
        result = GroupResult(group=3, dropped=Cause(kind=CauseKind.AGENT, message="it failed"))
        before = [event for event in cut_before_step_2(events) if not isinstance(event, Settled) or event.group != 3]
        return [*before, Settled(3, result)]

    breaches = audit_tampered(finished, reopen(drop)).breaches
    breach = next(breach for breach in breaches if "dropped group is on record" in breach.message)
    assert (breach.group, breach.expected, breach.found) == (3, "dropped: agent", "trainable")


def test_a_manifest_that_holds_another_groups_episodes(finished: FinishedRun) -> None:
    """Where the group's history is gone, the manifest itself must still be about the group."""
    first = finished.manifests()[1]

    def tamper(source: Tampered) -> None:
        def lose(history: GroupHistory) -> GroupHistory:
            raise HistoryGoneError("gone")

        source.change_group = lose
        source.change_manifest = lambda manifest: (
            manifest.model_copy(update={"outcomes": first.outcomes}) if manifest.group == 2 else manifest
        )

    breaches = audit_tampered(finished, tamper).breaches
    assert {(breach.invariant, breach.group, breach.message) for breach in breaches} == {
        (Invariant.VERDICTS, 2, "the outcome is another episode's"),
        (Invariant.VERDICTS, 2, "the run was told other numbers of the group than its members come to"),
        (Invariant.SETTLED_ONCE, 2, "the manifest names another prompt than its group's"),
    }


def let_go_of_samples(source: Tampered) -> None:
    """As if the run had been started with `train.keep_samples = "replay"`."""

    def change(history: RunHistory) -> RunHistory:
        train = history.spec.train.model_copy(update={"keep_samples": "replay"})
        spec = history.spec.model_copy(update={"train": train})
        (generation,) = history.generations
        events = [
            dataclasses.replace(event, request=event.request.model_copy(update={"train": train}))
            if isinstance(event, StepScheduled)
            else event
            for event in generation.events
        ]
        return dataclasses.replace(
            history, spec=spec, generations=[dataclasses.replace(generation, spec=spec, events=events)]
        )

    def rewrite(files: RunFiles) -> RunFiles:
        assert files.run_record is not None
        spec = files.run_record.spec
        train = spec.train.model_copy(update={"keep_samples": "replay"})
        record = files.run_record.model_copy(update={"spec": spec.model_copy(update={"train": train})})
        requests = {
            step: request.model_copy(update={"train": train}) if request else None
            for step, request in files.requests.items()
        }
        return dataclasses.replace(files, run_record=record, requests=requests)

    source.change_run, source.change_files = change, rewrite


def test_what_retention_lets_go_of_and_what_it_keeps(tampered: FinishedRun) -> None:
    """Samples go up to the oldest checkpoint that is kept; the others, and all manifests, must be there."""
    manifests = tampered.manifests()
    for manifest in manifests:
        for outcome in manifest.outcomes:
            assert outcome.samples is not None
            (tampered.store.root / outcome.samples.blob.uri).unlink()
    breaches = audit_tampered(tampered, let_go_of_samples).breaches
    assert {breach.step for breach in breaches} == {1, 2}, "a resume may start from checkpoint 0"
    shutil.rmtree(tampered.run_dir / "checkpoints" / "step_000000")
    breaches = audit_tampered(tampered, let_go_of_samples).breaches
    assert {(breach.invariant, breach.step) for breach in breaches} == {(Invariant.TOKENS, 2)}
    shutil.rmtree(tampered.run_dir / "checkpoints" / "step_000001")
    report = audit_tampered(tampered, let_go_of_samples)
    assert report.breaches == []
    assert any("samples that are gone" in note for note in report.notes)
    next((tampered.store.root / "audited" / "groups" / "00000003").glob("*.json")).unlink()
    report = audit_tampered(tampered, let_go_of_samples)
    (breach,) = report.breaches
    assert (breach.step, breach.group) == (2, 3)
    assert "cannot read" in breach.message
    verdicts = next(line for line in report.checks if line.what == "trained episodes have a verdict")
    assert verdicts.num_checked == 8, "the group's history still tells what was stored"


# The run's directory, where the history knows less than it


def test_an_open_run_whose_directory_is_ahead_of_its_history(finished: FinishedRun) -> None:
    """Between the two readings a step was taken: what the history does not know of is left out."""

    report = audit_tampered(finished, reopen(cut_before_step_2))
    assert [str(breach) for breach in report.breaches] == []
    assert (report.num_steps, report.num_episodes) == (1, 4)


def lose_history(source: Tampered) -> None:
    """As if the run had been resumed after its last step, on a Temporal server that knows nothing of it."""

    def change(history: RunHistory) -> RunHistory:
        (generation,) = history.generations
        start = RunState(dataset=history.dataset, step=2, next_group=4, trained_groups=4)
        restoring = dataclasses.replace(generation, events=[], restores=True)
        return dataclasses.replace(history, generations=[restoring, Generation("b", start, [], spec=history.spec)])

    source.change_run = change


def test_a_run_that_is_known_by_its_directory_alone(finished: FinishedRun, tampered: FinishedRun) -> None:
    """Temporal's database was lost: the directory's parts are held to each other."""
    report = audit_tampered(finished, lose_history)
    assert [str(breach) for breach in report.breaches] == []
    assert (report.num_steps, report.num_episodes) == (2, 8)
    for tamper in (settle_unheard, move_mark, reorder_request):
        tamper(tampered)
    (tampered.run_dir / "steps" / "step_000002.json").unlink()
    told = {(breach.step or breach.group, breach.message) for breach in audit_tampered(tampered, lose_history).breaches}
    assert {
        (9, "a group is on record as settled that the run never dispensed"),
        (1, "the request on disk has another mark than the step's record"),
        (2, "the step was applied, and is not on record"),
    } <= told


def take_no_step(run_id: str | None) -> Callable[[Tampered], None]:
    """The run ended before its first step."""

    def tamper(source: Tampered) -> None:
        def change(history: RunHistory) -> RunHistory:
            (generation,) = history.generations
            early = dataclasses.replace(generation, events=[], run_id=run_id or generation.run_id)
            return dataclasses.replace(history, state="failed", result=None, generations=[early])

        source.change_run = change

    return tamper


def test_steps_on_disk_of_a_run_that_took_none(finished: FinishedRun) -> None:
    breaches = audit_tampered(finished, take_no_step(None)).breaches
    assert {breach.step for breach in breaches if "never asked for" in breach.message} == {1, 2}
    report = audit_tampered(finished, take_no_step("another"))
    assert report.breaches == []
    assert any("belongs to an earlier run of this name" in note for note in report.notes)


def sample_reference(run: FinishedRun, group: int, member: int) -> Any:
    samples = run.manifests()[group].outcomes[member].samples
    assert samples is not None
    return samples.blob


def find_first(report: AuditReport, invariant: Invariant) -> Any:
    assert not report.passed
    return next(breach for breach in report.breaches if breach.invariant is invariant)
