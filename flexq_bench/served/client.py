"""An OpenAI-compatible client that trusts no server: every wait, line and body has a limit."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import aiohttp

from flexq_bench.accuracy.repetition import loops
from flexq_bench.errors import one_line

_MAX_DETAIL = 160  # characters
_MAX_TOP = 1024  # log-probabilities of a token that are kept


class Outcome(StrEnum):
    """Outcome of a request."""

    OK = "ok"
    EMPTY = "empty"  # a text without a visible character
    CUT_OFF = "cut off"  # by the limit of tokens, or before its end
    LOOPING = "looping"  # it ends in a loop
    MALFORMED = "malformed"  # no answer of this interface
    REFUSED = "refused"  # the request is invalid, as the engine says
    RATE_LIMITED = "rate-limited"
    SERVER_ERROR = "server error"
    TIMED_OUT = "timed out"
    CONNECTION_LOST = "connection lost"

    @property
    def is_answer(self) -> bool:
        """True if the engine gave a text, good or bad: it can be judged."""
        return self in _ANSWERS


_ANSWERS = (Outcome.OK, Outcome.EMPTY, Outcome.CUT_OFF, Outcome.LOOPING, Outcome.MALFORMED)


_RETRY_S = 0.25
_NO_CHARACTER = "\ufffd"
_ENDED_EARLY = ("abort", "cancelled", "content_filter", "error", "timeout")  # finish reasons
_LEAST_LOGPROB, _MOST_LOGPROB = -1e300, 0.01  # the latter is 0, but for rounding
_MORE_TOKENS = 1  # than asked for: some engines count the end of the text
_DONE = b"[DONE]"  # the last event of a stream


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. Times in seconds; idle_s: between two parts of an answer."""

    total_s: float = 600.0
    connect_s: float = 10.0
    idle_s: float = 120.0
    body_bytes: int = 1 << 24
    line_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """A request. prompt: a text, token ids, or messages of a chat (`role` and `content`).

    logprobs: most likely tokens to report at each position; None: none. echo: report those of the
    prompt, too (completions only). fixed_length: the answer has exactly max_tokens tokens, so an
    end there is no cut; engines that know `ignore_eos` then go on. extra: more fields of the body.
    """

    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None
    echo: bool = False
    fixed_length: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, tuple) and isinstance(next(iter(self.prompt), 0), Mapping)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON object of the request."""
        values: dict[str, Any] = {
            "model": model,
            "messages" if self.is_chat else "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.seed is not None:
            values["seed"] = self.seed
        if self.stop:
            values["stop"] = self.stop
        if self.stream:
            values |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": self.logprobs}
            values |= chat if self.is_chat else {"logprobs": self.logprobs}
        if self.echo:
            values["echo"] = True
        if self.fixed_length:
            values["ignore_eos"] = True
        return {**values, **self.extra}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer. logprob: natural; None: not given. top: the likeliest tokens."""

    token: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, or what came instead of it. Times in seconds.

    sent_at: of a monotonic clock (time.perf_counter). chunk_s: arrival of each part of the text
    since then; of an answer that is not streamed, of the whole. end_s: of the last byte, or of the
    failure. prompt_tokens, completion_tokens: as the engine counts them; None: not reported.
    detail: one line on what is no `ok`. status: of HTTP; None: no answer. retries: how often it was
    sent again.
    """

    outcome: Outcome
    text: str = ""
    finish_reason: str = ""
    sent_at: float = 0.0
    chunk_s: tuple[float, ...] = ()
    end_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    detail: str = ""
    status: int | None = None
    retries: int = 0

    @property
    def may_retry(self) -> bool:
        """True if the engine did not take the request. One that fails in its answer did."""
        is_lost = self.outcome is Outcome.CONNECTION_LOST and self.status is None
        return is_lost or self.outcome is Outcome.RATE_LIMITED


class _BadAnswerError(Exception):
    """An answer that is none of this interface; the message says why."""


class Client:
    """Asks an engine; an asynchronous context manager with connections for `concurrency` requests.

    url: without /v1. key: sent as a bearer token. Redirects are not followed, and proxies of the
    environment are not used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        limits: Limits | None = None,
        key: str | None = None,
        concurrency: int = 1024,
    ) -> None:
        self.url = url
        self._model, self._limits = model, limits or Limits()
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._concurrency = concurrency
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            timeout=aiohttp.ClientTimeout(
                total=limits.total_s, sock_connect=limits.connect_s, sock_read=limits.idle_s
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small body may have gigabytes
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request) -> Answer:
        """Return the answer to a request. No fault of a server is an exception.

        Raises RuntimeError outside of the context.
        """
        if self._session is None:
            raise RuntimeError("a client sends within its context: async with Client(…) as client")
        body = json.dumps(request.body(self._model)).encode()
        reading = _Reading(request, self._limits)
        try:
            async with self._session.post(
                self.url + request.path,
                data=body,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                allow_redirects=False,
            ) as reply:
                return await reading.read(reply)
        except TimeoutError as error:
            outcome, why = Outcome.TIMED_OUT, one_line(error)
            why = f"no end after {reading.elapsed():.1f} s" if why == "TimeoutError" else why
        except _BadAnswerError as error:
            outcome, why = Outcome.MALFORMED, str(error)
        except (aiohttp.ClientResponseError, aiohttp.http.HttpProcessingError) as error:
            outcome, why = Outcome.MALFORMED, f"no HTTP: {one_line(error)}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome, why = Outcome.CONNECTION_LOST, one_line(error)
        return reading.failed(outcome, why)


