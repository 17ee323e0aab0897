"""An OpenAI-compatible server without a model, a process of its own: `python server.py --port 0`.

Answers follow from the seed and the prompt alone, so two servers of one seed give equal answers. A
prompt's right answer is that of `--answers FILE` (JSON lines with `prompt` and `answer`; the
longest stored prompt that is in the request's text), otherwise `right_answer(prompt)`, a number.
Options make the faults of real servers: `python server.py --help`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FILLER = ("so", "we", "add", "the", "first", "part", "to", "the", "second", "and", "then", "check")


def share_of(*key: object) -> float:
    """Return a number in [0, 1) that follows from `key` alone."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def right_answer(prompt: str) -> str:
    """Return the right answer to a prompt that no file answers: a number of up to three digits."""
    return str(int(share_of("right", prompt) * 1000))


def wrong_answer(right: str) -> str:
    """Return a wrong answer of the same kind: another number, another letter, another text."""
    if right.lstrip("-").isdigit():
        return str(int(right) + 1)
    if len(right) == 1 and right.isalpha():
        return "B" if right == "A" else "A"
    return f"not {right}"


class Answers:
    """What the server says to a prompt."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stored: dict[str, str] = {}
        if options.answers is not None:
            for line in options.answers.read_text().splitlines():
                row = json.loads(line)
                self.stored[row["prompt"]] = str(row["answer"])

    def right(self, prompt: str) -> str:
        if prompt in self.stored:
            return self.stored[prompt]
        matches = [stored for stored in self.stored if stored in prompt]
        return self.stored[max(matches, key=len)] if matches else right_answer(prompt)

    def is_right(self, prompt: str, sample: str | None) -> bool:
        """sample: None for a greedy answer, otherwise what tells this sample from others."""
        options = self.options
        right = share_of(options.seed, "accuracy", prompt) < options.accuracy
        change = share_of(options.flip_seed, "flip", prompt)
        if change < options.lose_share:
            right = False
        elif change < options.lose_share + options.gain_share:
            right = True
        if sample is not None and share_of(options.seed, "sample", prompt, sample) < options.spread:
            right = not right
        return right

    def words(self, prompt: str, sample: str | None) -> list[str]:
        """Return the tokens of an answer."""
        options = self.options
        fault = share_of(options.flip_seed, "fault", prompt)
        if fault < options.empty_share:
            return []
        if fault < options.empty_share + options.loop_share:
            return [" and on"] * 100_000
        right = self.right(prompt)
        answer = right if self.is_right(prompt, sample) else wrong_answer(right)
        start = int(share_of(options.seed, "start", prompt) * len(FILLER))
        filler = [FILLER[(start + i) % len(FILLER)] for i in range(options.tokens)]
        tail = answer.split(" ") if options.bare else ["The", "answer", "is", *answer.split(" ")]
        head, *rest = [*filler, *tail] if not options.bare else tail
        return [head, *(" " + word for word in rest)]

    def echoed(self, text: str) -> list[tuple[str, float]]:
        """Return the tokens of a repeated text with their log-probabilities.

        A stored prompt with the answer that this server takes for right is likelier than others.
        """
        prompt = max((p for p in self.stored if text.startswith(p)), key=len, default=None)
        scale = 1.0
        if prompt is not None:
            right = text[len(prompt) :].strip() == self.stored[prompt]
            scale = 0.1 if right == self.is_right(prompt, None) else 1.0
        words = re.findall(r"\s*\S+|\s+$", text)
        return [
            (word, -scale * (1 + share_of(self.options.seed, "echo", words[: i + 1])))
            for i, word in enumerate(words)
        ]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.options = options
        self.answers = Answers(options)
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.requests = 0
        self.noise = random.Random(options.noise_seed)

    def count_request(self) -> int:
        with self.lock:
            self.requests += 1
            return self.requests

    def factor(self) -> float:
        with self.lock:
            return self.noise.lognormvariate(0.0, self.options.noise) if self.options.noise else 1.0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """No log of requests."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def reply(self, status: int, body: object, **headers: str) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status: int, message: str, **headers: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
        self.reply(status, {"error": error}, **headers)

    def do_GET(self) -> None:
        options = self.server.options
        if time.monotonic() - self.server.started < options.loading_s:
            self.refuse(503, "the model is loading")
        elif self.path == "/health":
            self.reply(200, {})
        elif self.path == "/v1/models":
            model = {"id": options.model, "object": "model", "created": 0, "owned_by": "tests"}
            self.reply(200, {"object": "list", "data": [model]})
        else:
            self.refuse(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        options, started = self.server.options, time.monotonic()
        length = int(self.headers.get("Content-Length", 0))
        try:
            request = json.loads(self.rfile.read(length))
        except ValueError:
            self.refuse(400, "the body is no JSON")
            return
        if time.monotonic() - self.server.started < options.loading_s:
            self.refuse(503, "the model is loading")
            return
        number = self.server.count_request()
        if options.die_after is not None and number > options.die_after:
            os._exit(3)
        if options.hang_after is not None and number > options.hang_after:
            threading.Event().wait()
        for status, share in options.refuse:
            if share_of(options.flip_seed, "refuse", status, number) < share:
                again = {"Retry_After": "0"} if status == 429 else {}
                self.refuse(status, f"refused with {status}, as requested", **again)
                return
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            self.refuse(404, f"no such path: {self.path}")
            return
        Generation(self, request, chat=chat, number=number, started=started).answer()


class Generation:
    """One request that is answered."""

    def __init__(
        self, handler: Handler, request: dict[str, Any], *, chat: bool, number: int, started: float
    ) -> None:
        self.handler, self.request, self.chat = handler, request, chat
        self.number, self.started = number, started
        self.options = handler.server.options
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{number}"

    def prompts(self) -> list[str]:
        if self.chat:
            return ["\n".join(_text(message["content"]) for message in self.request["messages"])]
        prompt = self.request["prompt"]
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], str):
            return list(prompt)
        tokens = prompt if prompt and isinstance(prompt[0], list) else [prompt]
        return [" ".join(map(str, row)) for row in tokens]

    def sample(self, index: int) -> str | None:
        if not self.request.get("temperature", 1.0):
            return None
        seed = None if self.options.ignore_seed else self.request.get("seed")
        return f"{random.random() if seed is None else seed}-{index}"

    def choices(self) -> list[tuple[str, list[str], str]]:
        """Prompt, tokens and reason of the end of each choice."""
        asked = self.request.get("max_completion_tokens") or self.request.get("max_tokens")
        limit = asked or 1_000
        choices = []
        for prompt in self.prompts():
            for index in range(self.request.get("n") or 1):
                words, reason = (
                    self.handler.server.answers.words(prompt, self.sample(index)),
                    "stop",
                )
                if self.request.get("ignore_eos"):
                    words = (words + [" more"] * limit)[:limit]
                    reason = "length"
                words, reason = _stopped(words, self.request.get("stop"), reason)
                for bound in (limit, self.options.truncate):
                    if bound is not None and len(words) > bound:
                        words, reason = words[:bound], "length"
                choices.append((prompt, words, reason))
        return choices

    def wait_for(self, token: int) -> None:
        """Wait until `token` of this request is due."""
        options = self.options
        if token == 0:
            self.due = self.started
        slow = options.slow_factor if self.number <= options.slow_requests else 1.0
        delay = options.ttft_ms if token == 0 else options.tpot_ms
        self.due += delay / 1000 * slow * self.handler.server.factor()
        time.sleep(max(0.0, self.due - time.monotonic()))

    def logprob(self, prompt: str, position: int, token: str) -> dict[str, Any]:
        def value(rank: int) -> float:
            base = -0.05 - share_of(self.options.seed, "logprob", prompt, position) - 1.5 * rank
            noise = share_of(self.options.flip_seed, "noise", prompt, position, rank) - 0.5
            return min(base + self.options.logprob_noise * noise, 0.0)

        def entry(text: str, rank: int) -> dict[str, Any]:
            return {"token": text, "logprob": value(rank), "bytes": list(text.encode())}

        count = self.request.get("top_logprobs" if self.chat else "logprobs") or 0
        top = [entry(token if rank == 0 else f" other{rank}", rank) for rank in range(count)]
        return {**entry(token, 0), "top_logprobs": top}

    def logprobs(self, prompt: str, words: list[str], first: int = 0) -> dict[str, Any] | None:
        wanted = self.request.get("logprobs")
        if self.options.no_logprobs or wanted is None or wanted is False:
            return None
        entries = [self.logprob(prompt, first + i, word) for i, word in enumerate(words)]
        if self.chat:
            return {"content": entries}
        lengths = [sum(map(len, words[:i])) for i in range(len(words))]
        return {
            "tokens": words,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": lengths,
        }

    def with_prompt(self, prompt: str, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return log-probabilities of a completion with those of its prompt before them."""
        known = self.handler.server.answers.echoed(prompt)
        before: dict[str, list[Any]] = {
            "tokens": [token for token, _ in known],
            "token_logprobs": [None, *(value for _, value in known[1:])],
            "top_logprobs": [None, *({token: value} for token, value in known[1:])],
            "text_offset": [0 for _ in known],
        }
        return {key: [*before[key], *values] for key, values in logprobs.items()}

    def usage(self, choices: list[tuple[str, list[str], str]]) -> dict[str, int]:
        prompt = sum(len(text.split()) for text in self.prompts())
        completion = sum(len(words) for _, words, _ in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": 0, "model": self.options.model}

    def answer(self) -> None:
        choices = self.choices()
        if self.request.get("stream"):
            self.stream(choices)
            return
        for token in range(max(1, *(len(words) for _, words, _ in choices))):
            self.wait_for(token)
        rows = []
        for index, (prompt, words, reason) in enumerate(choices):
            text = "".join(words)
            said = (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            logprobs = self.logprobs(prompt, words)
            if self.request.get("echo") and not self.options.no_echo:
                said = {"text": prompt + text}
                if logprobs is not None:
                    logprobs = self.with_prompt(prompt, logprobs)
            rows.append({"index": index, **said, "finish_reason": reason, "logprobs": logprobs})
        if self.options.garbage:
            self.handler.reply(200, "garbage")
            return
        kind = "chat.completion" if self.chat else "text_completion"
        self.handler.reply(200, {**self.head(kind), "choices": rows, "usage": self.usage(choices)})

    def stream(self, choices: list[tuple[str, list[str], str]]) -> None:
        handler, options = self.handler, self.options
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.close_connection = True
        handler.end_headers()
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        for token, rows in enumerate(self.chunks(choices)):
            if options.die_at_token is not None and token >= options.die_at_token:
                os._exit(3)
            if options.hang_at_token is not None and token >= options.hang_at_token:
                threading.Event().wait()
            if options.cut_stream is not None and token >= options.cut_stream:
                return
            self.wait_for(token)
            if options.garbage:
                handler.wfile.write(b"data: {\x00 not json \xff\n\nnonsense\n\n")
                continue
            for row in rows:
                self.event({**self.head(kind), "choices": [row]})
        if (self.request.get("stream_options") or {}).get("include_usage"):
            self.event({**self.head(kind), "choices": [], "usage": self.usage(choices)})
        handler.wfile.write(b"data: [DONE]\n\n")

    def chunks(self, choices: list[tuple[str, list[str], str]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of one moment: a token of each choice that is not at its end."""
        for token in range(max(1, *(len(words) for _, words, _ in choices))):
            rows = []
            for index, (prompt, words, reason) in enumerate(choices):
                if token >= max(1, len(words)):
                    continue
                new = words[token : token + 1]
                text = "".join(new)
                role = {"role": "assistant"} if token == 0 else {}
                said = {"delta": {**role, "content": text}} if self.chat else {"text": text}
                end = reason if token >= len(words) - 1 else None
                row = {"index": index, **said, "finish_reason": end}
                rows.append({**row, "logprobs": self.logprobs(prompt, new, token)})
            yield rows

    def event(self, body: object) -> None:
        self.handler.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


def _stopped(words: list[str], stop: Any, reason: str) -> tuple[list[str], str]:
    """Cut the tokens before the first stop string."""
    text = "".join(words[:10_000])
    ends = [text.find(s) for s in ([stop] if isinstance(stop, str) else stop or []) if s in text]
    if not ends:
        return words, reason
    kept, left = [], min(ends)
    for word in words:
        if left <= 0:
            break
        kept.append(word[:left])
        left -= len(word)
    return kept, "stop"


def _refusal(text: str) -> tuple[int, float]:
    status, _, share = text.partition(":")
    return int(status), float(share or 1)


def _options() -> argparse.Namespace:
    plain = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True, help="0: any free one; it is printed")
    add("--model", default="test-model")
    # answers
    add("--seed", type=int, default=0, help="what the answers follow from")
    add("--answers", type=Path, help="JSON lines with prompt and answer")
    add("--accuracy", type=float, default=0.7, help="share of right answers")
    add("--flip-seed", type=int, default=1, help="which prompts the next options hit")
    add("--lose-share", type=float, default=0.0, help="share of prompts made wrong")
    add("--gain-share", type=float, default=0.0, help="share of prompts made right")
    add("--spread", type=float, default=0.2, help="share of samples that differ")
    add("--tokens", type=int, default=12, help="words before `The answer is`")
    add("--bare", action="store_true", help="the answer alone")
    add("--ignore-seed", action="store_true", help="sampled answers differ for equal seeds")
    add("--empty-share", type=float, default=0.0, help="share of empty answers")
    add("--loop-share", type=float, default=0.0, help="share of answers that repeat themselves")
    add("--truncate", type=int, help="tokens after which an answer is cut off")
    add("--no-logprobs", action="store_true")
    add("--no-echo", action="store_true", help="a prompt is not repeated, as if not asked for")
    add("--logprob-noise", type=float, default=0.0, help="nats; noise follows from --flip-seed")
    # time
    add("--ttft-ms", type=float, default=0.0, help="time to the first token")
    add("--tpot-ms", type=float, default=0.0, help="time of each further token")
    add("--noise", type=float, default=0.0, help="sigma of the log of each token's time")
    add("--noise-seed", type=int, default=None)
    add("--loading-s", type=float, default=0.0, help="503 everywhere for so long")
    add("--slow-requests", type=int, default=0, help="first requests that are slower")
    add("--slow-factor", type=float, default=10.0, help="by how much they are")
    # faults
    add("--hang-after", type=int, help="requests after which no answer comes")
    add("--hang-at-token", type=int, help="events of a stream after which none comes")
    add("--die-after", type=int, help="requests after which the process ends with 3")
    add("--die-at-token", type=int, help="events of a stream after which it does")
    add("--refuse", type=_refusal, action="append", default=[], help="STATUS[:SHARE], as 429:0.1")
    add("--garbage", action="store_true", help="bodies and events that are no JSON")
    add("--cut-stream", type=int, help="events after which a stream's connection is closed")
    # the process
    add(
        "--child",
        action="store_true",
        help="start one that stays unless the group ends",
    )
    add("--ignore-sigterm", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = _options()
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        server = Server(options)
    except OSError as error:
        sys.exit(f"cannot listen on {options.host}:{options.port}: {error}")
    sys.stdout.write(f"listening on http://{options.host}:{server.server_address[1]}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
