"""The run specification: what a run file (TOML) holds, and the input of the `TrainingRun` workflow.

Durations are in seconds and named so; paths are made absolute when a run file is loaded (`everroll.runfile`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from everroll.contracts.base import Spec
from everroll.contracts.names import (
    DEFAULT_EVALUATION,
    DEFAULT_TASK_QUEUE,
    EVALUATION_NAME_PATTERN,
    RUN_NAME_PATTERN,
)

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
PositiveInt = Annotated[int, Field(ge=1)]
EngineKind = Literal["auto", "sglang", "vllm"]
"""What an inference engine speaks; `auto` asks the server. The embedded engine speaks both."""
DataPaths = str | Annotated[list[str], Field(min_length=1)]


class RunSection(Spec):
    """[run]: identity and length of the run."""

    name: Annotated[str, Field(pattern=RUN_NAME_PATTERN)]
    """Name of the run; its workflow id is `everroll/<name>`."""
    num_steps: PositiveInt
    """Optimizer steps to take."""
    mode: Literal["full", "rollout", "train"] = "full"
    """`full`: rollout, train, publish. `rollout`: play and store `num_steps` batches, and train nothing; the engines
    serve `model.path`. `train`: train the batches that another run has stored, and play nothing (docs/one-side.md)."""
    batches_from: str | None = None
    """With `mode = "train"`: the directory of the run that played the batches."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random in the run: episodes, sampling and training derive theirs from it."""
    output_dir: str = ".everroll/runs"
    """Directory that will hold `<name>/`: checkpoints, metrics and the resolved run file."""

    @model_validator(mode="after")
    def _check_mode(self) -> RunSection:
        if (self.mode == "train") != (self.batches_from is not None):
            raise ValueError('`batches_from` and `mode = "train"` go together')
        return self


class ModelSection(Spec):
    """[model]: the policy that is trained."""

    path: str
    """Checkpoint directory in Hugging Face layout (config, safetensors, tokenizer), or a `.gguf` file: that is unpacked
    once, below `.everroll/gguf` in the working directory (needs the extra `gguf`)."""
    renderer: str = "auto"
    """Chat renderer of the `renderers` package, e.g. `qwen3`; `auto` asks the package to tell from the model's name."""
    chat_template: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the chat template that the renderer understands, e.g. `enable_thinking = false`."""
    history: Literal["extend", "rerender"] = "extend"
    """`extend`: a turn keeps the recorded tokens of earlier turns, reasoning included; a chat template that cannot is
    refused. `rerender`: follow the template, and start a new branch where it rewrites earlier turns."""
    history_match: Annotated[str, Field(pattern=r"^(strict|json|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")] = "json"
    """When a message that an agent sends back is the recorded one. `json`: all equal, tool-call arguments as JSON
    values. `strict`: the arguments' text too. `module:function`: a function that the session server can import, from a
    message to the part of it that counts (see docs/sessions.md)."""


class CurriculumSpec(Spec):
    """[data.curriculum]: a function that chooses the prompts, a block of groups at a time, in place of `shuffle`."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """Python function `package.module:name`, importable by the rollout workers (see docs/data.md)."""
    block_groups: Annotated[int, Field(ge=1, le=4096)] = 64
    """Groups that it is asked about at once."""
    use_steps: bool = False
    """Hand it the latest finished steps, so that it can choose by how training goes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function unchanged."""


class DataSection(Spec):
    """[data]: the prompts."""

    path: DataPaths
    """JSONL or Parquet: a path, a glob or a URL, or a list of them, read in that order (docs/data.md). A row holds
    `messages` (chat) or `text`, and optionally `label` and `metadata`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the order within each epoch."""
    shuffle: bool = True
    """Shuffle each epoch; false keeps the file's order."""
    curriculum: CurriculumSpec = Field(default_factory=CurriculumSpec)


class SamplingSpec(Spec):
    """[rollout.sampling]: sampling values pinned by the run; they win over what an agent asks for."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature. Recorded with each sample, and used again by the loss."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the recorded log-probabilities are not renormalised to the nucleus."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens only; -1 for all."""
    max_tokens: PositiveInt = 1024
    """Most tokens sampled in one turn."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a turn, besides those of the chat template."""

    @model_validator(mode="after")
    def _check_top_k(self) -> SamplingSpec:
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (all tokens) or at least 1")
        return self


class AgentSpec(Spec):
    """[rollout.agent]: what plays an episode. Exactly one of `function` and `command`."""

    function: str | None = None
    """Python function `package.module:name`, importable by the rollout workers (see docs/agents.md)."""
    command: list[str] | None = None
    """Program and arguments, run once per episode; it finds its session and prompt in the environment."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the agent unchanged."""
    reward_key: str = "reward"
    """Key of the reward when the agent returns a mapping."""

    @model_validator(mode="after")
    def _check_one(self) -> AgentSpec:
        if (self.function is None) == (self.command is None):
            raise ValueError("give exactly one of `function` and `command`")
        if self.function is not None and self.function.count(":") != 1:
            raise ValueError(f"`function` must look like `package.module:name`, not {self.function!r}")
        if self.command is not None and not self.command:
            raise ValueError("`command` must name a program")
        return self