async def send_all(
    client: Client,
    requests: Iterable[Request],
    *,
    concurrency: int,
    retries: int = 0,
    give_up_after: int | None = None,
    on_answer: Callable[[int, Answer], object] = lambda index, answer: None,
) -> list[Answer]:
    """Return the answers to requests, in their order, at most `concurrency` under way at once.

    retries: of a request that was rate-limited, or whose connection was lost before an answer; the
    wait before each is twice as long. give_up_after: so many requests in a row without an answer;
    the rest are then not sent, and have the last one's outcome. on_answer: called with the index of
    each request as its answer arrives.
    """
    waiting = iter(enumerate(requests))
    answers: dict[int, Answer] = {}
    failed = 0  # in a row

    async def work() -> None:
        nonlocal failed
        for index, request in waiting:
            if give_up_after is not None and failed >= give_up_after:
                last = next(reversed(answers.values())).outcome
                answers[index] = Answer(last, detail=f"not sent after {failed} without an answer")
                continue
            answer = await client.send(request)
            for attempt in range(retries):
                if not answer.may_retry:
                    break
                await asyncio.sleep(_RETRY_S * 2**attempt)
                answer = replace(await client.send(request), retries=attempt + 1)
            failed = 0 if answer.outcome.is_answer else failed + 1
            answers[index] = answer
            on_answer(index, answer)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return [answers[index] for index in sorted(answers)]


