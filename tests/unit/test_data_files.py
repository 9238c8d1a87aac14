"""Files of a data set: formats, order, fingerprint, faults, and what changes under a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from everroll.contracts.rollout import DatasetRef
from everroll.failures import ConfigurationError
from everroll.prompts import Dataset, DatasetCache, load_dataset

ROWS: list[dict[str, Any]] = [
    {"text": f"question {number}", "label": {"answer": number}, "metadata": {"level": number % 3, "tags": ["a", "b"]}}
    for number in range(50)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], group_rows: int = 8) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group_rows)
    return path


def read_all(dataset: Dataset) -> list[tuple[Any, ...]]:
    return [(prompt.index, prompt.messages, prompt.label, prompt.metadata) for prompt in dataset.prompts]


def test_one_fingerprint_however_the_prompts_are_laid_out(tmp_path: Path) -> None:
    plain = load_dataset(write_jsonl(tmp_path / "plain.jsonl", ROWS))
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text("\n".join(json.dumps(dict(reversed(row.items())), indent=None) + " \n\n" for row in ROWS))
    as_messages = [
        {**row, "text": None, "messages": [{"role": "user", "content": row["text"], "name": None}]} for row in ROWS
    ]
    halves = [
        str(write_jsonl(tmp_path / "first.jsonl", ROWS[:20])),
        str(write_parquet(tmp_path / "second.parquet", ROWS[20:])),
    ]
    others = [
        load_dataset(spaced),
        load_dataset(write_jsonl(tmp_path / "messages.jsonl", as_messages)),
        load_dataset(write_parquet(tmp_path / "whole.parquet", ROWS)),
        load_dataset(halves),
    ]
    assert {dataset.fingerprint for dataset in others} == {plain.fingerprint}
    for dataset in (others[0], others[2], others[3]):
        assert read_all(dataset) == read_all(plain)
    assert load_dataset(list(reversed(halves))).fingerprint != plain.fingerprint


def test_parquet_takes_messages_and_metadata_as_text(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "metadata": '{"a": 1}',
        },
        {"messages": [{"role": "user", "content": "ho"}], "metadata": None},
    ]
    dataset = load_dataset(write_parquet(tmp_path / "chat.parquet", rows))
    assert dataset.prompts[0].messages[1] == {"role": "user", "content": "hi"}
    assert [prompt.metadata for prompt in dataset.prompts] == [{"a": 1}, {}]


def test_globs_are_sorted_and_files_keep_the_order_of_the_run_file(tmp_path: Path) -> None:
    for name in ("b-10", "b-02", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    dataset = load_dataset([str(tmp_path / "b-*.jsonl"), str(tmp_path / "a.jsonl")])
    assert [prompt.messages[0]["content"] for prompt in dataset.prompts] == ["b-02", "b-10", "a"]


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["none-*.jsonl"], "none-.*matches no file"),
        (["a.jsonl", "*.jsonl"], r"a\.jsonl twice"),
        (["."], "is a directory; name its files"),
        (["a.jsonl.gz"], "is compressed"),
        (["gone.jsonl"], "gone.jsonl cannot be read"),
        (["broken.parquet"], "broken.parquet is not Parquet"),
    ],
)
def test_paths_that_cannot_be_used(tmp_path: Path, paths: list[str], text: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "broken.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigurationError, match=text):
        load_dataset([str(tmp_path / path) for path in paths])


def test_faults_name_file_and_line_ten_at_most(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ROWS[:2])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "fine"}] + [{"text": 5}] * 12)
    with pytest.raises(ConfigurationError) as caught:
        load_dataset([str(good), str(bad)])
    lines = str(caught.value).splitlines()
    assert "12 rows are no prompts" in lines[0]
    assert lines[1] == f"  {bad} line 2: `text` must be a string"
    assert lines[-1] == "  ... and 2 more"
    assert len(lines) == 12


def test_parquet_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown columns \['question'\]"):
        load_dataset(write_parquet(tmp_path / "unknown.parquet", [{"question": "?"}]))
    with pytest.raises(ConfigurationError, match=r"nan\.parquet row 2: holds a value that JSON cannot express"):
        load_dataset(
            write_parquet(tmp_path / "nan.parquet", [{"text": "a", "label": 1.0}, {"text": "b", "label": float("nan")}])
        )


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS[:1])
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from everroll.prompts import load_dataset\n"
        f"load_dataset({str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "Parquet needs the package pyarrow" in done.stderr
    assert "pip install 'everroll[parquet]'" in done.stderr


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
async def test_a_file_that_changes_under_a_worker_is_refused(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / ("data.parquet" if write is write_parquet else "data.jsonl"), ROWS)
    before = load_dataset(path).fingerprint
    reference = DatasetRef(path=str(path), fingerprint=before, num_prompts=len(ROWS), seed=0, shuffle=False)
    cache = DatasetCache()
    assert (await cache.find_prompt(reference, 3)).label == {"answer": 3}
    os.utime(path, (1, 1))  # touched, not changed
    assert (await cache.find_prompt(reference, 4)).label == {"answer": 4}
    write(path, [*ROWS[:-1], {**ROWS[-1], "label": {"answer": -1}}])
    after = load_dataset(path).fingerprint
    with pytest.raises(ConfigurationError) as caught:
        await cache.find_prompt(reference, 5)
    assert before in str(caught.value)
    assert after in str(caught.value)


async def test_the_prompt_of_a_group_is_that_of_the_order_or_the_one_that_was_chosen(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    reference = DatasetRef(
        path=[str(path)], fingerprint=load_dataset(path).fingerprint, num_prompts=len(ROWS), seed=0, shuffle=False
    )
    assert (await DatasetCache().find_prompt(reference, len(ROWS) + 7)).index == 7
    assert (await DatasetCache().find_prompt(reference, 7, index=40)).index == 40


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Five thousand rows of 2 kB are opened, and read here and there, in far less memory than their 10 MB."""
    path = tmp_path / "large.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps({"text": f"{number} " + "x" * 2000}) + "\n" for number in range(5_000))
    program = (
        "import tracemalloc\nfrom everroll.prompts import load_dataset\ntracemalloc.start()\n"
        f"dataset = load_dataset({str(path)!r})\n"
        "assert [dataset[i].messages[0]['content'].split()[0] for i in (0, 3777, 4999)] == '0 3777 4999'.split()\n"
        "print(tracemalloc.get_traced_memory()[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 1_000_000