class AbortBudgetSpec(Spec):
    """[rollout.abort_budget]: how much infrastructure failure the run takes before it stops playing."""

    window: Annotated[int, Field(ge=1, le=10_000)] = 200
    """The last so many episodes are looked at, over all groups and steps."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Most of the window that may be aborted: 200 and 0.5 stand for 100 aborts among the last 200 episodes."""
    dead_seconds: Seconds = 60.0
    """Aborts that name one server, over so long and without one success in between, exceed the budget too."""
    on_exceeded: Literal["pause", "fail"] = "pause"
    """`pause`: start nothing new until the server answers again, or `everroll resume`. `fail`: fail at once."""
    probe_seconds: Seconds = 2.0
    """Time between two probes of the server while paused."""
    max_pause_seconds: Seconds = 7 * 24 * 3600.0
    """A pause that nobody ends fails the run after so long."""


class StragglersSpec(Spec):
    """[rollout.stragglers]: whether a step goes on without its slowest groups (docs/overlap.md)."""

    policy: Literal["wait", "drop"] = "wait"
    """What becomes of the groups of a step that still play when its batch is complete. `wait`: they play on, for a
    later step; with `max_staleness = 0` they will be stale then. `drop`: their episodes are ended at once, and the
    groups dropped as `straggler`."""
    after_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `drop`: the share of the batch that must be ready for the others to count as stragglers. Below 1, those that
    are ended are replaced by new groups: a way out of hung environments, not a shorter step."""
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    """With `after_share` below 1: how long the others are waited for from then on."""


class RolloutSection(Spec):
    """[rollout]: how episodes are played and collected."""

    agent: AgentSpec
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    groups_per_step: PositiveInt = 8
    """Groups in one training batch."""
    episodes_per_group: Annotated[int, Field(ge=2)] = 8
    """Episodes of the same prompt in one group."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """0: synchronous. S > 0: groups may be up to S weight versions old, and rollouts overlap with training."""
    on_stale: Literal["drop", "refill"] = "drop"
    """A group older than that when its turn comes: `drop` settles it, `refill` samples the same prompt again, up to
    three times."""
    oversample_groups: Annotated[int, Field(ge=0)] = 0
    """Groups started in excess of a batch while it is gathered; the first complete ones make the batch, ordered by
    group. Shortens steps, and favours prompts whose episodes are short (docs/overlap.md)."""
    stragglers: StragglersSpec = Field(default_factory=StragglersSpec)
    max_seq_len: Annotated[int, Field(ge=2)] | None = None
    """Samples are truncated to this many tokens; without it, nothing is truncated."""
    on_unusable: Literal["drop", "refill"] = "refill"
    """A group with an aborted or failed member: `drop` drops the whole group, `refill` samples that member again."""
    max_refills: Annotated[int, Field(ge=0, lt=1000)] = 3
    """Most new attempts per member under `refill`; after that the group is dropped."""
    max_groups_in_flight: PositiveInt | None = None
    """Most groups that play at once; without it, as many as `max_staleness` allows. Never more than 1,900 do."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal: they carry no gradient."""
    abort_budget: AbortBudgetSpec = Field(default_factory=AbortBudgetSpec)
    refill_backoff_seconds: Seconds = 1.0
    """Wait before a member is sampled again after an infrastructure failure; doubles with each attempt."""
    max_empty_rounds: PositiveInt = 3
    """Fail after this many times a batch's worth of consecutive groups without a single trainable one."""
    episode_timeout_seconds: Seconds = 600.0
    """Deadline of one episode, its retries after lost workers not counted."""
    group_timeout_seconds: Seconds = 3600.0
    """Deadline of one group, all members and refills included."""
    collect_attempts: PositiveInt = 3
    """Attempts at a call that failed in transport before its sample is aborted; 1 never retries."""
    heartbeat_timeout_seconds: Seconds = 10.0
    """A rollout worker that is silent for so long is taken for dead, and its episodes go on elsewhere."""


