"""The calculator's model: reproducible, an ordinary checkpoint, and at home in the qwen3 chat format."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from everroll.prompts import load_dataset
from everroll.runfile import load_run_file
from everroll.tokens.renderer import ChatRenderer, load_renderer
from examples.calculator.make import NUM_PROMPTS, build_model, make
from examples.calculator.task import build_demonstration, draw_problems
from examples.calculator.tools import TOOLS, call_tool
from examples.calculator.warmup import Recipe, build_renderer, compute_loss, encode_demonstration

QUICK = Recipe(num_steps=6, num_short_steps=3)
RUN_FILE = Path(__file__).parents[2] / "examples" / "calculator" / "run.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after hardly any warm-up: enough for all that does not ask how well it plays."""
    out = tmp_path_factory.mktemp("calculator")
    make(out, seed=3, recipe=QUICK)
    return out


@pytest.fixture(scope="module")
def renderer(made: Path) -> ChatRenderer:
    """The renderer that the session server makes of the run file."""
    paths = {"model.path": str(made / "model"), "data.path": str(made / "prompts.jsonl")}
    return load_renderer(load_run_file(RUN_FILE, paths).model)


def test_equal_seeds_give_equal_bytes(made: Path, tmp_path: Path) -> None:
    make(tmp_path, seed=3, recipe=QUICK)
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert Path("model/model.safetensors") in files
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    for file in files:
        assert (made / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_another_seed_gives_another_model(made: Path, tmp_path: Path) -> None:
    make(tmp_path, seed=4, recipe=QUICK)
    weights = Path("model/model.safetensors")
    assert (made / weights).read_bytes() != (tmp_path / weights).read_bytes()


def test_checkpoint_loads_like_any_other(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert model.config.model_type == "qwen3"
    assert 100_000 <= model.num_parameters() <= 500_000
    ids = tokenizer("What is 17 plus 5?", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_every_byte_is_encodable_and_digits_stand_alone(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = "".join(map(chr, range(1, 0x250))) + "数字 🙂 12345 <think> <tool_call>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == list("12345")


def test_warm_up_trains_exactly_what_the_model_will_sample(made: Path, renderer: ChatRenderer) -> None:
    """The conversation as the session server builds it, turn by turn, has the tokens and the mask of the warm-up."""
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    problem = draw_problems(Random(0), 1)[0]
    messages = build_demonstration(problem, problem.tool)
    opening = tokenizer.encode("<think>\n\n</think>\n\n")
    token_ids, is_sampled = encode_demonstration(build_renderer(tokenizer), opening, messages)
    bounds = [index for index in range(1, len(is_sampled)) if is_sampled[index] != is_sampled[index - 1]]
    begin_call, end_call, begin_reply, end_reply = bounds

    prompt = renderer.render(messages[:1], TOOLS)
    assert prompt == token_ids[:begin_call]
    call = token_ids[begin_call:end_call]
    assert call[-1] in renderer.stop_token_ids
    parsed = renderer.parse(call, prompt, TOOLS)
    function = messages[1]["tool_calls"][0]["function"]
    assert [(found.name, found.arguments) for found in parsed.tool_calls] == [(function["name"], function["arguments"])]
    assert parsed.content == ""

    longer = renderer.extend(prompt, call, messages[:2], messages[2:3], TOOLS)
    assert longer == token_ids[:begin_reply]
    reply = token_ids[begin_reply:end_reply]
    assert reply[-1] in renderer.stop_token_ids
    assert renderer.parse(reply, longer, TOOLS).content == messages[3]["content"]
    assert len(token_ids) <= 120, "the conversation should be short"


def test_warm_up_lowers_the_loss(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    opening = tokenizer.encode("<think>\n\n</think>\n\n")
    problem = draw_problems(Random(0), 1)[0]
    encoded = encode_demonstration(build_renderer(tokenizer), opening, build_demonstration(problem, problem.tool))
    with torch.no_grad():
        trained = compute_loss(model, [encoded])
        untrained = compute_loss(build_model(tokenizer, seed=3), [encoded])
    assert trained < 0.8 * untrained


def test_prompts_are_a_data_set(made: Path) -> None:
    prompts = load_dataset(made / "prompts.jsonl").prompts
    assert len(prompts) == NUM_PROMPTS
    for prompt in prompts:
        answer = call_tool(prompt.label["tool"], json.dumps(prompt.metadata))
        assert answer == str(prompt.label["answer"])
        assert prompt.messages[0]["role"] == "user"
