"""TRL's GRPO loss over our samples: its own trainer, its own code path, the tensors that it would have made.

Used as an oracle by a slow test and as a contestant by `benchmarks.trainer`. TRL is in the extra `slow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from everroll.contracts.spec import TrainSection
from trainer.microbatches import Row


def build_trl_trainer(model: Any, train: TrainSection, folder: Path, temperature: float = 1.0) -> Any:
    """A GRPOTrainer whose loss is the one that `train` names."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="b", eos_token="b"
    )
    names = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
    config = GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_generations=2,
        loss_type="cispo" if train.loss == "cispo" else names[train.normalization],
        importance_sampling_level="sequence" if train.loss == "gspo" else "token",
        use_bias_correction_kl=False,
        epsilon=train.clip_low,
        # TRL's cispo takes the bound itself, and has none below.
        epsilon_high=train.clip_high + (1.0 if train.loss == "cispo" else 0.0),
        delta=train.dual_clip or None,
        max_completion_length=train.normalization_tokens,
        temperature=temperature,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a", "a"]}),  # wanted, and never looked at
        processing_class=tokenizer,
    )
    trainer.use_vllm = True  # only in this mode does the loss take the weights that correct for the engine
    trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = train.kl_coef  # after it was made: it would load a reference model, whose numbers we hand it
    return trainer


def build_trl_inputs(
    rows: Sequence[Row],
    num_items: int,
    old_logprobs: Sequence[Tensor] | None = None,
    reference_logprobs: Sequence[Tensor] | None = None,
    importance: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """Prompts padded on the left, completions on the right, as TRL has them.

    Args:
        rows: samples with their advantages.
        num_items: sampled tokens of the whole update.
        old_logprobs, reference_logprobs, importance: of the sampled tokens, one tensor per row; importance defaults
            to 1, and old log-probabilities to those of the pass itself.
    """
    starts = [int(np.flatnonzero(row.sample.loss_mask)[0]) for row in rows]
    ids = [torch.tensor(row.sample.token_ids, dtype=torch.int64) for row in rows]
    masks = [torch.tensor(row.sample.loss_mask) for row in rows]
    prompts = [tokens[:start] for tokens, start in zip(ids, starts, strict=True)]
    completions = [tokens[start:] for tokens, start in zip(ids, starts, strict=True)]
    sampled = [mask[start:] for mask, start in zip(masks, starts, strict=True)]
    tool_mask = pad_sequence(sampled, batch_first=True)
    inputs = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(x) for x in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(x) for x in completions], batch_first=True),
        "tool_mask": tool_mask.long(),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": torch.tensor(num_items),
        "importance_sampling_ratio": torch.ones(tool_mask.shape),
    }
    for name, values in (
        ("old_per_token_logps", old_logprobs),
        ("ref_per_token_logps", reference_logprobs),
        ("importance_sampling_ratio", importance),
    ):
        if values is not None:
            inputs[name] = _spread(values, tool_mask)
    return inputs


def _spread(values: Sequence[Tensor], mask_BT: Tensor) -> Tensor:
    spread_BT = torch.zeros(mask_BT.shape, dtype=values[0].dtype)
    spread_BT[mask_BT] = torch.cat(list(values))
    return spread_BT
