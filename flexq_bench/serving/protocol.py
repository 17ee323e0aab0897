"""Requests and answers of OpenAI's API for completions and chat, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flexq_bench.serving.generation import Chosen, End, Sampling
from flexq_bench.serving.text import Vocabulary

MAX_TOP_LOGPROBS = 20
_MAX_CHOICES = 128
_COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API
_MIN_TEMPERATURE = (
    1e-3  # below, quotients of logits overflow; the likeliest token is all that is left
)
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
# Parameters that do not change an answer, or not with these values.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class RequestError(Exception):
    """A request that is refused, with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        error = {"message": message, "type": kind, "param": parameter, "code": code}
        self.body = {"error": error}


class StreamOptions(BaseModel):
    """include_usage: the last event has the numbers of tokens."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Parameters of both completions and chat. null is the same as a parameter that is left out."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31)
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    def check_supported(self) -> None:
        """Raise RequestError for a parameter that would change the answer and is not known."""
        for name, value in (self.model_extra or {}).items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                known = f"{name}={value!r}" if name in _NEUTRAL else name
                raise RequestError(
                    400, f"{known:.120} is not supported: leave it out", parameter=name
                )

    @property
    def stops(self) -> tuple[str, ...]:
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(string for string in strings if string)

    @property
    def reported(self) -> int | None:
        """Number of alternatives with each token's log-probability; None: neither."""
        raise NotImplementedError

    @property
    def repeats_prompt(self) -> bool:
        """True if an answer begins with its prompt."""
        return False

    def prompts(self, vocabulary: Vocabulary) -> list[list[int]]:
        """Tokens of the prompts, each of which gets `n` answers."""
        raise NotImplementedError

    def new_tokens(self, free: int) -> int:
        """Most tokens of an answer, where `free` fit."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        temperature = 0.0 if self.temperature < _MIN_TEMPERATURE else self.temperature
        return Sampling(temperature, self.top_p, max(0, self.top_k), self.seed, self.reported)


class CompletionRequest(GenerationRequest):
    """A request of /v1/completions. logprobs: number of alternatives. echo: repeat the prompt."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

    @property
    def reported(self) -> int | None:
        return self.logprobs

    @property
    def repeats_prompt(self) -> bool:
        return self.echo

    def prompts(self, vocabulary: Vocabulary) -> list[list[int]]:
        if isinstance(self.prompt, str):
            return [vocabulary.tokens(self.prompt)]
        rows: Sequence[Any] = self.prompt
        if rows and isinstance(rows[0], int):
            rows = [rows]
        return [vocabulary.tokens(row) if isinstance(row, str) else list(row) for row in rows]

    def new_tokens(self, free: int) -> int:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatRequest(GenerationRequest):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def reported(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def prompts(self, vocabulary: Vocabulary) -> list[list[int]]:
        return [vocabulary.tokens_of_chat([_plain(message) for message in self.messages])]

    def new_tokens(self, free: int) -> int:
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return free if limit is None else limit


def parse(kind: type[GenerationRequest], body: Any) -> GenerationRequest:
    """Read a request. Raises RequestError with status 400 for the first thing that is wrong."""
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        raise RequestError(400, message, parameter=place or None) from error
    request.check_supported()
    return request


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join the parts of a message's content, which must be text."""
    content = message.get("content")
    if "role" not in message:
        raise RequestError(400, "a message has no role", parameter="messages")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RequestError(
                400, "content other than text is not supported", parameter="messages"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content or ""}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else _LEAST_LOGPROB


class Wording:
    """The form of answers, of completions or chat. numbers: tokens are given by their ids."""

    def __init__(self, vocabulary: Vocabulary, *, chat: bool, numbers: bool) -> None:
        self._vocabulary, self._chat, self._numbers = vocabulary, chat, numbers

    @property
    def kind(self) -> str:
        return "chat.completion" if self._chat else "text_completion"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, end: End | None
    ) -> dict[str, Any]:
        """A whole answer."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": end}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first event; None: it has none of its own."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, end: End | None
    ) -> dict[str, Any]:
        """A part of an answer that is streamed."""
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": end}

    def logprobs(self, tokens: Sequence[tuple[Chosen, int]]) -> dict[str, Any]:
        """Log-probabilities of tokens, each with the position of its text in the answer."""
        if self._chat:
            return {"content": [self._described(chosen) for chosen, _ in tokens], "refusal": None}
        return {
            "tokens": [self._name(chosen.token) for chosen, _ in tokens],
            "token_logprobs": [_finite(chosen.logprob) for chosen, _ in tokens],
            "top_logprobs": [
                {self._name(token): _finite(value) for token, value in chosen.top} or None
                for chosen, _ in tokens
            ],
            "text_offset": [offset for _, offset in tokens],
        }

    def _described(self, chosen: Chosen) -> dict[str, Any]:
        top = [self._entry(token, value) for token, value in chosen.top]
        return {**self._entry(chosen.token, chosen.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._vocabulary.text([token], special=True)
        value = _finite(logprob)
        return {"token": self._name(token), "logprob": value, "bytes": list(text.encode())}

    def _name(self, token: int) -> str:
        if self._numbers:
            return f"token_id:{token}"
        return self._vocabulary.text([token], special=True)
