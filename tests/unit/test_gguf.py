"""A tiny GGUF file becomes a checkpoint directory that holds the same tensors and tokenizes the same."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from everroll.contracts.spec import ModelSection
from everroll.gguf import GgufError, name_unpacked, unpack_gguf
from everroll.runfile import RunFileError, spec_from_mapping
from everroll.tokens.renderer import load_renderer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] + ' ' + m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
HIDDEN, HEADS, INNER = 16, 2, 32
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer with float32 tensors, and a byte-level vocabulary with one merge."""
    rng = np.random.default_rng(0)
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,), "output": (len(tokens), HIDDEN),
        "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN), "blk.0.attn_v": (HIDDEN, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_run_file_takes_a_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    data = {
        "run": {"name": "r", "num_steps": 1},
        "model": {"path": "tiny.gguf", "renderer": "default"},
        "data": {"path": "prompts.jsonl"},
        "rollout": {"agent": {"function": "a:b"}},
    }
    spec = spec_from_mapping(data, tmp_path)
    directory = Path(spec.model.path)
    assert directory.parent == tmp_path / ".everroll/gguf"
    unpacked = load_file(directory / "model.safetensors")
    assert np.array_equal(unpacked["model.embed_tokens.weight"], tensors["token_embd"])
    assert np.array_equal(unpacked["model.layers.0.mlp.up_proj.weight"], tensors["blk.0.ffn_up"])
    config = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in config
    renderer = load_renderer(ModelSection(path=str(directory), renderer="default"))
    prompt = renderer.render([{"role": "user", "content": "hey"}], None)
    assert renderer.decode(prompt) == "<s>user hey</s><s>assistant "
    assert renderer.stop_token_ids == (2,)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert spec_from_mapping(data, tmp_path).model.path == str(directory)  # found, not unpacked again
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(RunFileError, match=r"model\.path: no file .*other\.gguf"):
        spec_from_mapping(data | {"model": {"path": "other.gguf"}}, tmp_path)


def test_a_file_that_is_none_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"no")
    with pytest.raises(GgufError, match=r"bad\.gguf cannot be unpacked"):
        unpack_gguf(path, name_unpacked(path, tmp_path / "out"))
    assert [entry.name for entry in (tmp_path / "out").iterdir() if entry.is_dir()] == []
    with pytest.raises(GgufError, match=r"gone\.gguf cannot be read"):
        name_unpacked(tmp_path / "gone.gguf", tmp_path)
