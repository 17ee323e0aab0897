"""Answers of engines, good and bad."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from flexq_bench.served.client import Answer, Client, Limits, Outcome, Request, send_all
from flexq_bench.served.engines import engine, started

Command = Callable[[str], str]
_SHORT = Limits(total_s=1.0, body_bytes=100_000, line_bytes=10_000)


def _asked(url: str, *requests: Request, limits: Limits | None = None) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with Client(url, "test-model", limits=limits) as client:
            return await send_all(client, requests, concurrency=8)

    return asyncio.run(ask())


async def _reply(body: Callable[[asyncio.StreamWriter], object], request: Request) -> Answer:
    """Return the answer of a server that writes what `body` writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            result = body(writer)
            if asyncio.iscoroutine(result):
                await result
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", "m", limits=_SHORT) as client:
            return await client.send(request)


def _replied(body: Callable[[asyncio.StreamWriter], object], *, stream: bool = False) -> Answer:
    return asyncio.run(_reply(body, Request("Say hello", 40, stream=stream)))


_OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextmanager
def _engine(command: Command, options: str) -> Iterator[str]:
    with started(engine("base", command(options))) as running:
        yield running.url


def test_streamed_and_whole_answers_are_equal(command: Command):
    chat = ({"role": "user", "content": "How many?"},)
    with _engine(command, "") as url:
        answers = _asked(
            url,
            *(
                Request(prompt, 40, stream=stream, logprobs=3)
                for prompt in ("How many?", chat)
                for stream in (False, True)
            ),
        )

    for whole, streamed in (answers[:2], answers[2:]):
        assert whole.outcome is streamed.outcome is Outcome.OK
        assert (whole.text, whole.finish_reason) == (streamed.text, streamed.finish_reason)
        assert whole.completion_tokens == streamed.completion_tokens == len(streamed.chunk_s)
        assert whole.logprobs == streamed.logprobs
        assert all(len(token.top) == 3 for token in whole.logprobs)
        assert list(streamed.chunk_s) == sorted(streamed.chunk_s)
        assert 0 < streamed.chunk_s[0] <= streamed.chunk_s[-1] <= streamed.end_s


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ("--refuse 429", Outcome.RATE_LIMITED),
        ("--refuse 500", Outcome.SERVER_ERROR),
        ("--hang-after 0", Outcome.TIMED_OUT),
        ("--hang-at-token 3", Outcome.TIMED_OUT),
        ("--die-after 0", Outcome.CONNECTION_LOST),
        ("--garbage", Outcome.MALFORMED),
        ("--empty-share 1", Outcome.EMPTY),
        ("--loop-share 1", Outcome.LOOPING),
        ("--truncate 4", Outcome.CUT_OFF),
        ("--cut-stream 3", Outcome.CUT_OFF),
    ],
)
def test_faults_of_servers_are_told_apart(command: Command, options: str, outcome: Outcome):
    with _engine(command, options) as url:
        (answer,) = _asked(url, Request("How many?", 40, stream=True), limits=_SHORT)

    assert answer.outcome is outcome
    assert answer.detail
    assert "\n" not in answer.detail


def test_endless_body_is_cut():
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(_OK)
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()

    assert _replied(endless).outcome is Outcome.MALFORMED


def test_endless_line_is_cut():
    answer = _replied(lambda writer: writer.write(_OK + b"data: " + b"x" * 50_000), stream=True)

    assert (answer.outcome, "line of more than" in answer.detail) == (Outcome.MALFORMED, True)


def test_drip_of_bytes_times_out():
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(_OK)
        for _ in range(100):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)

    assert _replied(drip).outcome is Outcome.TIMED_OUT


@pytest.mark.parametrize(
    "body",
    [
        b"SSH-2.0-nothing\r\n\r\n",
        _OK + b"[" * 5_000,
        _OK + b"{}",
        _OK + b'{"choices": []}',
        _OK + b'{"choices": [{"text": 3}]}',
        _OK + b'{"choices": [7]}',
        _OK + b'{"choices": [{"text": "a", "index": 1}]}',
        _OK + b'{"choices": [{"text": "a"}, {"text": "b"}]}',
        _OK + b'{"choices": [{"text": "half \\ud83d of a pair", "finish_reason": "stop"}]}',
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n\x1f\x8b\x08",
        _OK + b'{"error": {"message": "no"}}',
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nConnection: close\r\n\r\n",
    ],
)
def test_reply_of_another_interface_is_malformed(body: bytes):
    answer = _replied(lambda writer: writer.write(body))

    assert answer.outcome is Outcome.MALFORMED


def test_usage_and_logprobs_of_wrong_types_are_left_out():
    choice = {"text": "hello", "logprobs": {"tokens": ["a"], "top_logprobs": 5}}
    body = json.dumps({"choices": [choice], "usage": {"completion_tokens": "many"}}).encode()

    request = Request("Say hello", 40, logprobs=2)
    answer = asyncio.run(_reply(lambda writer: writer.write(_OK + body), request))

    assert (answer.outcome, answer.completion_tokens) == (Outcome.OK, None)
    assert answer.logprobs[0].top == {}


