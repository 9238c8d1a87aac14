"""I3 from step to step: each was applied to the weights that the one before has on record. Pure.

After a lost trainer, steps since the newest checkpoint are trained again. On a CPU that gives the same weights; where
it does not, the next step is applied to weights that nobody published, which its metrics say. A GPU promises no such
thing, nor do other numbers of processes or threads than the first time: there it is noted, and the audit goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, SealedDirectory, StepRecordFile
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import TrainSection

LINEAGE = "each step was applied to the weights of the one before"
_METRIC = "num_replay_differences"
_NUM_PROCESSES = "num_processes"
_WEIGHTS_SUFFIX = ".safetensors"


def check_lineage(account: Account, files: RunFiles, train: TrainSection, findings: Findings) -> None:
    """Compare what each step was applied to with the record of the step before; `train` for steps without a request."""
    known = {step: record.weights_sha256 for step, record in files.records.items()}
    first = next((directory for directory in files.weights if directory.step == 0), None)
    if first is not None:
        known[0] = _hash_weights(first)
    told = []
    for step, record in sorted(files.records.items()):
        request = account.requests.get(step)
        num_other = record.result.metrics.get(_METRIC, 0.0)
        if num_other and not _promises_bits(step, files.records, request.train if request else train):
            told.append(step)
        elif num_other:
            breach = _breach(step, "it was applied to other weights than are on record and were published")
            values = {"expected": "the same weights when trained again", "found": f"{num_other:g} steps gave others"}
            findings.expect(LINEAGE, False, breach.model_copy(update=values))
        elif record.parent_sha256 is not None and step - 1 in known:
            values = {"expected": str(known[step - 1]), "found": str(record.parent_sha256)}
            breach = _breach(step, "it was applied to other weights than the step before has on record")
            findings.expect(LINEAGE, known[step - 1] == record.parent_sha256, breach.model_copy(update=values))
    if told:
        findings.note(
            f"{len(told)} steps ({', '.join(map(str, told[:20]))}{', ...' if len(told) > 20 else ''}) were applied, "
            "after a lost trainer, to weights that differ from those on record and published: training again on an "
            "accelerator, or with another number of processes or threads, need not give the same bits"
        )


def _promises_bits(step: int, records: Mapping[int, StepRecordFile], train: TrainSection) -> bool:
    """Whether training again what a step is applied to has to give the same weights.

    Of a record that does not name its device: only if the run asked for a CPU.
    """
    if train.on_replay_difference == "fail":
        return True
    again = [records[number] for number in _list_trained_again(step, records)]
    same = all(_same_arithmetic(records[step], first) for first in again)
    return same and (records[step].device or train.device) == "cpu"


def _list_trained_again(step: int, records: Mapping[int, StepRecordFile]) -> list[int]:
    """Steps that a trainer lost before `step` has to train again: those since the newest checkpoint."""
    steps = []
    for number in range(step - 1, 0, -1):
        if number not in records or records[number].checkpoint_sha256 is not None:
            break
        steps.append(number)
    return steps


def _same_arithmetic(left: StepRecordFile, right: StepRecordFile) -> bool:
    """By as many processes of as many threads on the same kind of device, as far as the records tell."""
    pairs = (
        (left.result.metrics.get(_NUM_PROCESSES), right.result.metrics.get(_NUM_PROCESSES)),
        (left.num_threads, right.num_threads),
        (left.device, right.device),
    )
    return all(one is None or other is None or one == other for one, other in pairs)


def _hash_weights(directory: SealedDirectory) -> dict[str, str]:
    return {name: sha256 for name, sha256 in directory.hashes.items() if name.endswith(_WEIGHTS_SUFFIX)}


def _breach(step: int, message: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, step=step, message=message)
