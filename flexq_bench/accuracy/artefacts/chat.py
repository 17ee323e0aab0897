"""Comparison of a tokenizer's chat templates with the original's, on sample conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from flexq_bench.accuracy.artefacts.differences import Difference, changed, shown
from flexq_bench.errors import library_reason

# Label, messages, tools, and options of the template.
Conversation = tuple[str, list[dict[str, Any]], Any, dict[str, Any]]
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
_ANSWER = {"role": "assistant", "content": "Cold."}
_MARKUP = (
    "```python\nx = {'a': [1]}\n```\n<think>so</think> <|im_end|></s>[INST] <tool_call> "
    "{{ x }} {% y %} # 1. *a* $b$ ~/.c?d=e@f;g! äöüßéèñçøåÅ “” – … 1234567890"
)
_PROMPT: dict[str, Any] = {"add_generation_prompt": True}
_WORD = re.compile(r"[a-z_]{2,24}")  # a role, type, field or value in a template
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
        asked = [*_conversations(), *_asked_for({own[name], other[name]})]
        for label, messages, tools, options in asked:
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


def _asked_for(templates: set[str]) -> Iterator[Conversation]:
    """Conversations with what any of the templates asks for, if they differ.

    That is options that are true or have one of its words, roles and types of content that are
    such words, and fields of a message.
    """
    from jinja2 import Environment, TemplateError, meta, nodes

    options, words, fields = set[str](), set[str](), set[str]()
    for template in templates if len(templates) > 1 else ():
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except TemplateError:
            continue  # it has tags of transformers
        options |= meta.find_undeclared_variables(parsed) - {"messages", "tools", *_PROMPT}
        texts = [c.value for c in parsed.find_all(nodes.Const) if isinstance(c.value, str)]
        words |= {text for text in texts if _WORD.fullmatch(text)}
        fields |= {node.attr for node in parsed.find_all(nodes.Getattr)} | words
    user = {"role": "user", "content": "How is the weather in Köln?"}
    for word in sorted(words):
        yield f"role {word}", [user, user | {"role": word}, user], None, _PROMPT
        part = {"type": word, word: "x", "text": "Hi"}
        yield f"content of type {word}", [user | {"content": [part]}], None, _PROMPT
    for field in sorted(fields - {"role", "content"}):
        yield f"field {field}", [user, user | {field: "x"}, _ANSWER | {field: "x"}], None, _PROMPT
    for option in sorted(options):
        for value in (True, [{"title": "A", "text": "B"}], *sorted(words)):
            yield f"{option}={value}", [user, _ANSWER, user], None, _PROMPT | {option: value}


def _conversations() -> Iterator[Conversation]:
    """Conversations for any template."""
    system = {"role": "system", "content": "You are terse. " + _WORDS}
    for turns, lengths in ((1, (1, 40)), (2, (1, 40)), (5, (1, 40)), (40, (1,))):
        for length in lengths:
            messages = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"Question {turn}. " + _WORDS * length})
                messages.append({"role": "assistant", "content": f"Answer {turn}! {_WORDS}"})
            size = f"{turns} turns, {length} sentences"
            yield f"a prompt after {size}", messages[:-1], None, _PROMPT
            yield f"a conversation of {size}", messages, None, {}
            yield f"a prompt with system after {size}", [system, *messages[:-1]], None, _PROMPT
    for content in ("", "  spaces around \n", "Hi", "one two three", _MARKUP):
        yield "a short prompt", [{"role": "user", "content": content}], None, _PROMPT
    user = {"role": "user", "content": "How is the weather in Köln?"}
    yield "tools", [system, user], _TOOLS, _PROMPT
    yield "a call of a tool", [user, _CALL], _TOOLS, {}
    yield "the result of a tool", [user, _CALL, _RESULT], _TOOLS, _PROMPT
    answer = _ANSWER | {"reasoning_content": "It is winter."}
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
    options: dict[str, Any],
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
