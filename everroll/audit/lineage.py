"""I3 from step to step: each was applied to the weights that the one before has on record. Pure.

After a lost trainer, steps since the newest checkpoint are trained again. On a CPU that gives the same weights; where
it does not, the next step is applied to weights that nobody published, which its metrics say. A GPU promises no such
thing: there it is noted, and the audit goes on.
"""

from __future__ import annotations

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, SealedDirectory, StepRecordFile
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import TrainSection

LINEAGE = "each step was applied to the weights of the one before"
_METRIC = "num_replay_differences"
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
        if num_other and not _promises_bits(record, request.train if request else train):
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
            "accelerator need not give the same bits"
        )


def _promises_bits(record: StepRecordFile, train: TrainSection) -> bool:
    """Whether training a batch again has to give the same weights.

    Of a record that does not name its device: unless the run asked for an accelerator.
    """
    device = record.device or train.device
    return train.on_replay_difference == "fail" or device in ("cpu", "auto")


def _hash_weights(directory: SealedDirectory) -> dict[str, str]:
    return {name: sha256 for name, sha256 in directory.hashes.items() if name.endswith(_WEIGHTS_SUFFIX)}


def _breach(step: int, message: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, step=step, message=message)
