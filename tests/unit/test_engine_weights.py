"""A checkpoint is served whole or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from everroll.engines.embedded.weights import TargetTensors, WeightsRefusedError, apply_weights, load_weights
from tests.engine_helpers import change_checkpoint, make_checkpoint

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("weights") / "first", seed=1)


@pytest.fixture
def model(checkpoint: Path) -> torch.nn.Module:
    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return module


def test_tied_weights_arrive_everywhere(model: torch.nn.Module, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=2)
    target = TargetTensors.of(model)
    apply_weights(target, load_weights(target, str(other)))
    expected = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    assert "lm_head.weight" in expected
    assert "lm_head.weight" not in load_file(other / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_shards_are_found_through_their_index(model: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    weight_map = {}
    for number, name in enumerate(sorted(tensors)):
        file = f"model-0000{number % 2 + 1}-of-00002.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file({name: tensors[name] * 2 for name, where in weight_map.items() if where == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = TargetTensors.of(model)
    apply_weights(target, load_weights(target, str(tmp_path)))
    assert torch.equal(model.state_dict()[NORM], tensors[NORM] * 2)


def test_another_float_type_is_converted(model: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    half = {NORM: load_file(checkpoint / "model.safetensors")[NORM].to(torch.bfloat16)}
    loaded = load_weights(TargetTensors.of(model), str(change_checkpoint(checkpoint, tmp_path / "half", half)))
    assert loaded.tensors[NORM].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({NORM: torch.ones(31)}, r"model\.norm\.weight has shape \[31\], the model has \[32\]"),
        ({NORM: torch.full((32,), float("nan"))}, "not finite"),
        ({NORM: torch.full((32,), float("inf"))}, "not finite"),
        ({NORM: torch.full((32,), 1e300, dtype=torch.float64)}, "not finite in torch.float32"),
        ({NORM: torch.ones(32, dtype=torch.int64)}, "dtype"),
        ({"model.extra.weight": torch.ones(3)}, r"unknown to this model: model\.extra\.weight"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(
    model: torch.nn.Module, checkpoint: Path, tmp_path: Path, changes: dict[str, torch.Tensor], reason: str
) -> None:
    bad = change_checkpoint(checkpoint, tmp_path / "bad", changes)
    with pytest.raises(WeightsRefusedError, match=reason):
        load_weights(TargetTensors.of(model), str(bad))


def test_a_missing_tensor_is_refused_by_name(model: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsRefusedError, match=r"missing: model\.norm\.weight"):
        load_weights(TargetTensors.of(model), str(tmp_path))


def test_directories_without_a_readable_checkpoint(model: torch.nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    target = TargetTensors.of(model)
    with pytest.raises(WeightsRefusedError, match="no such directory"):
        load_weights(target, str(tmp_path / "nowhere"))
    with pytest.raises(WeightsRefusedError, match="no safetensors file"):
        load_weights(target, str(tmp_path))
    body = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(body[: len(body) // 2])
    with pytest.raises(WeightsRefusedError, match="cannot be read"):
        load_weights(target, str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsRefusedError, match="not a safetensors index"):
        load_weights(target, str(tmp_path))