class _Reading:
    """Reads the answer to a request that is sent now."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._request, self._limits = request, limits
        self._sent_at = time.perf_counter()
        self._status: int | None = None
        self._texts: list[str] = []
        self._chunk_s: list[float] = []
        self._finish = ""
        self._others = 0  # choices that are not the one that was asked for
        self._usage: tuple[int | None, int | None] = (None, None)
        self._logprobs: list[TokenLogprob] = []
        self._read = 0

    def elapsed(self) -> float:
        return time.perf_counter() - self._sent_at

    async def read(self, reply: aiohttp.ClientResponse) -> Answer:
        self._status = reply.status
        if reply.status != 200:
            start = await self._start_of(reply)
            return self.failed(_outcome_of(reply.status), f"{reply.status}: {start}")
        if self._request.stream:
            ended = await self._read_events(reply)
        else:
            body = b"".join([part async for part, _ in self._parts(reply)])
            self._take(_json(body), self.elapsed())
            ended = True
        return self._judged(ended=ended)

    def failed(self, outcome: Outcome, why: str) -> Answer:
        """Return what arrived before a failure."""
        return self._answer(outcome, why)

    async def _parts(self, reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, float]]:
        """Yield the parts of a body and their arrival times."""
        async for part in reply.content.iter_any():
            self._read += len(part)
            if self._read > self._limits.body_bytes:
                raise _BadAnswerError(f"more than {self._limits.body_bytes:,} bytes")
            if self.elapsed() > self._limits.total_s:  # always something, so that no wait is long
                raise TimeoutError
            yield part, self.elapsed()

    async def _start_of(self, reply: aiohttp.ClientResponse) -> str:
        """Return the first characters of the body of an error."""
        start = b""
        async for part, _ in self._parts(reply):
            start += part
            if len(start) > _MAX_DETAIL:
                break
        return " ".join(start.decode("utf-8", "replace").split())[:_MAX_DETAIL] or "no reason"

    async def _read_events(self, reply: aiohttp.ClientResponse) -> bool:
        """Read server-sent events. Return True if the stream said that it is at its end."""
        rest, event = b"", b""
        async for part, at in self._parts(reply):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) + len(event) > self._limits.line_bytes:
                raise _BadAnswerError(f"a line of more than {self._limits.line_bytes:,} bytes")
            for line in lines:
                event = self._read_line(line, event, at)
                if event == _DONE:
                    return True
        event = self._read_line(rest, event, self.elapsed())  # without a line's end
        if event.strip() and event != _DONE:
            raise _BadAnswerError(f"the last event has no end: {_shown(event)}")
        return event == _DONE

    def _read_line(self, line: bytes, event: bytes, at: float) -> bytes:
        """Take the event that a line completes. Returns its data so far: it may have more lines."""
        name, colon, value = line.strip().partition(b":")
        if name == b"data":
            event = event + b"\n" + value if event else value.strip()
            if event == _DONE:
                return event
            try:
                answer = json.loads(event)
            except (ValueError, RecursionError):  # it has more lines, or an empty one ends it
                return event
            self._take(answer, at)
        elif not name and event and not colon:
            raise _BadAnswerError(f"no JSON: {_shown(event)}")
        elif name and (not colon or name not in (b"event", b"id", b"retry")):
            raise _BadAnswerError(f"no event: {_shown(line)}")
        else:
            return event
        return b""

    def _take(self, value: Any, at: float) -> None:
        """Take a completion, or a part of one."""
        if not isinstance(value, dict):
            raise _BadAnswerError("an answer that is no JSON object")
        if value.get("error"):
            raise _BadAnswerError(f"an error in an answer: {_shown(value['error'])}")
        usage = value.get("usage")
        if isinstance(usage, dict):
            prompt, new = (_count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
            self._usage = (prompt, new)
        choices = value.get("choices")
        if not isinstance(choices, list) or (not choices and not self._request.stream):
            raise _BadAnswerError(f"an answer without choices: {_shown(value)}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise _BadAnswerError("a choice that is no JSON object")
            if choice.get("index") not in (0, None):
                self._others += 1
                continue
            text = self._text_of(choice)
            if text or not self._request.stream:
                self._texts.append(text)
                self._chunk_s.append(at)
            finish = choice.get("finish_reason")
            self._finish = finish if isinstance(finish, str) else self._finish
            if self._request.logprobs is not None:
                self._logprobs += _logprobs(choice.get("logprobs"))

    def _text_of(self, choice: Mapping[str, Any]) -> str:
        stream = self._request.stream
        if not self._request.is_chat:
            text = choice.get("text", "" if stream else None)
            text = "" if text is None and stream else text
        else:
            message = choice.get("delta" if stream else "message")
            if message is None and stream:
                return ""
            if not isinstance(message, dict):
                raise _BadAnswerError("a choice without a message")
            # Engines give the reasoning of a model apart; a question is answered by the rest.
            text = message.get("content") or ""
        if not isinstance(text, str):
            raise _BadAnswerError("a choice without a text")
        return text

    def _judged(self, *, ended: bool) -> Answer:
        """Return the answer with its outcome."""
        text, new = self._text(), self._usage[1]
        most = self._request.max_tokens
        if not ended and not self._finish:
            return self._answer(Outcome.CUT_OFF, "the stream ended before the answer")
        if self._finish in _ENDED_EARLY:
            return self._answer(Outcome.CUT_OFF, f"finish reason {self._finish}")
        if self._others and not self._chunk_s:
            return self._answer(Outcome.MALFORMED, "no choice has index 0")
        if len(self._texts) > 1 and not self._request.stream:
            return self._answer(Outcome.MALFORMED, "several answers, one was asked for")
        if new is not None and new > most + _MORE_TOKENS:
            return self._answer(Outcome.MALFORMED, f"{new} tokens, at most {most} were asked for")
        if self._request.fixed_length:
            if new is not None and new < most:
                return self._answer(Outcome.CUT_OFF, f"{new} of {most} tokens")
            if new is None and self._finish != "length":
                why = f"finish reason {self._finish or 'not given'}, and no number of tokens"
                return self._answer(Outcome.CUT_OFF, why)
            self._usage = (self._usage[0], most)
            return self._answer(Outcome.OK)
        if not text.strip():
            return self._answer(Outcome.EMPTY, f"finish reason {self._finish or 'not given'}")
        # The limit of tokens may cut a character in two.
        known = text.rstrip(_NO_CHARACTER) if self._finish == "length" else text
        if _NO_CHARACTER in known or "\0" in text:
            return self._answer(Outcome.MALFORMED, "characters that are none of a text")
        if loops(text.split()) or _repeats(text):
            return self._answer(Outcome.LOOPING, f"it ends in {_shown(text[-40:])}")
        if self._finish == "length":
            return self._answer(Outcome.CUT_OFF, f"after {most} tokens")
        return self._answer(Outcome.OK)

    def _text(self) -> str:
        """Return the text before the first stop string, which some engines include."""
        # Some engines send the two halves of a surrogate pair apart; a half alone is no character.
        halves = "".join(self._texts).encode("utf-16", "surrogatepass")
        text = halves.decode("utf-16", "replace")
        if self._request.echo:
            return text
        return text[
            : min((i for s in self._request.stop if (i := text.find(s)) >= 0), default=None)
        ]

    def _answer(self, outcome: Outcome, detail: str = "") -> Answer:
        return Answer(
            outcome,
            self._text(),
            self._finish,
            self._sent_at,
            tuple(self._chunk_s),
            self.elapsed(),
            *self._usage,
            tuple(self._logprobs),
            "".join(c if c.isprintable() else "?" for c in " ".join(detail.split())[:_MAX_DETAIL]),
            self._status,
        )


def _outcome_of(status: int) -> Outcome:
    if status == 429:
        return Outcome.RATE_LIMITED
    if status >= 500:
        return Outcome.SERVER_ERROR
    return Outcome.REFUSED if status >= 400 else Outcome.MALFORMED


def _repeats(text: str) -> bool:
    """Return True if the last 64 characters repeat one character, other than blanks."""
    tail = text[-64:]
    return len(tail) == 64 and len(set(tail)) == 1 and not tail.isspace()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _BadAnswerError(f"no JSON: {_shown(data)}") from None


def _shown(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return ascii(" ".join(text.split())[:60])


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if is_count else None  # type: ignore[return-value]


def _logprobs(value: object) -> list[TokenLogprob]:
    """Return the log-probabilities of a choice, in the form of completions or of a chat."""
    if not isinstance(value, dict):
        return []
    if isinstance(content := value.get("content"), list):
        return [
            TokenLogprob(
                str(entry.get("token", "")),
                _real(entry.get("logprob")),
                _top((row.get("token"), row.get("logprob")) for row in _objects(entry)),
            )
            for entry in content
            if isinstance(entry, dict)
        ]
    tokens = value.get("tokens")
    if not isinstance(tokens, list):
        return []
    own = _padded(value.get("token_logprobs"), len(tokens))
    tops = _padded(value.get("top_logprobs"), len(tokens))
    return [
        TokenLogprob(str(token), _real(logprob), _top(top.items()) if isinstance(top, dict) else {})
        for token, logprob, top in zip(tokens, own, tops, strict=True)
    ]


def _objects(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = entry.get("top_logprobs")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _padded(values: object, length: int) -> Sequence[Any]:
    known = values[:length] if isinstance(values, list) else []
    return [*known, *[None] * (length - len(known))]


def _top(pairs: Iterable[tuple[object, object]]) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    for token, logprob in pairs:
        real = _real(logprob)
        if real is not None and len(logprobs) < _MAX_TOP:
            name = str(token)  # parts of characters may share one
            logprobs[name] = max(real, logprobs.get(name, real))
    return logprobs


def _real(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not value <= _MOST_LOGPROB:  # nor is NaN
        raise _BadAnswerError(f"a log-probability of {_shown(value)}")
    return float(max(value, _LEAST_LOGPROB))
