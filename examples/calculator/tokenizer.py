"""A small byte-level BPE tokenizer with Qwen3's special tokens, trained on the spot."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own that, as in Qwen3, decoding does not skip."""
_ADDED = SPECIAL_TOKENS + MARKUP_TOKENS
_SPLIT_AT_ADDED = re.compile("|".join(re.escape(token) for token in _ADDED))
_MAX_TOKEN_LENGTH = 96


def train_tokenizer(texts: Iterable[str], vocab_size: int = 0) -> PreTrainedTokenizerFast:
    """Learn up to `vocab_size` tokens from `texts`. Every byte stays encodable, so the least is 265 tokens.

    Digits and line breaks stand alone. Otherwise a token may span words, unlike in large models: that makes a
    conversation of this task several times shorter.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(0, vocab_size - len(_ADDED)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_MAX_TOKEN_LENGTH,
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _SPLIT_AT_ADDED.split(text)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