class EvalSection(Spec):
    """[eval]: evaluation of the weights on prompts of their own, every n steps and on demand (docs/evaluation.md)."""

    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate after every so many steps, and after the last one; 0: only on demand (`everroll eval`)."""
    at_start: bool = True
    """With `every`: evaluate the weights that the run starts from, too."""
    path: DataPaths | None = None
    """The prompts, as in `data.path`; as one set of the name `eval`. They are played in the file's order."""
    sets: dict[Annotated[str, Field(pattern=EVALUATION_NAME_PATTERN)], DataPaths] = Field(default_factory=dict)
    """Several sets by name, in place of `path`; each is evaluated by itself."""
    episodes_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Episodes of each prompt; pass@k is told for k = 1, 2, 4, ... up to this."""
    max_prompts: PositiveInt | None = None
    """Only the first so many prompts of each set."""
    pass_reward: float = 1.0
    """An episode passes when its reward is at least this."""
    agent: AgentSpec | None = None
    """What plays an episode; without it, `rollout.agent`."""
    sampling: SamplingSpec | None = None
    """Sampling values; without them, those of `rollout.sampling`."""
    concurrency: Annotated[int, Field(ge=1, le=128)] = 16
    """Episodes of one evaluation under way at once: no more slots of the rollout workers than this are taken."""
    priority: Annotated[int, Field(ge=1, le=5)] = 5
    """Place of its episodes in the rollout workers' queue, 1 first; training's have 3."""
    on_publish: Literal["overlap", "block"] = "overlap"
    """When new weights are ready while an evaluation runs. `overlap`: they are published, and the result names the
    versions that its episodes were sampled by. `block`: publishing waits, and the result is of one version."""
    timeout_seconds: Seconds = 3600.0
    """Deadline of one evaluation, time on hold not counted; what has been played by then is its result."""

    @model_validator(mode="after")
    def _check_paths(self) -> EvalSection:
        if self.path is not None and self.sets:
            raise ValueError("give `path` or `sets`, not both")
        if self.every and not self.named_paths:
            raise ValueError("`every` needs `path` or `sets`")
        return self

    @property
    def named_paths(self) -> dict[str, DataPaths]:
        """The prompts of each set."""
        return {DEFAULT_EVALUATION: self.path} if self.path is not None else self.sets


class LoraSpec(Spec):
    """[train.lora]: low-rank adapters in place of all weights (needs the extra `lora`). Fixed for the whole run."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter's update is scaled by alpha / rank."""
    target_modules: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["all-linear"])
    """Ends of the names of the modules that get adapters, e.g. `q_proj`; `all-linear` is every linear layer but the
    output layer."""


class MetricsSpec(Spec):
    """[train.metrics]: where each step's numbers go besides `metrics.jsonl`. A sink that fails never fails a step."""

    tensorboard: bool = False
    """Event files in `<run_dir>/tensorboard` (needs the extra `tensorboard`)."""
    wandb_project: str | None = None
    """Project of Weights & Biases (needs the package `wandb`; its own environment variables hold key and mode)."""
    trackio_project: str | None = None
    """Project of Trackio (needs the package `trackio`)."""


