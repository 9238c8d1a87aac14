"""Names of workflows, activities, task queues, search attributes, and how ids are built.

Every name is explicit and stands here once, so that code can move without breaking histories.
"""

from __future__ import annotations

import re

EVALUATION_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_]{0,31}$"
RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

RUN_RECORD_FILE = "run.json"
"""In a run's directory, once the run has begun."""

# Workflows
TRAINING_RUN = "TrainingRun"
ROLLOUT_GROUP = "RolloutGroup"
EVALUATION = "Evaluation"

# Activities on the queue `everroll` (light)
PREPARE_RUN = "prepare_run"
STORE_GROUP = "store_group"
RECORD_RUN = "record_run"
RESTORE_RUN = "restore_run"
RELEASE_SESSIONS = "release_sessions"
AWAIT_GROUPS = "await_groups"
PUBLISH_WEIGHTS = "publish_weights"
AWAIT_SERVER = "await_server"
SURVEY_GROUPS = "survey_groups"
WATCH_ENGINES = "watch_engines"
RECORD_BATCH = "record_batch"
READ_BATCH = "read_batch"
OPEN_EVALUATION = "open_evaluation"
STORE_EPISODES = "store_episodes"
FINISH_EVALUATION = "finish_evaluation"
AWAIT_EVALUATION = "await_evaluation"

# Activities on the queue `everroll-rollout`
RUN_EPISODE = "run_episode"
COLLECT_SAMPLES = "collect_samples"
PLAN_BLOCK = "plan_block"

# Activities on the queue `everroll-train`
PREPARE_TRAINER = "prepare_trainer"
TRAIN_STEP = "train_step"

# Queries, signals and updates of TrainingRun
QUERY_STATUS = "status"
SIGNAL_STOP = "stop"
SIGNAL_REPORT = "report_episodes"
UPDATE_PAUSE = "pause"
UPDATE_RESUME = "resume"
UPDATE_STOP = "stop"
UPDATE_SET = "set"
UPDATE_SKIP = "skip"
UPDATE_EVALUATE = "evaluate"

# Signals of RolloutGroup
SIGNAL_HOLD = "hold"
SIGNAL_END = "end_early"

# Search attributes, registered by `everroll up`
SEARCH_RUN = "EverrollRun"
SEARCH_STEP = "EverrollStep"
SEARCH_PHASE = "EverrollPhase"
SEARCH_REWARD = "EverrollReward"

# Header of the answer to `POST /sessions/{id}/samples`: a Cause, while the latest model call failed in the engines
ENGINE_TROUBLE_HEADER = "x-everroll-engine-trouble"

DEFAULT_TASK_QUEUE = "everroll"
DEFAULT_EVALUATION = "eval"
"""Name of a run's set of prompts for evaluation when there is one only."""
EVALUATIONS_FILE = "evaluations.jsonl"
"""In the run directory: a line for each result."""

ATTEMPTS_PER_RESUME = 10_000
"""Groups that a resumed run plays again count their attempts from here on, so that they get sessions of their own."""


def rollout_queue(task_queue: str) -> str:
    """The task queue of episodes and collection."""
    return f"{task_queue}-rollout"


def train_queue(task_queue: str) -> str:
    """The task queue of the one trainer."""
    return f"{task_queue}-train"


def run_workflow_id(run: str) -> str:
    return f"everroll/{run}"


def group_workflow_id(run: str, group: int) -> str:
    return f"everroll/{run}/group/{group}"


def evaluation_label(name: str, version: int) -> str:
    """Of one evaluation of a run: which set, and which weights. Never a number, as the last part of a session id is."""
    return f"{name}.v{version}"


def evaluation_workflow_id(run: str, name: str, version: int) -> str:
    return f"everroll/{run}/eval/{version}" + ("" if name == DEFAULT_EVALUATION else f"/{name}")


def session_id(run: str, group: int, member: int, attempt: int) -> str:
    """The session of one attempt at one episode; the same on every retry of its activities."""
    return f"{run}-{group}-{member}-{attempt}"


def is_valid_run_name(name: str) -> bool:
    return re.match(RUN_NAME_PATTERN, name) is not None
