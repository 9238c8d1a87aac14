"""Messages to token ids and back, for one checkpoint.

A thin face over the `renderers` package: it renders a first prompt, extends recorded token ids by new messages without
rendering again what was sampled (the bridge), and parses completions into text, reasoning and tool calls.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everroll.contracts.spec import ModelSection
from everroll.failures import ConfigurationError
from everroll.tokens.autodetect import detect_renderer_name
from everroll.tokens.fingerprint import compute_tokenizer_fingerprint
from everroll.tokens.package import renderers
from everroll.tokens.registry import build_package_renderer
from everroll.tokens.tokenizer import load_fast_tokenizer, load_json_object

Message = dict[str, Any]
"""A chat message in OpenAI's form: role, content as one string, and where they apply tool_calls, tool_call_id, name."""
Tool = dict[str, Any]
"""A tool in OpenAI's form, `{"type": "function", "function": {...}}`."""

_PROBE_PROMPT: list[Message] = [{"role": "user", "content": "a"}]
_PROBE_REPLY = "b"
_PROBE_HISTORY: list[Message] = [
    *_PROBE_PROMPT,
    {"role": "assistant", "content": _PROBE_REPLY, "reasoning_content": "d"},
]
_PROBE_NEXT: list[Message] = [{"role": "user", "content": "c"}]


@dataclass(frozen=True)
class ToolCall:
    """One well-formed tool call that the model made."""

    name: str
    arguments: str
    """JSON, as OpenAI's wire carries it."""
    native_id: str | None = None
    """The call's id, for chat formats that carry one in the tokens."""


@dataclass(frozen=True)
class Reply:
    """A completion, parsed."""

    content: str
    """Text outside reasoning and tool calls; a malformed tool call stands here as the model wrote it."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())


class ChatRenderer:
    """Renders, extends and parses conversations of one checkpoint. Pure and safe to share."""

    def __init__(
        self, renderer: Any, tokenizer: Any, name: str, fingerprint: str, more_stop_ids: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        """sha256 over the tokenizer's files."""
        self._renderer = renderer
        self._tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*renderer.get_stop_token_ids(), *more_stop_ids}))
        """Token ids that end a turn."""

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """The prompt for the next assistant turn, rendered from scratch.

        Raises:
            ValueError, TypeError, KeyError: the chat template cannot express these messages.
        """
        ids: list[int] = self._renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
        return ids

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        history: list[Message],
        messages: list[Message],
        tools: list[Tool] | None,
    ) -> list[int] | None:
        """The prompt after `prompt_ids + completion_ids` and `messages`, sampled tokens kept as they are.

        None when this chat format cannot promise that; then only a full render will do.

        Args:
            prompt_ids: prompt of the turn that is continued.
            completion_ids: what was sampled in it.
            history: the conversation up to and including the reply of that turn, for formats that look back.
            messages: what comes after it.
            tools: of the conversation.
        """
        rendered = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, messages, tools=tools or None)
        return None if rendered is None else list(rendered.token_ids)

    def parse(self, completion_ids: list[int], prompt_ids: list[int], tools: list[Tool] | None) -> Reply:
        """Split a completion into text, reasoning and tool calls.

        What no JSON parser takes, a number of thousands of digits or brackets thousands deep, is all text.
        """
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=tools or None, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):
            said = [token for token in completion_ids if token not in self.stop_token_ids]
            return Reply(content=self._tokenizer.decode(said))
        calls, malformed = [], []
        for call in parsed.tool_calls:
            arguments = call.arguments if call.arguments is not None else {}
            text = arguments if isinstance(arguments, str) else _dump(arguments)
            if call.status == renderers.ToolCallParseStatus.OK and call.name and _is_text(call.name + text):
                calls.append(ToolCall(name=call.name, arguments=text, native_id=call.id))
            else:
                malformed.append(
                    self._tokenizer.decode(completion_ids[slice(*call.token_span)]) if call.token_span else call.raw
                )
        content = "\n".join(part for part in (parsed.content, *malformed) if part)
        return Reply(content=content, reasoning=parsed.reasoning_content or None, tool_calls=tuple(calls))

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included; for people, never for training."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def can_extend(self) -> bool:
        """Whether a conversation's recorded tokens survive the next user message: tried on a tiny conversation."""
        prompt = self.render(_PROBE_PROMPT, None)
        reply = self._tokenizer.encode(_PROBE_REPLY, add_special_tokens=False)
        for stop in self.stop_token_ids:
            before = [*prompt, *reply, stop]
            after = self.extend(prompt, [*reply, stop], _PROBE_HISTORY, _PROBE_NEXT, None)
            if after is not None and after[: len(before)] == before:
                return True
        return False


