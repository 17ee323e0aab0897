"""Comparison of a tokenizer's chat templates with the original's, on sample conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexq_bench.accuracy.artefacts.differences import Difference, changed, shown
from flexq_bench.errors import library_reason

_WORDS = 'Zwei Boxkämpfer jagen Eva quer durch Sylt; 2 > 1 & "so on".\n\tA tab, a line, 中文 👍. '
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "its name"}},
                "required": ["town"],
            },
        },
    }
]
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"town": "Köln"}},
        }
    ],
}
_PROMPT = {"add_generation_prompt": True}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "7 °C"}


def chat_differences(ours: Any, theirs: Any) -> Iterator[Difference]:
    """The differences between what the chat templates of two tokenizers render."""
    own, other = _templates(ours), _templates(theirs)
    for name in sorted(own.keys() | other.keys()):
        key = "chat_template" if name == "default" else f"chat_template.{name}"
        if name not in own or name not in other:
            absent = name not in own
            yield changed(key, None if absent else own[name], other[name] if absent else None)
            continue
        for label, messages, tools, options in _conversations():
            rendered = [
                _rendered(tokenizer, template, messages, tools, options)
                for tokenizer, template in ((ours, own[name]), (theirs, other[name]))
            ]
            if rendered[0] != rendered[1]:
                pairs = enumerate(zip(*rendered, strict=False))
                shorter = min(map(len, rendered))
                place = next((i for i, (one, other) in pairs if one != other), shorter)
                start = max(0, place - 20)
                parts = [shown(text[start : start + 60]) for text in rendered]
                detail = f"{label}: {parts[0]}, the original's: {parts[1]}"
                yield Difference(key, detail)
                break


def conversation_texts(tokenizer: Any) -> list[str]:
    """The sample conversations as a tokenizer's own templates render them."""
    return [
        _rendered(tokenizer, template, messages, tools, options)
        for template in _templates(tokenizer).values()
        for _, messages, tools, options in _conversations()
    ]


def _templates(tokenizer: Any) -> dict[str, str]:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return {}
    return dict(template) if isinstance(template, dict) else {"default": template}


def _conversations() -> Iterator[tuple[str, list[dict[str, Any]], Any, dict[str, bool]]]:
    """Label, messages, tools, and options of the template."""
    system = {"role": "system", "content": "You are terse. " + _WORDS}
    for turns in (1, 2, 5):
        for length in (1, 40):
            messages = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"Question {turn}. " + _WORDS * length})
                messages.append({"role": "assistant", "content": f"Answer {turn}! {_WORDS}"})
            size = f"{turns} turns, {length} sentences"
            yield f"a prompt after {size}", messages[:-1], None, _PROMPT
            yield f"a conversation of {size}", messages, None, {}
            yield f"a prompt with system after {size}", [system, *messages[:-1]], None, _PROMPT
    for content in ("", "  spaces around \n", "Hi", "one two three"):
        yield "a short prompt", [{"role": "user", "content": content}], None, _PROMPT
    user = {"role": "user", "content": "How is the weather in Köln?"}
    yield "tools", [system, user], _TOOLS, _PROMPT
    yield "a call of a tool", [user, _CALL], _TOOLS, {}
    yield "the result of a tool", [user, _CALL, _RESULT], _TOOLS, _PROMPT
    answer = {"role": "assistant", "content": "Cold.", "reasoning_content": "It is winter."}
    yield "reasoning", [user, answer, user], None, _PROMPT
    yield "a prompt without reasoning", [user], None, _PROMPT | {"enable_thinking": False}
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    yield "content in parts", [{"role": "user", "content": parts}], None, _PROMPT
    yield "turns out of order", [answer, user, user, system, user], None, _PROMPT


def _rendered(
    tokenizer: Any,
    template: str,
    messages: list[dict[str, Any]],
    tools: Any,
    options: dict[str, bool],
) -> str:
    """Return the rendered text, or the reason why it can't be rendered."""
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            **options,
        )
    except Exception as error:  # of any class: templates raise their own
        return f"error: {library_reason(error)}"
    return text
