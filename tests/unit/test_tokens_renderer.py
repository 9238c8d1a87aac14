"""Loading a renderer for a checkpoint directory, and what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everroll.contracts.spec import ModelSection
from everroll.failures import ConfigurationError
from everroll.tokens.renderer import ChatRenderer, load_renderer
from tests.session_helpers import TOOL_CALL_TEXT, TOOLS, build_tokenizer, model_section, write_model_dir

USER = {"role": "user", "content": "1 + 2?"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model_dir(tmp_path / "model")


@pytest.fixture
def renderer(directory: Path) -> ChatRenderer:
    return load_renderer(model_section(directory))


def test_renders_parses_and_extends_without_touching_recorded_tokens(renderer: ChatRenderer) -> None:
    prompt = renderer.render([USER], TOOLS)
    assert renderer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    completion = build_tokenizer().encode(TOOL_CALL_TEXT + "<|im_end|>").ids
    reply = renderer.parse(completion, prompt, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("add", {"a": 1, "b": 2})]
    extended = renderer.extend(prompt, completion, [], [{"role": "tool", "content": "3"}], TOOLS)
    assert extended is not None
    assert extended[: len(prompt) + len(completion)] == prompt + completion
    assert "<tool_response>\n3\n</tool_response>" in renderer.decode(extended)


def test_a_malformed_tool_call_reaches_the_agent_as_text(renderer: ChatRenderer) -> None:
    text = "<tool_call>\n{broken\n</tool_call>"
    reply = renderer.parse(build_tokenizer().encode(text + "<|im_end|>").ids, renderer.render([USER], TOOLS), TOOLS)
    assert reply.tool_calls == ()
    assert reply.content == text


def test_tokenizer_agrees_with_transformers(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    slow = transformers.AutoTokenizer.from_pretrained(str(directory))
    fast = load_renderer(model_section(directory))._tokenizer
    text = "<|im_start|>user\nnaïve café ☕\n\n  <think></think><|im_end|>"
    assert fast.encode(text, add_special_tokens=False) == slow.encode(text, add_special_tokens=False)
    ids = fast.encode(text)
    assert fast.decode(ids) == slow.decode(ids) == text
    assert fast.eos_token_id == slow.eos_token_id
    assert fast.convert_tokens_to_ids("<|im_end|>") == slow.convert_tokens_to_ids("<|im_end|>")


def test_loading_pulls_no_torch(directory: Path) -> None:
    code = (
        "import sys; from everroll.contracts.spec import ModelSection; from everroll.tokens.renderer import *; "
        f"load_renderer(ModelSection(path={str(directory)!r}, renderer='qwen3')); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_auto_knows_a_hub_name_where_tools_leave_it(tmp_path: Path) -> None:
    cache = write_model_dir(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc")
    assert load_renderer(ModelSection(path=str(cache))).name == "qwen3"
    clone = write_model_dir(tmp_path / "Qwen" / "Qwen3-0.6B")
    assert load_renderer(ModelSection(path=str(clone))).name == "qwen3"
    renamed = write_model_dir(tmp_path / "mine")
    (renamed / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3-4B"}))
    assert load_renderer(ModelSection(path=str(renamed))).name == "qwen3"


def test_auto_says_what_to_set_when_it_cannot_tell(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Set model\.renderer to one of: .*qwen3"):
        load_renderer(ModelSection(path=str(directory)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"renderer": "qwen33"}, "qwen33"),
        ({"renderer": "glm-5"}, "does not fit the tokenizer"),
        ({"renderer": "qwen3", "chat_template": {"enable_thinkin": True}}, "enable_thinkin"),
        ({"renderer": "qwen3", "path": "/no/such/dir"}, "no directory"),
    ],
)
def test_what_cannot_work_is_a_configuration_error(directory: Path, fields: dict, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_renderer(ModelSection(**{"path": str(directory), **fields}))


def test_unreadable_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        load_renderer(ModelSection(path=str(directory), renderer="qwen3"))


def test_earlier_reasoning_is_kept_unless_rerendering_was_chosen(directory: Path) -> None:
    """CASES D4: Qwen3's template drops reasoning before a new user message."""
    completion = build_tokenizer().encode("<think>\nhm\n</think>\n\n3<|im_end|>").ids
    new = [{"role": "user", "content": "and 2 + 2?"}]
    keeping = load_renderer(ModelSection(path=str(directory), renderer="qwen3"))
    prompt = keeping.render([USER], None)
    extended = keeping.extend(prompt, completion, [], new, None)
    assert extended is not None
    assert extended[: len(prompt) + len(completion)] == prompt + completion
    following = load_renderer(ModelSection(path=str(directory), renderer="qwen3", history="rerender"))
    assert following.extend(prompt, completion, [], new, None) is None


CHATML = r"""{%- macro body(m) -%}
{%- if m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endmacro -%}
{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
<|im_start|>system
{{ first + '\n\n' if first }}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools -%}
{{ '\n' ~ (tool | tojson) }}
{%- endfor -%}
{{ '\n' }}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif first -%}
<|im_start|>system
{{ first }}<|im_end|>
{% endif -%}
{%- for m in messages if m.role != 'system' -%}
{{ body(m) }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REWRITING = (
    PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '...' }}") + OPENED
)
UNCLOSED = PLAIN.replace("<|im_end|>", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}") + OPENED


def with_template(directory: Path, template: str) -> Path:
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_auto_finds_the_renderer_that_agrees_with_the_template(directory: Path) -> None:
    assert load_renderer(ModelSection(path=str(with_template(directory, CHATML)))).name == "qwen3"


def test_auto_trusts_no_template_that_prints_something_else(directory: Path) -> None:
    with_template(directory, CHATML.replace("# Tools", "# Functions"))
    with pytest.raises(ConfigurationError, match="cannot be told"):
        load_renderer(ModelSection(path=str(directory)))


def test_a_template_of_its_own_extends_recorded_tokens(directory: Path) -> None:
    renderer = load_renderer(ModelSection(path=str(with_template(directory, PLAIN + OPENED)), renderer="default"))
    prompt = renderer.render([USER], None)
    odd = [1, 2, 3]  # not what the template would give for any text
    end = renderer.stop_token_ids[0]
    history = [USER, {"role": "assistant", "content": "abc"}]
    extended = renderer.extend(prompt, [*odd, end], history, [{"role": "user", "content": "c"}], None)
    assert extended is not None
    assert extended[: len(prompt) + 4] == [*prompt, *odd, end]
    assert renderer.decode(extended[len(prompt) + 4 :]) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [REWRITING, UNCLOSED])
def test_d4_a_template_that_rewrites_earlier_turns_is_refused(directory: Path, template: str) -> None:
    section = ModelSection(path=str(with_template(directory, template)), renderer="default")
    with pytest.raises(ConfigurationError, match=r'rewrites earlier turns.*history = "rerender"'):
        load_renderer(section)
    load_renderer(section.model_copy(update={"history": "rerender"}))
