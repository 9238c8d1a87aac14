"""What the run told the trainer: its own settings, and not before engines had the weights of the step before. Pure."""

from __future__ import annotations

from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import TrainRequest

SETTINGS = "steps are taken by the run's settings"
PUBLISHED = "each step follows the publish of the one before"


def check_order(request: TrainRequest, spec: RunSpec, published: int, findings: Findings) -> None:
    """Compare a step's request with the settings as they were changed until then, and with the newest version that was
    `published`. A run of one side publishes nothing."""
    wanted, found = _name_settings(spec, spec.run.seed), _name_settings(request, request.seed)
    name = next((name for name in wanted if wanted[name] != found[name]), None)
    breach = Breach(
        invariant=Invariant.STEPS, step=request.step, message=f"the trainer was told another {name} than the run's"
    )
    if name is not None:
        breach = breach.model_copy(update={"expected": f"{wanted[name]}", "found": f"{found[name]}"})
    findings.expect(SETTINGS, name is None, breach)
    if spec.run.mode == "full":
        breach = Breach(
            invariant=Invariant.STEPS,
            step=request.step,
            message="the weights of the step before were not published",
            expected=f"version {request.step - 1}",
            found=f"version {published}",
        )
        findings.expect(PUBLISHED, published == request.step - 1, breach)


def _name_settings(owner: RunSpec | TrainRequest, seed: int) -> dict[str, object]:
    sections = {"model": owner.model.model_dump(), "train": owner.train.model_dump()}
    named = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return {"run.seed": seed, **named}