@pytest.mark.parametrize("value", [math.nan, 5.0, 10**400], ids=["nan", "positive", "huge"])
@pytest.mark.parametrize("place", ["token_logprobs", "top_logprobs"])
def test_number_that_is_no_log_probability_is_malformed(value: float, place: str):
    known = {"token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -(10**400)}]}
    known[place] = [{"a": -1.0, "b": value}] if place == "top_logprobs" else [value]
    choice = {"text": "hello", "logprobs": {"tokens": ["a"], **known}}
    body = json.dumps({"choices": [choice]}).encode()

    def asked(logprobs: int | None) -> Answer:
        request = Request("Say hello", 40, logprobs=logprobs)
        return asyncio.run(_reply(lambda writer: writer.write(_OK + body), request))

    assert asked(2).outcome is Outcome.MALFORMED
    assert "a log-probability of" in asked(2).detail
    assert asked(None).outcome is Outcome.OK


def test_end_marker_without_a_lines_end_is_an_end():
    event = json.dumps({"choices": [{"text": "hello"}]}).encode()

    answer = _replied(
        lambda writer: writer.write(_OK + b"data: " + event + b"\r\n\r\ndata: [DONE]"), stream=True
    )

    assert answer.outcome is Outcome.OK


def _events(*events: object, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return _OK + b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + end


_HELLO = {"choices": [{"index": 0, "text": "hello"}]}


@pytest.mark.parametrize(
    "body",
    [
        _OK + b'data: {"choices":\ndata: [{"text": "hello"}]}\n\ndata: [DONE]\n\n',
        _OK + b": ping\n\n" + _events(_HELLO).removeprefix(_OK),
        _events(_HELLO, {"choices": []}, {"choices": [{"text": None, "finish_reason": "stop"}]}),
        _events({"choices": [{"text": "hello", "finish_reason": "stop"}]}, end=b""),
        _events(_HELLO, {"choices": [{"index": 1, "text": "other"}]}),
        _events(_HELLO, {"choices": [{"index": 0, "text": " END and more"}]}),
        _events(_HELLO).replace(b"1.1", b"1.0").replace(b"Connection: close\r\n", b""),
    ],
    ids=["lines", "comment", "null text", "no end marker", "second answer", "stop string", "1.0"],
)
def test_odd_stream_has_its_text(body: bytes):
    request = Request("Say hello", 40, stream=True, stop=(" END",))

    answer = asyncio.run(_reply(lambda writer: writer.write(body), request))

    assert (answer.outcome, answer.text) == (Outcome.OK, "hello")


def test_halves_of_a_pair_in_two_events_are_a_character():
    body = _events(*({"choices": [{"text": half}]} for half in ("\ud83d", "\ude00")))

    assert _replied(lambda writer: writer.write(body), stream=True).text == "\U0001f600"


def test_reason_of_an_error_has_no_control_characters():
    body = b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\nred\x00\x1b[31m"

    assert _replied(lambda writer: writer.write(body)).detail == "500: red??[31m"


def test_character_in_two_parts_of_a_body_is_read():
    event = b'data: {"choices": [{"text": "\xc3\xa4"}]}\n\ndata: [DONE]\n\n'

    async def split(writer: asyncio.StreamWriter) -> None:
        for part in (_OK, event[:30], event[30:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)

    assert _replied(split, stream=True).text == "ä"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"text": "so\ufffd", "finish_reason": "length"}, Outcome.CUT_OFF),
        ({"text": "so\ufffd", "finish_reason": "stop"}, Outcome.MALFORMED),
        ({"text": "hello", "finish_reason": "abort"}, Outcome.CUT_OFF),
        ({"text": "hello", "usage": 99}, Outcome.MALFORMED),
    ],
)
def test_odd_answer_is_judged_by_its_end_and_length(answer: dict, outcome: Outcome):
    usage = {"completion_tokens": answer.pop("usage", 3)}
    body = json.dumps({"choices": [answer], "usage": usage}).encode()

    assert _replied(lambda writer: writer.write(_OK + body)).outcome is outcome


@pytest.mark.parametrize(("end", "outcome"), [("length", Outcome.OK), ("stop", Outcome.CUT_OFF)])
def test_fixed_length_without_usage_is_known_by_its_end(end: str, outcome: Outcome):
    body = json.dumps({"choices": [{"text": "hello", "finish_reason": end}]}).encode()
    request = Request("Say hello", 40, fixed_length=True)

    answer = asyncio.run(_reply(lambda writer: writer.write(_OK + body), request))

    assert answer.outcome is outcome
    assert answer.completion_tokens == (40 if outcome is Outcome.OK else None)


@pytest.mark.parametrize(
    ("first", "retries"),
    [
        (Answer(Outcome.RATE_LIMITED, status=429), 1),
        (Answer(Outcome.CONNECTION_LOST), 1),
        (Answer(Outcome.CONNECTION_LOST, status=200), 0),
        (Answer(Outcome.SERVER_ERROR, status=500), 0),
    ],
)
def test_only_request_that_was_not_taken_is_sent_again(first: Answer, retries: int):
    class Flaky(Client):
        answers = iter((first, Answer(Outcome.OK, "7")))

        async def send(self, request: Request) -> Answer:
            return next(self.answers)

    (answer,) = asyncio.run(
        send_all(Flaky("", ""), [Request("How many?", 8)], concurrency=1, retries=2)
    )

    assert answer.retries == retries
    assert answer.outcome is (Outcome.OK if retries else first.outcome)


def test_requests_after_many_failures_are_not_sent(command: Command):
    async def ask(url: str) -> list[Answer]:
        async with Client(url, "test-model") as client:
            requests = [Request("How many?", 8)] * 50
            return await send_all(client, requests, concurrency=2, give_up_after=4)

    with _engine(command, "--refuse 500") as url:
        answers = asyncio.run(ask(url))

    assert {answer.outcome for answer in answers} == {Outcome.SERVER_ERROR}
    assert sum(answer.status is not None for answer in answers) <= 6