class TrainSection(Spec):
    """[train]: policy optimisation."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Steps, counted after warm-up, over which the learning rate falls linearly to `final_lr_share`; 0 keeps it."""
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of the learning rate once it has decayed."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's betas."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient's global norm to this; 0 for no clipping."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Group-relative: `grpo` divides by the group's standard deviation, `dr_grpo` does not, `rloo` leaves one out."""
    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    """`clipped`: one probability ratio per token, clipped as in PPO; `gspo`: one ratio per sample, clipped; `cispo`:
    the clipped ratio is a constant weight on the log-probability, so that clipped tokens keep their gradient."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower bound of the probability ratio is 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper bound of the probability ratio is 1 + clip_high."""
    dual_clip: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """With a negative advantage, bound the ratio by this from above too; above 1 + clip_high, e.g. 3. 0 for no such
    bound. Not for `cispo`, which bounds it anyway."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference model, added to each token's loss; 0 loads no reference."""
    kl_reference: str | None = None
    """Checkpoint directory of the reference model; without it, the model that the run started from. With LoRA it must
    not be set: the reference is the model without its adapters."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Denominator of the probability ratio: `trainer`, the trainer's own log-probabilities before the batch's first
    update (the ratio of an on-policy update is then exactly 1), or `sampler`, those that the engine recorded."""
    importance_cap: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """With `old_logprobs = "trainer"`, each token's loss is weighted by min(p_trainer / p_sampler, importance_cap): it
    corrects for stale samples and for the engine's arithmetic. 0 for no correction; 1 only ever weighs down."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all sampled tokens of the update; `sequence`: mean over samples of each one's token mean;
    `constant`: sum over tokens divided by samples x normalization_tokens, so that length does not matter. An episode of
    several samples counts once per sample."""
    normalization_tokens: PositiveInt = 1024
    """Divisor of `normalization = "constant"`; usually the longest sample's number of sampled tokens."""
    num_minibatches: PositiveInt = 1
    """Split a batch into so many optimizer updates (1 keeps it on-policy). Must divide `groups_per_step`."""
    tokens_per_microbatch: PositiveInt | None = None
    """Most tokens in one forward and backward pass, padding included; a longer sample has a pass of its own. Does not
    change the gradient. By default 2,048 on a CPU (caches are small) and 16,384 on an accelerator."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    padding_free: Literal["auto", "on", "off"] = "auto"
    """Lay the samples of a micro-batch end to end, each with an attention of its own, in place of padding them to the
    longest. `auto` does where the model is found to allow it; `on` refuses a model that does not."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights are float32."""
    publish_dtype: Literal["float32", "bfloat16", "model"] = "float32"
    """Type of the weights that engines load; `model` is the type that the starting checkpoint's configuration names.
    Checkpoints keep float32."""
    lora: LoraSpec = Field(default_factory=LoraSpec)
    metrics: MetricsSpec = Field(default_factory=MetricsSpec)
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:0`, ..."""
    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints of the optimizer; weights are written at every step."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    """Newest checkpoints kept; older ones are removed."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of steps that are multiples of this stay for good; 0 keeps none of them."""
    keep_weights: Annotated[int, Field(ge=2)] = 3
    """Newest published weights kept: the current ones, those that an engine may still be loading, and some to spare."""
    keep_samples: Literal["run", "replay"] = "run"
    """Stored samples and requests of trained steps. `run`: all stay, so that `everroll audit` can check every step and
    a run can be trained again from its batches. `replay`: those go that no kept checkpoint needs to be trained on."""
    on_replay_difference: Literal["warn", "fail"] = "warn"
    """When training a stored batch again after a lost trainer gives other weights than the first time, which on the
    same CPU it never does: `warn` in log and metrics and go on, or `fail` the step."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several trainer processes share the work (docs/trainer-operations.md). `ddp`: each holds the whole model and
    computes a share of the samples. `fsdp`: each holds a part of every parameter. One process needs neither."""
    step_timeout_seconds: Seconds = 3600.0
    """Deadline of one training step."""
    heartbeat_timeout_seconds: Seconds = 30.0
    """A trainer that is silent for so long is taken for dead, and its step is tried again. Writing very large weights
    can keep it silent for a while."""

    @model_validator(mode="after")
    def _check_losses(self) -> TrainSection:
        if 0 < self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip = {self.dual_clip:g} must be 0 or above 1 + clip_high = {1 + self.clip_high:g}"
            )
        if self.dual_clip > 0 and self.loss == "cispo":
            raise ValueError('dual_clip does not go with loss = "cispo", whose ratio is bounded for every advantage')
        if self.kl_reference is not None and self.lora.rank > 0:
            raise ValueError("kl_reference does not go with lora.rank > 0: the reference is the model without adapters")
        if self.parallel == "fsdp" and self.lora.rank > 0 and self.kl_coef > 0:
            raise ValueError('kl_coef with lora.rank > 0 needs parallel = "ddp": sharded adapters cannot be put aside')
        return self


class ServicesSection(Spec):
    """[services]: where things run. The defaults are those of the local stack (`everroll up`)."""

    temporal_address: str = "127.0.0.1:7233"
    """Host and port of the Temporal server."""
    temporal_namespace: str = "default"
    """Temporal namespace that holds the run."""
    task_queue: str = DEFAULT_TASK_QUEUE
    """Task queue of the workflows; episodes use `<task_queue>-rollout`, the trainer `<task_queue>-train`."""
    session_url: str = "http://127.0.0.1:8810"
    """Base URL of the session server."""
    engine_urls: list[str] = Field(default_factory=lambda: ["http://127.0.0.1:8820"], min_length=1)
    """Base URLs of the engines that new weights are published to."""
    engine_kind: EngineKind = "auto"
    """What the engines are: `sglang`, `vllm`, or `auto` to ask each."""
    store_url: str = ".everroll/store"
    """Where sample blobs live: a directory."""
    publish_timeout_seconds: Seconds = 600.0
    """Deadline for bringing all engines to a new weight version."""
    engine_poll_seconds: Seconds = 2.0
    """Time between two looks at each engine's weight version: one that was started anew is given the run's weights."""


class RunSpec(Spec):
    """A whole run file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    rollout: RolloutSection
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    services: ServicesSection = Field(default_factory=ServicesSection)

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunSpec:
        if self.run.mode == "train" and self.eval.every:
            raise ValueError(
                'eval.every does not go with run.mode = "train": no engine serves the weights; use everroll eval'
            )
        return self

    @model_validator(mode="after")
    def _check_minibatches(self) -> RunSpec:
        if self.rollout.groups_per_step % self.train.num_minibatches:
            raise ValueError(
                f"train.num_minibatches = {self.train.num_minibatches} must divide "
                f"rollout.groups_per_step = {self.rollout.groups_per_step}"
            )
        return self
