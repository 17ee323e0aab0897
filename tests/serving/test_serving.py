"""serve-model as the public client of OpenAI's API uses it."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

PROMPTS = ["def main(", "The following functions are", "class Foo:\n    def", "Return the"]
CHAT = [{"role": "user", "content": "The following functions are"}]


def ids_of(answer):
    return [int(name.removeprefix("token_id:")) for name in answer.choices[0].logprobs.tokens]


@pytest.mark.parametrize(
    "prompt", [PROMPTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in PROMPTS[1:])]
)
def test_greedy_tokens_equal_those_of_decode(served, greedy, prompt):
    ids = served.vocabulary.tokens(prompt)
    extra = {"return_tokens_as_token_ids": True, "ignore_eos": True}

    answer = served.complete(prompt, max_tokens=40, logprobs=0, extra_body=extra)

    assert ids_of(answer) == greedy(ids, 40)
    assert answer.choices[0].text == served.vocabulary.text(greedy(ids, 40))
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 40
    assert answer.choices[0].finish_reason == "length"


def test_answer_ends_at_an_end_token_of_the_generation_config(
    start, served, model, greedy, tmp_path
):
    tokens = greedy(served.vocabulary.tokens(PROMPTS[0]), 24)
    count = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    folder = shutil.copytree(model, tmp_path / "ending")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, tokens[count]]}))

    answer = start(slots=1, folder=folder).complete(PROMPTS[0])

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == served.vocabulary.text(tokens[:count])
    assert answer.usage.completion_tokens == count + 1


def test_server_starts_with_settings_beyond_a_socket_buffer(start):
    name = "large" * 200_000

    with start(slots=1, name=name).client() as client:
        assert [model.id for model in client.models.list()] == [name]


def test_clients_at_once_get_what_each_gets_alone(served):
    alone = [served.complete(prompt).choices[0].text for prompt in PROMPTS]

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda p: served.complete(p).choices[0].text, PROMPTS * 8))

    assert together == alone * 8


def test_streamed_completion_equals_the_whole(served):
    whole = served.complete(PROMPTS[1], logprobs=2)

    events = served.complete(
        PROMPTS[1], logprobs=2, stream=True, stream_options={"include_usage": True}
    )

    *parts, last = events
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [t for part in parts for t in part.choices[0].logprobs.tokens] == (
        whole.choices[0].logprobs.tokens
    )
    assert [part.choices[0].finish_reason for part in parts] == [None] * 23 + ["length"]
    assert (last.choices, last.usage) == ([], whole.usage)


def test_chat_is_the_completion_of_its_template(served):
    asked = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 24}
    prompt = "user: The following functions are\nassistant:"
    with served.client() as client:
        whole = client.chat.completions.create(**asked)
        parts = list(client.chat.completions.create(**asked, stream=True))
        parted = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
        by_parts = client.chat.completions.create(**asked | {"messages": parted})

    assert whole.choices[0].message.content == served.complete(prompt).choices[0].text
    assert whole.choices[0].message.role == "assistant"
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == (
        whole.choices[0].message.content
    )
    assert by_parts.choices == whole.choices


def test_chat_without_max_tokens_fills_the_context(served):
    with served.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
        )

    assert answer.usage.total_tokens == 256


def test_log_probabilities_are_those_of_the_model(served, greedy):
    prompt = served.vocabulary.tokens(PROMPTS[1])
    tokens = greedy(prompt, 8)
    ids = torch.tensor([[*prompt, *tokens]], dtype=torch.int32)
    # The engine of the server is idle, and a slot's cache is written anew with each request.
    logits = served.prepared.engine.logits(ids, first_slot=31)[0].float()
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=1)

    answer = served.complete(PROMPTS[1], max_tokens=8, logprobs=3).choices[0].logprobs

    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.tensor(answer.token_logprobs) == pytest.approx(own, abs=0.02)
    for row, top in zip(expected, answer.top_logprobs, strict=True):
        assert sorted(top.values(), reverse=True) == list(top.values())
        assert list(top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=0.02)


def test_chat_has_log_probabilities_of_the_completion(served):
    prompt = "user: The following functions are\nassistant:"
    other = served.complete(prompt, logprobs=4).choices[0].logprobs
    with served.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, max_tokens=24, logprobs=True, top_logprobs=4
        )

    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == other.tokens
    assert [entry.logprob for entry in content] == pytest.approx(other.token_logprobs)
    assert [len(entry.top_logprobs) for entry in content] == [4] * 24


@pytest.mark.parametrize("length", [3, 60, 150])
def test_echo_scores_the_prompt_as_generation_does(served, length):
    prompt = (served.vocabulary.tokens(PROMPTS[2]) * 60)[:length]
    answer = served.complete(prompt, max_tokens=12, logprobs=2)
    generated = answer.choices[0].logprobs
    extra = {"return_tokens_as_token_ids": True}
    longer = prompt + ids_of(served.complete(prompt, max_tokens=12, logprobs=2, extra_body=extra))

    echoed = served.complete(longer, max_tokens=0, echo=True, logprobs=2)

    scores = echoed.choices[0].logprobs
    assert scores.token_logprobs[0] is None
    assert len(scores.tokens) == length + 12
    assert scores.token_logprobs[length:] == pytest.approx(generated.token_logprobs, abs=0.02)
    assert echoed.choices[0].text == served.vocabulary.text(longer)
    assert echoed.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_ends_the_answer(served, stream):
    whole = served.complete(PROMPTS[1]).choices[0]
    names = served.complete(PROMPTS[1], logprobs=0).choices[0].logprobs.tokens
    border = len("".join(names[:9]))
    stop = whole.text[border - 1 : border + 2]
    expected = whole.text[: whole.text.index(stop)]

    answer = served.complete(PROMPTS[1], stop=[stop, "not there"], stream=stream)

    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(part.text for part in parts) == expected
    assert parts[-1].finish_reason == "stop"


def test_seed_determines_samples_beside_any_others(served):
    def sampled(seed, n=1, **others):
        answer = served.complete(PROMPTS[0], temperature=1.2, seed=seed, n=n, **others)
        return [choice.text for choice in answer.choices]

    first = sampled(7, n=3)
    with ThreadPoolExecutor(6) as pool:
        again = list(pool.map(sampled, [7] * 3 + [8] * 3, [3] * 6))

    assert len(set(first)) == 3
    assert again[:3] == [first] * 3
    assert all(other == again[3] and other != first for other in again[3:])
    assert len({sampled(None)[0] for _ in range(4)}) > 1


def test_prompts_and_samples_are_choices_in_order(served):
    both = served.complete(PROMPTS[:2], n=2)

    alone = [served.complete(prompt).choices[0].text for prompt in PROMPTS[:2]]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [alone[0]] * 2 + [alone[1]] * 2
    assert both.usage.completion_tokens == 4 * 24


def test_models_and_health_are_listed(served):
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").max_model_len == 256
    with urllib.request.urlopen(f"{served.url}/health") as answer:
        assert json.load(answer)["status"] == "ok"


@pytest.mark.parametrize(
    ("parameters", "error", "named"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"max_tokens": 300}, openai.BadRequestError, "256"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": float("1e9")}, openai.BadRequestError, "temperature"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a"] * 1000}, openai.BadRequestError, "prompt"),
        ({"extra_body": {"top_k": 10**400}}, openai.BadRequestError, "top_k"),
        ({"prompt": [99999]}, openai.BadRequestError, "prompt"),
        ({"prompt": {"a": 1}}, openai.BadRequestError, "prompt"),
        ({"logprobs": 99}, openai.BadRequestError, "logprobs"),
        ({"presence_penalty": 1.0}, openai.BadRequestError, "presence_penalty"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json"),
        ({"n": 10_000}, openai.BadRequestError, "n"),
    ],
)
def test_wrong_request_is_refused_in_the_form_of_the_api(served, parameters, error, named):
    with served.client() as client, pytest.raises(error, match=named) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "a", **parameters})

    assert refused.value.body["type"] == "invalid_request_error"


def refused(server, path, body=None, **headers):
    """Status and content of an answer that is an error."""
    request = urllib.request.Request(f"{server.url}{path}", body, headers)
    with pytest.raises(urllib.error.HTTPError) as error, urllib.request.urlopen(request):
        pass
    with error.value as answer:
        return answer.code, answer.read()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'{"model":"\\ud800","prompt":"a"}', b"[" * 100_000, b"\xff"]
)
def test_nonsense_is_refused_with_a_client_error(served, body):
    code, content = refused(served, "/v1/completions", body)

    assert 400 <= code < 500
    assert json.loads(content)["error"]["message"]


def test_half_a_surrogate_pair_is_refused(served):
    body = json.dumps({"model": "tiny", "prompt": "\ud800"}).encode()

    assert refused(served, "/v1/completions", body)[0] == 400


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1e-300},
        {"temperature": 100, "top_p": 1e-300},
        {"temperature": 1, "extra_body": {"top_k": 2**31}},
        {"temperature": 1, "seed": 10**300},
        {"temperature": 1, "stop": ["", "x" * 10_000]},
    ],
)
def test_extreme_parameters_end_no_engine(served, parameters):
    # Its end may be drawn.
    assert 1 <= served.complete("a", max_tokens=4, **parameters).usage.completion_tokens <= 4


def test_neutral_parameters_are_accepted(served):
    neutral = {"presence_penalty": 0.0, "best_of": 1, "logit_bias": {}, "user": "somebody"}

    assert served.complete("a", **neutral).choices[0].text == served.complete("a").choices[0].text


def test_model_without_template_refuses_chat(start, untrained_chat):
    plain = start(slots=1, folder=untrained_chat)

    with plain.client() as client, pytest.raises(openai.BadRequestError, match="template"):
        client.chat.completions.create(model="tiny", messages=CHAT)


def test_other_hosts_are_refused(served):
    assert refused(served, "/v1/models", Host="evil.example")[0] == 403


def health(server):
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        return json.load(answer)


def slowed(server, monkeypatch):
    """Steps take 50 ms each; returns the list that grows with each."""
    steps, advance = [], server.prepared.engine.advance

    def slow(batch, bucket):
        steps.append(batch)
        time.sleep(0.05)
        return advance(batch, bucket)

    monkeypatch.setattr(server.prepared.engine, "advance", slow)
    return steps


@pytest.fixture(scope="module")
def narrow(start):
    """A server of one sequence at a time and one that waits."""
    return start(slots=1, max_waiting=1)


@pytest.mark.parametrize("stream", [True, False])
def test_request_of_a_client_that_left_is_dropped(narrow, monkeypatch, eventually, stream):
    steps = slowed(narrow, monkeypatch)
    endless = {"max_tokens": 240, "extra_body": {"ignore_eos": True}}
    if stream:
        with narrow.client() as client:
            answer = client.completions.create(model="tiny", prompt="a", stream=True, **endless)
            next(iter(answer))
    else:
        with narrow.client(timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
            client.completions.create(model="tiny", prompt="a", **endless)

    eventually(lambda: health(narrow)["running"] == 0)
    assert len(steps) < 200
    assert narrow.complete("a", max_tokens=2).usage.completion_tokens == 2


def test_full_queue_answers_429_and_serves_the_rest(narrow, monkeypatch):
    slowed(narrow, monkeypatch)

    def asked(_):
        try:
            return narrow.complete("a", max_tokens=8).choices[0].text
        except openai.RateLimitError as error:
            return error

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(asked, range(6)))

    texts = [answer for answer in answers if isinstance(answer, str)]
    assert 2 <= len(texts) < 6
    assert len(set(texts)) == 1


def test_failed_pass_is_an_error_for_everybody(start, monkeypatch):
    server = start(slots=2)

    def failing(batch, bucket):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(server.prepared.engine, "advance", failing)

    with pytest.raises(openai.InternalServerError, match="out of registers"):
        server.complete("a")
    with pytest.raises(openai.InternalServerError, match="out of registers"):
        server.complete("a")
    assert refused(server, "/health")[0] == 503
