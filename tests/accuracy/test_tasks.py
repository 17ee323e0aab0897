"""Tasks of lm-eval, on task files and data of the tests' own."""

from __future__ import annotations

import bz2
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from flexq_bench.accuracy import local_tasks
from flexq_bench.accuracy.errors import AccuracyError, MissingTaskError
from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.plan import EvaluationPlan
from flexq_bench.accuracy.setup import prepare
from flexq_bench.accuracy.tasks import (
    _tasks_below,
    _tasks_folder,
    check_tasks,
    run_task,
    task_name,
)
from flexq_bench.accuracy.texts import read_text
from flexq_bench.errors import FlexqError

pytest.importorskip("lm_eval", reason="tasks need lm-eval: install flexq-bench[accuracy]")
pytest.importorskip("accelerate", reason="tasks need accelerate: install flexq-bench[accuracy]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and what it brings

ZEROSHOT = Path(__file__).parents[3] / "shared" / "data" / "zeroshot"
TINY_TEXT = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama" / "heldout.txt"
QUESTIONS = [
    {"question": "an object is", "choices": ["created", "zzz", "qqq"], "label": 0},
    {"question": "the statement", "choices": ["xxx", "is executed"], "label": 1},
    {"question": "a function", "choices": ["definition", "vvv"], "label": 1},
]


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    """The model; lm-eval does not list pip's and conda's packages at each evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield load_model(str(tiny_llama), device=torch.device("cpu"))


@pytest.fixture
def a_task(tmp_path):
    """A task file with questions of its own; its path."""

    def write(name, rows, **config):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        form = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": [str(data)]},
                "cache_dir": str(tmp_path / "cache"),
            },
            "test_split": "test",
            "metadata": {"version": 3},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(form | config))
        return str(path)

    return write


@pytest.fixture
def choosing(a_task):
    return a_task(
        "choosing",
        QUESTIONS,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="label",
        metric_list=[
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm")
        ],
    )


def likeliest(loaded, row):
    """The choice of the largest likelihood, computed without lm-eval."""
    totals = []
    for choice in row["choices"]:
        question = loaded.tokenizer(row["question"]).input_ids
        whole = loaded.tokenizer(f"{row['question']} {choice}").input_ids
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
        places = range(len(question), len(whole))
        totals.append(sum(logits[i - 1, whole[i]].item() for i in places))
    return totals.index(max(totals))


def test_questions_are_answered_by_likelihood(loaded, choosing):
    found = run_task(loaded, choosing)
    expected = [float(likeliest(loaded, row) == row["label"]) for row in QUESTIONS]
    accuracy = next(metric for metric in found.metrics if metric.metric == "acc")
    assert list(accuracy.items) == expected
    assert accuracy.value == pytest.approx(sum(expected) / 3)
    assert accuracy.higher_is_better
    assert [metric.metric for metric in found.metrics] == ["acc", "acc_norm"]
    assert (found.task, found.version, found.n_items) == ("choosing", "3", 3)


@pytest.mark.slow
def test_data_hash_covers_the_questions(loaded, choosing):
    whole = run_task(loaded, choosing)
    assert run_task(loaded, choosing).data_hash == whole.data_hash
    part = run_task(loaded, choosing, limit=2)
    assert part.n_items == 2
    assert part.data_hash != whole.data_hash


def test_generative_task_has_its_own_metric(loaded, a_task):
    written = a_task(
        "writing",
        [{"question": "The lambda", "answer": "expression"}],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"max_gen_toks": 4, "until": ["\n"]},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    (metric,) = run_task(loaded, written).metrics
    assert metric.metric == "exact_match"
    assert metric.items in ((0.0,), (1.0,))


def test_zero_shot_task_reads_data_from_a_folder(loaded, tmp_path):
    lines = ["He opens the door", "1", "zzz.", "and goes in.", "qqq.", "xxx."]
    (tmp_path / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    found = run_task(loaded, "hellaswag", data=tmp_path)
    assert found.n_items == 1
    assert {metric.metric for metric in found.metrics} == {"acc", "acc_norm"}


@pytest.mark.parametrize(
    ("task", "lines", "error", "message"),
    [
        ("piqa", [], MissingTaskError, r"no data for piqa: .* has no piqa/validation"),
        ("hellaswag", ["a", "2", "b"], AccuracyError, "is cut off: each item has 6 lines"),
        ("hellaswag", [], AccuracyError, "is empty"),
        ("hellaswag", ["a", "4", *"bcde"], AccuracyError, r"line 2: '4' is no label"),
        ("nowhere.yaml", [], AccuracyError, r"no task file nowhere\.yaml"),
    ],
)
def test_task_without_usable_data_is_refused(tmp_path, task, lines, error, message):
    (tmp_path / "hellaswag_val_full.txt.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    with pytest.raises(error, match=message):
        check_tasks([task], tmp_path)


def test_invalid_items_make_a_task_missing(loaded, a_task):
    spoiled = a_task(
        "spoiled",
        [{"question": "The lambda"}],
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices.text}}",
        doc_to_target="{{label}}",
    )
    with pytest.raises(MissingTaskError, match=r"can't evaluate .*'label' is undefined"):
        run_task(loaded, spoiled)


def test_task_is_named_after_its_file():
    assert task_name("some/where/mine.yaml") == "mine"
    assert task_name("piqa") == "piqa"


@pytest.mark.slow
def test_an_unknown_task_lists_near_ones():
    with pytest.raises(
        AccuracyError, match=r"no task 'lambada_opnai' in lm-eval: near are .*lambada_openai"
    ):
        check_tasks(["lambada_opnai"], None)


@pytest.mark.slow
def test_every_task_of_lm_eval_is_known():
    from lm_eval.tasks import TaskManager

    known = set(_tasks_below(_tasks_folder()))

    index = set(TaskManager().all_tasks)
    assert index <= known
    assert len(known - index) < 10  # names that nothing defines as a whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("nowhere.yaml",)}, "no task file"),
        ({"schemes": ("w0",)}, "no scheme 'w0'"),
        ({"reference": ",,"}, "no model ,,"),
    ],
)
def test_names_are_checked_before_a_model_is_loaded(tiny_llama, changes, message):
    loading = ExitStack()
    loading.callback(pytest.fail, "it began to load")
    plan = EvaluationPlan(**{"schemes": (), "texts": (read_text(str(TINY_TEXT)),)} | changes)

    with pytest.raises(FlexqError, match=message):
        prepare(str(tiny_llama), plan, device="cpu", dtype=None, trigger="gate", loading=loading)


@pytest.mark.slow
@pytest.mark.skipif(not ZEROSHOT.is_dir(), reason="the zero-shot sets are not in shared/")
@pytest.mark.parametrize("name", ["piqa", "arc_easy", "arc_challenge", "boolq", "winogrande"])
def test_published_sets_are_evaluated(loaded, name):
    found = run_task(loaded, name, data=ZEROSHOT, limit=4)
    assert found.n_items == 4
    assert 0 <= found.metrics[0].value <= 1


def rows_of(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def answering(loaded, monkeypatch):
    """answering(text): the model answers every prompt with it; returns the list of prompts."""
    from lm_eval.models.huggingface import HFLM

    prompts = []

    def answer(text):
        def generate(_, requests, **__):
            prompts.extend(request.args[0] for request in requests)
            return [text] * len(requests)

        monkeypatch.setattr(HFLM, "generate_until", generate)
        return prompts

    return answer


@pytest.fixture
def templated(tiny_llama):
    """The model with a chat template, as instruct models' tokenizers have one."""
    model = load_model(str(tiny_llama), device=torch.device("cpu"))
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return model


SUMS = [{"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in (2, 600)]


@pytest.mark.parametrize(
    ("written", "strict", "flexible"),
    [("So it is\n#### 4", (1, 0), (1, 0)), ("2 and 2, that is $1,200.", (0, 0), (0, 1))],
)
def test_gsm8k_uses_both_filters_of_lm_eval(loaded, answering, tmp_path, written, strict, flexible):
    rows_of(tmp_path / "gsm8k" / "test.jsonl", SUMS)
    rows_of(tmp_path / "gsm8k" / "train.jsonl", SUMS)
    prompts = answering(written)

    found = run_task(loaded, "gsm8k", data=tmp_path, few_shot=1)

    items = {metric.metric: metric.items for metric in found.metrics}
    assert items == {
        "exact_match,strict-match": strict,
        "exact_match,flexible-extract": flexible,
    }
    assert prompts[0].count("Question:") == 2  # an example before the question


def test_a_chat_template_wraps_questions_and_examples(templated, loaded, answering, tmp_path):
    rows_of(tmp_path / "gsm8k" / "test.jsonl", SUMS[:1])
    rows_of(tmp_path / "gsm8k" / "train.jsonl", SUMS[1:])
    prompts = answering("#### 4")

    found = run_task(templated, "gsm8k", data=tmp_path, few_shot=1, chat_template=True)

    assert prompts[0].startswith("<user>Question: What is 600")
    assert prompts[0].count("<user>") == 2
    assert prompts[0].endswith("<assistant>")
    plain = run_task(templated, "gsm8k", data=tmp_path, few_shot=1)
    assert plain.data_hash != found.data_hash
    with pytest.raises(AccuracyError, match="tiny-llama has no chat template"):
        run_task(loaded, "gsm8k", data=tmp_path, chat_template=True)


@pytest.mark.parametrize(("written", "followed"), [("A LOUD ANSWER", 1), ("A quiet one", 2)])
def test_ifeval_checks_that_instructions_were_followed(
    loaded, answering, tmp_path, written, followed
):
    for package in ("langdetect", "immutabledict"):
        pytest.importorskip(package, reason="ifeval: pip install 'lm-eval[ifeval]'")
    names = ["keywords:forbidden_words", "punctuation:no_comma"]
    kwargs = [{"forbidden_words": ["loud"]}, {}]
    row = {"key": 1, "prompt": "Be quiet.", "instruction_id_list": names, "kwargs": kwargs}
    rows_of(tmp_path / "ifeval" / "train.jsonl", [row])
    answering(written)

    found = run_task(loaded, "ifeval", data=tmp_path)

    values = {metric.metric: metric.value for metric in found.metrics}
    assert values["inst_level_strict_acc"] == followed / 2
    assert values["prompt_level_strict_acc"] == float(followed == 2)


def mmlu(folder, sizes):
    """Questions of these subjects; the answer goes round."""
    for subject, count in sizes.items():
        rows = [
            {"question": f"{subject} {n}?", "choices": ["a", "b", "c", "d"], "answer": n % 4}
            for n in range(count)
        ]
        rows_of(folder / "mmlu" / subject / "test.jsonl", rows)
        rows_of(folder / "mmlu" / subject / "dev.jsonl", rows[:1])


def test_mmlu_weights_subjects_by_size(loaded, tmp_path, monkeypatch):
    sizes = {"anatomy": 5, "astronomy": 1}
    monkeypatch.setattr(local_tasks, "mmlu_subjects", lambda: tuple(sizes))
    mmlu(tmp_path, sizes)

    found = run_task(loaded, "mmlu", data=tmp_path, few_shot=1)

    (metric,) = found.metrics
    assert (found.task, found.n_items, metric.metric) == ("mmlu", 6, "acc")
    assert len(metric.items) == 6
    assert metric.value == pytest.approx(sum(metric.items) / 6)
    by_subject = {"mmlu_anatomy": metric.items[:5], "mmlu_astronomy": metric.items[5:]}
    assert metric.parts == {name: sum(i) / len(i) for name, i in by_subject.items()}


def test_mmlu_without_all_subjects_is_missing(tmp_path):
    mmlu(tmp_path, {"anatomy": 1})
    with pytest.raises(MissingTaskError, match=r"56 of mmlu's 57 subjects: .*mmlu/abstract_alg"):
        check_tasks(["mmlu"], tmp_path)


@pytest.mark.slow
def test_all_subjects_of_mmlu_are_evaluated(loaded, tmp_path):
    mmlu(tmp_path, dict.fromkeys(local_tasks.mmlu_subjects(), 1))
    found = run_task(loaded, "mmlu", data=tmp_path)
    assert found.n_items == len(found.metrics[0].items) == len(found.metrics[0].parts) == 57
