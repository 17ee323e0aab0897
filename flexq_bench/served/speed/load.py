"""Load on an engine: the requests of a trace in a closed or an open loop, with their times.

An open loop sends each request when it is due, and counts its times from then: a slow engine
delays no request, and the wait of those that come late is part of their time (no coordinated
omission). A closed loop has a fixed number of requests under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexq_bench.served.client import Answer, Client, Limits, Outcome, Request
from flexq_bench.served.engines import RunningEngine
from flexq_bench.served.speed.requests import PlannedRequest, request_of

_LEAD_S = 0.05  # before the first request of an open loop is due


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request in seconds, from the moment when it was due (open loop) or sent.

    due_s, end_s: on the clock of its segment. ttft_s: to the first part of its text; tpot_s:
    between the tokens after it; None: it has no further token. All None if it failed, as `problem`
    says. characters: of its text.
    """

    due_s: float
    end_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    new_tokens: int
    problem: str = ""
    characters: int = 0

    @property
    def is_ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests to one engine. seconds: from the first one due to the last end."""

    times: tuple[RequestTimes, ...]

    @property
    def seconds(self) -> float:
        begin = min(request.due_s for request in self.times)
        return max(request.end_s for request in self.times) - begin

    @property
    def failed(self) -> int:
        return sum(not request.is_ok for request in self.times)


def run_segment(
    engine: RunningEngine,
    planned: Sequence[PlannedRequest],
    *,
    concurrency: int | None,
    seed: int,
    limits: Limits | None = None,
    key: str | None = None,
) -> Segment:
    """Send the requests and return their times. concurrency: of a closed loop; None: an open one.

    seed: of the prompts. key: a bearer token. Nothing is raised for a failed request: it has a
    `problem`.
    """
    requests = [
        request_of(planned_request, seed, number) for number, planned_request in enumerate(planned)
    ]

    async def run() -> list[RequestTimes]:
        async with Client(engine.url, engine.model, limits=limits, key=key) as client:
            if concurrency is None:
                return await _open_loop(client, planned, requests)
            return await _closed_loop(client, requests, concurrency)

    return Segment(tuple(asyncio.run(run())))


async def _open_loop(
    client: Client, planned: Sequence[PlannedRequest], requests: Sequence[Request]
) -> list[RequestTimes]:
    begin = time.perf_counter() + _LEAD_S

    async def send(due: float, request: Request) -> RequestTimes:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return _times(await client.send(request), request, due)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(send(begin + planned_request.arrival_s, request))
            for planned_request, request in zip(planned, requests, strict=True)
        ]
    return [task.result() for task in tasks]


async def _closed_loop(
    client: Client, requests: Sequence[Request], concurrency: int
) -> list[RequestTimes]:
    waiting = iter(enumerate(requests))
    done: dict[int, RequestTimes] = {}

    async def work() -> None:
        for number, request in waiting:
            answer = await client.send(request)
            done[number] = _times(answer, request, answer.sent_at)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return [done[number] for number in sorted(done)]


def _times(answer: Answer, request: Request, due: float) -> RequestTimes:
    late = answer.sent_at - due
    end = answer.sent_at + answer.end_s
    if answer.outcome is not Outcome.OK or not answer.chunk_s:
        is_ok = answer.outcome is Outcome.OK
        problem = "no text" if is_ok else f"{answer.outcome.value}: {answer.detail}"
        return RequestTimes(due, end, None, None, None, 0, problem)
    first, last = answer.chunk_s[0], answer.chunk_s[-1]
    tokens = answer.completion_tokens or len(answer.chunk_s)
    return RequestTimes(
        due,
        end,
        late + first,
        (last - first) / (tokens - 1) if tokens > 1 else None,
        late + last,
        tokens,
        characters=len(answer.text),
    )
