"""The server's application: /v1/models, /v1/completions, /v1/chat/completions and /health."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flexq_bench.errors import FlexqError, InfrastructureError, UsageError
from flexq_bench.serving.engine_link import RemoteEngine
from flexq_bench.serving.generation import Chosen, End, Event, Generation, QueueFullError
from flexq_bench.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
    Wording,
    parse,
)
from flexq_bench.serving.text import GrowingText, StopStrings, Vocabulary

_MAX_BODY_BYTES = 16 << 20
_CLOSED = 499  # status of a request whose client left, which nobody reads


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: by which clients ask for it. vocabulary_size: of its logits. content_hash: of its
    checkpoint; None: it is not quantized.
    """

    name: str
    vocabulary: Vocabulary
    vocabulary_size: int
    content_hash: str | None
    created: int = field(default_factory=lambda: int(time.time()))


def serving_app(model: ServedModel, engine: RemoteEngine) -> Starlette:
    """Return the application."""
    server = _Server(model, engine)
    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/completions", partial(server.generate, CompletionRequest), methods=["POST"]),
        Route("/v1/chat/completions", partial(server.generate, ChatRequest), methods=["POST"]),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        RequestError: _refused,
        HTTPException: _not_found,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _refused(_: Request, error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return _json_response(error.body, error.status, headers)


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json_response(RequestError(error.status_code, message).body, error.status_code)


class _Server:
    def __init__(self, model: ServedModel, engine: RemoteEngine) -> None:
        self._model, self._engine = model, engine

    async def health(self, _: Request) -> Response:
        if self._engine.failure is not None:
            return _json_response(RequestError(503, str(self._engine.failure)).body, 503)
        running, waiting = self._engine.counts()
        return _json_response({"status": "ok", "running": running, "waiting": waiting})

    async def models(self, _: Request) -> Response:
        return _json_response({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return _json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "flexq-bench",
            "max_model_len": self._engine.capacity,
        }

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            known = self._model.name
            message = f"no model {name:.80}: {known} is served"
            raise RequestError(404, message, parameter="model", code="model_not_found")

    async def generate(self, kind: type[GenerationRequest], request: Request) -> Response:
        try:
            body = await _read_json(request)
        except ClientDisconnect:
            return Response(status_code=_CLOSED)
        asked = parse(kind, body)
        self._check_name(asked.model)
        wording = Wording(
            self._model.vocabulary,
            chat=kind is ChatRequest,
            numbers=asked.return_tokens_as_token_ids,
        )
        generations = self._generations(asked)
        answers = _Answers(self._engine, self._model.vocabulary, generations, asked)
        head = {
            "id": f"{'chatcmpl' if kind is ChatRequest else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model.name,
            "system_fingerprint": self._model.content_hash,
        }
        if asked.stream:
            events = _events(answers, wording, head, asked)
            return _Stream(events, answers)
        return await _unless_gone(request, answers, _whole(answers, wording, head))

    def _generations(self, asked: GenerationRequest) -> list[Generation]:
        vocabulary, capacity = self._model.vocabulary, self._engine.capacity
        try:
            prompts = asked.prompts(vocabulary)
        except UsageError as error:
            raise RequestError(400, str(error)) from error
        if not 0 < len(prompts) * asked.n <= self._engine.most:
            message = f"{len(prompts)} prompts times n={asked.n}: ask for 1 to {self._engine.most}"
            raise RequestError(400, message, parameter="prompt")
        sampling = asked.sampling()
        ends = frozenset[int]() if asked.ignore_eos else vocabulary.ends
        generations = []
        for prompt in prompts:
            if not prompt or max(prompt) >= self._model.vocabulary_size:
                wrong = "is empty" if not prompt else "has tokens that the model does not know"
                raise RequestError(400, f"the prompt {wrong}", parameter="prompt")
            new = asked.new_tokens(capacity - len(prompt))
            if asked.repeats_prompt:
                new = max(1, new)  # that token is computed and left out
            if new < 1 or len(prompt) + new > capacity:
                message = (
                    f"the context has {capacity} tokens, the prompt has {len(prompt)} and "
                    f"{new} are requested, at least 1: shorten the prompt or max_tokens"
                )
                raise RequestError(400, message, code="context_length_exceeded")
            generations += [
                Generation(
                    tuple(prompt),
                    new,
                    sampling,
                    ends,
                    sequence,
                    scores_prompt=asked.repeats_prompt and sampling.logprobs is not None,
                )
                for sequence in range(asked.n)
            ]
        return generations


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of the answer `index`. tokens: with the positions of their texts in the answer."""

    index: int
    text: str
    tokens: list[tuple[Chosen, int]]
    end: End | None


class _Choice:
    """An answer that grows."""

    def __init__(
        self, index: int, generation: Generation, vocabulary: Vocabulary, asked: GenerationRequest
    ) -> None:
        self.index = index
        self._ends = generation.ends
        self._prompt = generation.prompt if asked.repeats_prompt else ()
        self.is_empty = asked.max_tokens == 0
        self._text, self._stops = GrowingText(vocabulary), StopStrings(asked.stops)
        self._length = 0  # characters before the next token's text
        self.is_done = False

    def add(self, event: Event) -> _Piece:
        """Append a token; the piece may have no text yet."""
        repeated, tokens = self._repeated(event)
        end: End | None = "length" if self.is_empty else event.end
        text = ""
        if not self.is_empty:
            tokens.append((event.chosen, self._length))
            if event.chosen.token not in self._ends:
                text = self._text.add(event.chosen.token)
        if end is not None:
            text += self._text.end()
        self._length += len(text)
        text, is_stopped = self._stops.add(text)
        if is_stopped:
            end = "stop"
        elif end is not None:
            text += self._stops.end()
        self.is_done = end is not None
        return _Piece(self.index, repeated + text, tokens, end)

    def _repeated(self, event: Event) -> tuple[str, list[tuple[Chosen, int]]]:
        """Text and tokens of a prompt that is repeated, before the first token."""
        if not self._prompt:
            return "", []
        scored = [Chosen(self._prompt[0]), *event.prompt]
        if not event.prompt:
            scored = [Chosen(token) for token in self._prompt]
        self._prompt = ()
        text, tokens = "", []
        for chosen in scored:
            tokens.append((chosen, len(text)))
            text += self._text.add(chosen.token)
        self._length = len(text)
        return text, tokens


_Item = tuple[int, Event | InfrastructureError]


class _Answers:
    """The answers to one HTTP request. Raises RequestError if they can't be queued."""

    def __init__(
        self,
        engine: RemoteEngine,
        vocabulary: Vocabulary,
        generations: Sequence[Generation],
        asked: GenerationRequest,
    ) -> None:
        self._engine = engine
        self._events: asyncio.Queue[_Item] = asyncio.Queue()
        self.choices = [_Choice(i, g, vocabulary, asked) for i, g in enumerate(generations)]
        self.has_logprobs = asked.reported is not None
        # A prompt counts once, also if it has several answers.
        self.prompt_tokens = sum(len(g.prompt) for g in generations[:: asked.n])
        self.new_tokens = 0
        self._numbers: list[int] = []
        try:
            for index, generation in enumerate(generations):
                self._numbers.append(engine.submit(generation, partial(self._receive, index)))
        except QueueFullError as error:
            self.close()
            raise RequestError(429, str(error), code="rate_limit_exceeded") from error
        except InfrastructureError as error:
            raise RequestError(503, str(error)) from error

    def _receive(self, index: int, event: Event | InfrastructureError) -> None:
        self._events.put_nowait((index, event))

    async def pieces(self) -> AsyncIterator[list[_Piece]]:
        """Yield the pieces of all answers as they come, together where several are there.

        Raises RequestError if the engine fails.
        """
        while not all(choice.is_done for choice in self.choices):
            items = [await self._events.get()]
            while not self._events.empty():
                items.append(self._events.get_nowait())
            pieces = [piece for item in items if (piece := self._piece(*item)) is not None]
            if pieces:
                yield pieces

    def _piece(self, index: int, event: Event | InfrastructureError) -> _Piece | None:
        if isinstance(event, FlexqError):
            raise RequestError(503, str(event))
        choice = self.choices[index]
        if choice.is_done:
            return None  # a stop string came, and more tokens were on their way
        self.new_tokens += 0 if choice.is_empty else 1
        piece = choice.add(event)
        if piece.end is not None:
            self._engine.cancel(self._numbers[index])
        return piece

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }

    def close(self) -> None:
        """Drop the answers that are not finished."""
        for number in self._numbers:
            self._engine.cancel(number)


async def _whole(answers: _Answers, wording: Wording, head: dict[str, Any]) -> Response:
    texts = ["" for _ in answers.choices]
    tokens: list[list[tuple[Chosen, int]]] = [[] for _ in answers.choices]
    ends: list[End | None] = [None for _ in answers.choices]
    async for pieces in answers.pieces():
        for piece in pieces:
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            ends[piece.index] = piece.end
    choices = [
        wording.choice(i, text, wording.logprobs(own) if answers.has_logprobs else None, end)
        for i, (text, own, end) in enumerate(zip(texts, tokens, ends, strict=True))
    ]
    body = {**head, "object": wording.kind, "choices": choices, "usage": answers.usage()}
    return _json_response(body)


class _Stream(StreamingResponse):
    """Events; answers are dropped if the client leaves, also before the first one."""

    def __init__(self, events: AsyncIterator[str], answers: _Answers) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _unless_gone(
    request: Request, answers: _Answers, answering: Awaitable[Response]
) -> Response:
    """Await an answer; drop it if the client leaves."""
    answer = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=_CLOSED)
    finally:
        answer.cancel()
        gone.cancel()
        answers.close()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    answers: _Answers, wording: Wording, head: dict[str, Any], asked: GenerationRequest
) -> AsyncIterator[str]:
    head = {**head, "object": wording.chunk_kind}
    wants_usage = asked.stream_options.include_usage
    usage = {"usage": None} if wants_usage else {}
    try:
        for choice in answers.choices:
            if (opening := wording.opening(choice.index)) is not None:
                yield _event({**head, "choices": [opening], **usage})
        async for pieces in answers.pieces():
            yield "".join(
                _event({**head, "choices": [_row(piece, answers, wording)], **usage})
                for piece in pieces
            )
        if wants_usage:
            yield _event({**head, "choices": [], "usage": answers.usage()})
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield _event(error.body)


def _row(piece: _Piece, answers: _Answers, wording: Wording) -> dict[str, Any]:
    logprobs = wording.logprobs(piece.tokens) if answers.has_logprobs else None
    return wording.piece(piece.index, piece.text, logprobs, piece.end)


def _json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """In ASCII: a text of a client may have half of a surrogate pair, which UTF-8 can't encode."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _read_json(request: Request) -> Any:
    """Read the body. Raises RequestError if it is too long or no JSON."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MAX_BODY_BYTES:
            raise RequestError(413, f"the body has more than {_MAX_BODY_BYTES >> 20} MiB")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}") from error