def _dump(arguments: Any) -> str:
    """JSON; escaped where the model wrote half a surrogate pair, which no UTF-8 can hold."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(arguments)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class TemplateRenderer(ChatRenderer):
    """A checkpoint's own Jinja template, of which nothing is known but what it prints.

    It extends a conversation by what the template prints after the last reply, and only if the template prints the
    conversation up to there in the same way with and without the new messages.
    """

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        with _saying_what_the_template_says():
            return super().render(messages, tools)

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        history: list[Message],
        messages: list[Message],
        tools: list[Tool] | None,
    ) -> list[int] | None:
        with _saying_what_the_template_says():
            before = self._renderer.render_ids(history, tools=tools or None)
        after = self.render([*history, *messages], tools)
        end = _find_last(before, self.stop_token_ids)
        if end is None or after[: end + 1] != before[: end + 1] or self.decode(before[end + 1 :]).strip():
            return None
        close = [] if completion_ids[-1] in self.stop_token_ids else [before[end]]
        return [*prompt_ids, *completion_ids, *close, *after[end + 1 :]]


@contextlib.contextmanager
def _saying_what_the_template_says() -> Iterator[None]:
    """Raises ValueError: the template raised, by `raise_exception` for one, as many do for roles that they lack."""
    from jinja2 import TemplateError  # comes with transformers, which only templates need

    try:
        yield
    except TemplateError as error:
        raise ValueError(str(error)) from error


def _find_last(token_ids: list[int], wanted: tuple[int, ...]) -> int | None:
    return next((index for index in range(len(token_ids) - 1, -1, -1) if token_ids[index] in wanted), None)


def load_renderer(model: ModelSection) -> ChatRenderer:
    """Load tokenizer and renderer of a checkpoint directory.

    With `history = "extend"` the renderer is made to keep earlier reasoning where its template would drop it, and one
    that cannot extend a conversation is refused.

    Raises:
        ConfigurationError: nothing readable there, the renderer cannot be told or does not know an argument, or its
            template rewrites earlier turns.
    """
    directory = Path(model.path)
    if not directory.is_dir():
        raise ConfigurationError(f"model.path: {directory} is no directory")
    arguments: dict[str, Any] = dict(model.chat_template)
    name, hub_name = model.renderer, None
    if name == "auto":
        name, hub_name = detect_renderer_name(directory, arguments)
    tokenizer = _load_tokenizer(directory, hub_name or str(directory), name)
    renderer = build_package_renderer(tokenizer, name, arguments)
    if model.history == "extend" and renderer.effective_thinking_retention == "tool_cycle":
        renderer = build_package_renderer(tokenizer, name, {"thinking_retention": "all", **arguments})
    fingerprint = compute_tokenizer_fingerprint(directory)
    if name == "default":
        chat: ChatRenderer = TemplateRenderer(renderer, tokenizer, name, fingerprint, _load_eos_ids(directory))
    else:
        chat = ChatRenderer(renderer, tokenizer, name, fingerprint)
    if not chat.stop_token_ids:
        raise ConfigurationError(f"{directory}: renderer {name!r} knows no token that ends a turn")
    if model.history == "extend" and not _try_to_extend(chat, directory):
        raise ConfigurationError(
            f"{directory}: with renderer {name!r} a new message rewrites earlier turns, so recorded tokens cannot be "
            'extended. Choose another model.renderer, or set model.history = "rerender": then each turn whose '
            "rendering differs from what was recorded starts a new branch, and an episode gives several samples."
        )
    return chat


def _try_to_extend(chat: ChatRenderer, directory: Path) -> bool:
    """Raises ConfigurationError: the template cannot even express the tiny conversation of the trial."""
    try:
        return chat.can_extend()
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{directory}: the chat template cannot express a user's message, a reply and another message: {error}"
        ) from error


def _load_eos_ids(directory: Path) -> list[int]:
    """Ends of a turn as `generation_config.json` names them: one id or several."""
    value = load_json_object(directory / "generation_config.json").get("eos_token_id")
    return [value] if isinstance(value, int) else [item for item in value or () if isinstance(item, int)]


def _load_tokenizer(directory: Path, name_or_path: str, renderer: str) -> Any:
    """The light tokenizer where it is enough; transformers for those that render through the Jinja template."""
    tokenizer = None if renderer in ("default", "custom") else load_fast_tokenizer(directory, name_or_path)
    if tokenizer is not None:
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"{directory}: renderer {renderer!r} needs the package `transformers` to load this tokenizer"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{directory}: no tokenizer can be loaded: {error}") from error
