"""What rank 0 tells the other ranks to do, as JSON on the wire between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from everroll.contracts.base import Payload
from everroll.contracts.spec import ModelSection, TrainSection
from everroll.contracts.training import TrainRequest


class Begin(Payload):
    """Load the user's model as version 0."""

    kind: Literal["begin"] = "begin"
    model: ModelSection
    train: TrainSection
    seed: int


class LoadCheckpoint(Payload):
    """Load a checkpoint that rank 0 has checked."""

    kind: Literal["load_checkpoint"] = "load_checkpoint"
    run_dir: str
    step: int
    train: TrainSection


class LoadBatch(Payload):
    """Read and validate the batch of a step."""

    kind: Literal["load_batch"] = "load_batch"
    request: TrainRequest


class Apply(Payload):
    """Apply the batch that was loaded."""

    kind: Literal["apply"] = "apply"


class Collect(Payload):
    """Give rank 0 all weights."""

    kind: Literal["collect"] = "collect"


class SaveOptimizer(Payload):
    """Write the optimizer's state into a directory, each rank its part."""

    kind: Literal["save_optimizer"] = "save_optimizer"
    directory: str


class Forget(Payload):
    """Drop model, optimizer and batch."""

    kind: Literal["forget"] = "forget"


class Idle(Payload):
    """Nothing to do; rank 0 is alive."""

    kind: Literal["idle"] = "idle"


class Stop(Payload):
    """End the process."""

    kind: Literal["stop"] = "stop"


Work = Begin | LoadCheckpoint | LoadBatch | Apply | Collect | SaveOptimizer | Forget
COMMANDS: TypeAdapter[Work | Idle | Stop] = TypeAdapter(Annotated[Work | Idle | Stop, Field(discriminator="kind")])
