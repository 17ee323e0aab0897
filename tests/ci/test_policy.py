"""Policy files of the performance gate."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from flexq_bench.ci.policy import load_policy
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload

TOP = 'version = 1\nsuite = "smoke"\nslower_percent = 2\nowner = "all"\n'
WAIVER = """
[[waiver]]
kernels = ["flexq-w6a6"]
reason = "known"
owner = "Ada"
expires = 2026-01-31
"""


@pytest.fixture
def policy(tmp_path: Path):
    def read(text: str):
        path = tmp_path / "gate.toml"
        path.write_text(text)
        return load_policy(str(path))

    return read


def case(label: str, m: int = 1, n: int = 256, k: int = 256) -> Case:
    name, _, variant = label.rstrip("]").partition("[")
    return Case(name, GemmWorkload(m, n, k), variant=variant)


def test_bundled_policy_can_be_loaded():
    found = load_policy("default")

    assert found.name == "default"
    assert found.limit_of(case("flexq-w6a6")).slower_percent == 1.0
    assert found.owner_of(case("read-6")) == "kernels"


def test_documented_policy_can_be_loaded(policy):
    page = Path(__file__).parents[2] / "docs" / "verdicts.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)

    found = policy(example)

    assert (len(found.limits), len(found.waivers)) == (2, 1)


def test_first_fitting_limit_counts(policy):
    found = policy(
        TOP
        + '[[limit]]\nkernels = ["flexq-w6a6"]\nslower_percent = 1\nowner = "Ada"\n'
        + '[[limit]]\nkernels = ["flexq-*", "flexq-*[*]"]\nslower_percent = 3\n'
    )

    limits = [
        found.limit_of(case(label)).slower_percent
        for label in ("flexq-w6a6", "flexq-w6a8", "flexq-w6a6[plain]", "cublas-fp16")
    ]
    assert limits == [1, 3, 3, 2]
    assert (found.owner_of(case("flexq-w6a6")), found.owner_of(case("flexq-w6a8"))) == (
        "Ada", "all",
    )  # fmt: skip


def test_limit_is_of_an_operations_parameters(policy):
    found = policy(
        TOP
        + '[[limit]]\nkernels = ["*"]\noperations = ["attention_*"]\nslower_percent = 7\n'
        + 'parameters = {context = "1024:", layout = "paged"}\n'
    )

    def attention(context, layout):
        values = (("context", context), ("layout", layout))
        return Case("sdpa", OperationWorkload("attention_decode", values), stage="op")

    cases = (attention(2048, "paged"), attention(64, "paged"), attention(2048, "contiguous"))
    limits = [found.limit_of(one).slower_percent for one in (*cases, case("sdpa"))]
    assert limits == [7, 2, 2, 2]


def test_waiver_counts_until_the_end_of_its_last_day(policy):
    found = policy(TOP + WAIVER)

    assert found.waiver_of(case("flexq-w6a6"), date(2026, 1, 31)) is not None
    assert found.waiver_of(case("flexq-w6a6"), date(2026, 2, 1)) is None
    assert found.waiver_of(case("flexq-w6a8"), date(2026, 1, 1)) is None


def test_waiver_may_select_shapes_only(policy):
    found = policy(TOP + WAIVER + 'shapes = ["256x256"]\nm = "1,4:8"\n')
    day = date(2026, 1, 1)

    assert found.waiver_of(case("flexq-w6a6", m=5), day) is found.waivers[0]
    assert found.waiver_of(case("flexq-w6a6", m=2), day) is None
    assert found.waiver_of(case("flexq-w6a6", n=512), day) is None
    assert found.waivers[0].name == "flexq-w6a6 256x256 m=1,4:8"


@pytest.mark.parametrize(
    ("keys", "gpu", "m", "regime", "fits"),
    [
        ('gpus = ["*h200*"]', "NVIDIA H200", 1, "boost", True),
        ('gpus = ["*h200*", "A CPU"]', "NVIDIA H100", 1, "boost", False),
        ('regimes = ["sustained"]', "NVIDIA H200", 1, "sustained", True),
        ('regimes = ["sustained"]', "NVIDIA H200", 1, "boost", False),
        ('m = "1:16,64:"', "NVIDIA H200", 16, "boost", True),
        ('m = "1:16,64:"', "NVIDIA H200", 17, "boost", False),
        ('m = "1:16,64:"', "NVIDIA H200", 65_536, "boost", True),
        ('gpus = ["*H200"]\nm = "8"\nshapes = ["256x256"]', "NVIDIA H200", 8, "boost", True),
        ('gpus = ["*H200"]\nm = "8"\nshapes = ["256x512"]', "NVIDIA H200", 8, "boost", False),
    ],
)
def test_limit_and_waiver_select_gpu_regime_and_size(policy, keys, gpu, m, regime, fits):
    limit = f'[[limit]]\nkernels = ["flexq*"]\nslower_percent = 1\nowner = "Ada"\n{keys}\n'
    found = policy(TOP + limit + WAIVER + keys).on(gpu)
    judged = replace(case("flexq-w6a6", m=m), regime=regime)

    assert found.limit_of(judged).slower_percent == (1 if fits else 2)
    assert (found.waiver_of(judged, date(2026, 1, 1)) is not None) is fits


def test_owner_of_label_is_of_the_gpus_limit(policy):
    limit = '[[limit]]\nkernels = ["flexq*"]\nslower_percent = 1\nowner = "Ada"\ngpus = ["*H200"]'
    found = policy(TOP + limit)

    assert found.owner_of_label("flexq-w6a6", ["NVIDIA H200"]) == "Ada"
    assert found.owner_of_label("flexq-w6a6", ["NVIDIA H100"]) == "all"


def test_next_waiver_counts_after_an_expired_one(policy):
    found = policy(TOP + WAIVER + WAIVER.replace("2026-01-31", "2027-01-31"))

    assert found.waiver_of(case("flexq-w6a6"), date(2026, 6, 1)) is found.waivers[1]


def test_suite_file_is_relative_to_the_policy(policy, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'description = "mine"\n[[group]]\nkernels = ["flexq*"]\nm = "1"\nshapes = ["32x32"]\n'
    )

    assert policy(TOP.replace("smoke", "mine.toml")).suite.name == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "gate.toml: version is missing: begin with version = 1"),
        ("version = 2\nnew_key = 1", "version is 2, this flexq-bench reads 1"),
        ("version = true", "version is True"),
        (TOP + "slower_percnt = 1", "no key 'slower_percnt' here: the keys are slower_percent"),
        (TOP.replace('suite = "smoke"\n', ""), "suite is missing"),
        (TOP.replace("smoke", "smok"), "suite: no suite 'smok': there are smoke"),
        (TOP.replace("= 2", "= -1"), "slower_percent must be a number of at least 0, got -1"),
        (TOP.replace("= 2", "= nan"), "slower_percent must be a number of at least 0, got nan"),
        (TOP.replace("= 2", '= "2"'), "got '2'"),
        (
            TOP + '[[limit]]\nkernels = ["flexq*"]\nslower_pct = 1',
            "gate.toml, limit 1: no key 'slower_pct' here: the keys are slower_percent",
        ),
        (
            TOP + '[[limit]]\nkernels = ["FlexQ W6"]\nslower_percent = 1',
            "limit 1: kernels: a kernel is written name",
        ),
        (TOP + "[[limit]]\nkernels = []\nslower_percent = 1", "kernels must be a list of strings"),
        (TOP + WAIVER.replace("reason", "reasn"), "waiver 1: no key 'reasn' here: the keys are r"),
        (TOP + WAIVER.replace('owner = "Ada"\n', ""), "waiver 1: owner is missing"),
        (TOP + WAIVER.replace("2026-01-31", '"soon"'), "expires must be a date like 2026-01-31"),
        (TOP + WAIVER.replace("2026-01-31", "2026-01-31T10:00:00"), "expires must be a date"),
        (TOP + WAIVER + 'shapes = ["256"]', "shapes must be N x K, for example 4096x4096"),
        (TOP + WAIVER + 'm = "x"', "waiver 1: m: "),
        (TOP + WAIVER + 'm = "8:4"', "waiver 1: m: '8:4' runs backwards"),
        (TOP + WAIVER + 'gpus = "H200"', "waiver 1: gpus must be a list of strings"),
        (TOP + WAIVER + 'regimes = ["bost"]', "waiver 1: regimes: no regime 'bost'"),
        (TOP + "limit = 3", "limit must be tables, each under [[limit]]"),
        ("version = ", "gate.toml is not TOML"),
    ],
)
def test_malformed_policy_is_one_line(policy, text, says):
    with pytest.raises(WorkloadError) as caught:
        policy(text)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limit_of_a_kernel_outside_the_suite_is_refused(policy, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'description = "mine"\n[[group]]\nkernels = ["flexq-w6a6"]\nm = "1"\nshapes = ["32x32"]\n'
    )
    text = TOP.replace("smoke", "mine.toml")

    with pytest.raises(WorkloadError, match=r"limit 1: kernels: .*'flexq-w6a7'.* flexq-w6a6"):
        policy(text + '[[limit]]\nkernels = ["flexq-w6a7"]\nslower_percent = 1')


def test_unknown_policy_lists_known_ones():
    with pytest.raises(WorkloadError, match="no policy 'defalt': there is default; or give a"):
        load_policy("defalt")
    with pytest.raises(WorkloadError, match=r"can't read nowhere/x\.toml"):
        load_policy("nowhere/x.toml")
