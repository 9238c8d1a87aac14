from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from everroll.contracts.rollout import DatasetRef
from everroll.failures import ConfigurationError
from everroll.prompts import DatasetCache, compute_prompt_index, load_dataset


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 5, 8, 100, 1000])
def test_every_epoch_is_a_permutation(num_prompts: int) -> None:
    for epoch in range(3):
        groups = range(epoch * num_prompts, (epoch + 1) * num_prompts)
        order = [compute_prompt_index(group, num_prompts, seed=7, shuffle=True) for group in groups]
        assert sorted(order) == list(range(num_prompts))


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [compute_prompt_index(epoch * 50 + n, 50, seed, shuffle=True) for n in range(50)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1)
    # Pinned: a change of the order would make a running job repeat and skip prompts.
    digest = hashlib.sha256(str(order(1, 0)).encode()).hexdigest()
    assert digest == "bd4e24cf66e53723ee44c105efd12a61a96f577db358936959cad8b8e12e0edf"


def test_without_shuffle_the_file_order_is_kept() -> None:
    assert [compute_prompt_index(group, 3, 0, shuffle=False) for group in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "hello", "label": 3}\n\n{"messages": [{"role": "user", "content": "x"}]}\n')
    dataset = load_dataset(path)
    assert [prompt.messages for prompt in dataset.prompts] == [
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": "x"}],
    ]
    assert dataset.prompts[0].label == 3
    assert [prompt.index for prompt in dataset.prompts] == [0, 1]
    # Pinned: a change of the fingerprint would make open runs refuse their data.
    assert dataset.fingerprint == "311481741a9954a2e0f624e2e1b4ea2221cf4b5fba5ba9a5035215573f568d6f"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "holds no prompts"),
        ('{"text": "a"}\nnonsense\n', "line 2: not JSON"),
        ('{"text": "a", "messages": []}\n', "line 1: give exactly one of"),
        ('{"label": 1}\n', "line 1: give exactly one of"),
        ('{"text": "a", "answer": 1}\n', r"line 1: unknown keys \['answer'\]"),
        ('{"messages": [{"content": "x"}]}\n', "line 1: each message"),
    ],
)
def test_bad_data_names_the_line(tmp_path: Path, body: str, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(body)
    with pytest.raises(ConfigurationError, match=text):
        load_dataset(path)


def test_a_changed_data_set_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n')
    before = load_dataset(path).fingerprint
    path.write_text('{"text": "b"}\n')
    after = load_dataset(path).fingerprint
    reference = DatasetRef(path=str(path), fingerprint=before, num_prompts=1, seed=0, shuffle=True)
    with pytest.raises(ConfigurationError) as caught:
        DatasetCache().get(reference)
    assert before in str(caught.value)
    assert after in str(caught.value)
