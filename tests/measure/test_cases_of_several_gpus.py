"""Cases of several GPUs: a process on each, here gloo's on a CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from thread_ranks import RankThreads

from flexq_bench.kernels import registry
from flexq_bench.kernels.external.declaration import DefinitionError
from flexq_bench.kernels.external.declare import kernel
from flexq_bench.kernels.external.loading import load
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure import meter as meters
from flexq_bench.measure.ab import InterleaveRules, compare_commits
from flexq_bench.measure.ab.operations import WorkerOperations
from flexq_bench.measure.external_kernels import adopt
from flexq_bench.measure.kernel_processes import ProcessOptions
from flexq_bench.measure.rank_worker import RankedFunction, RankOperations
from flexq_bench.measure.ranked_case import RankedCase, RankedCases
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.repository.git import git_output
from flexq_bench.repository.provenance import ROOT
from flexq_bench.runs.process_meter import ProcessMeter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter, operation

CPU = torch.device("cpu")


def all_reduce(elements, gpus=2, **fields):
    workload = operation("all_reduce").workload(elements=elements, gpus=gpus)
    return Case("all-reduce", workload, stage="op", **fields)


class Alike(Ranks):
    """Two ranks with the same vectors, of which this is the first; `add` as given."""

    count = 2

    def __init__(self, add):
        self._add = add

    def add(self, x):
        return self._add(x)

    add_by_library = add

    def joined(self, x):
        return torch.cat([x, x], dim=1)

    def exchange(self, sent):
        sent.clone()


@pytest.mark.slow
def test_sums_of_two_processes_have_time_check_and_floor():
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        results = [meter.measure(all_reduce(n)) for n in (8192, 1 << 18)]
    finally:
        meter._ranked.end()

    for result in results:
        assert result.status in ("ok", "noisy"), result.detail
        assert result.max_rel_error is not None
        assert 0 < result.floor_us < result.median_us
        assert len(result.extra["devices"]) == 2
    assert results[1].floor_us == pytest.approx(32 * results[0].floor_us)


# The vectors of ranks are not equal.
@pytest.mark.parametrize("add", [lambda x: x, lambda x: x.mul_(2)], ids=["alone", "doubled"])
def test_a_sum_that_lacks_the_other_ranks_vector_is_found(add):
    operations = RankOperations(CPU, Alike(add))
    operations.prepare(all_reduce(4096).key, 0, 1)

    assert operations.check("before")["detail"]
    operations.place(0)
    operations.sample(2)
    assert operations.inspect()["detail"]


def test_a_machine_with_too_few_gpus_is_a_stated_outcome(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    meter.backend, meter.capability = "cuda", (9, 0)
    monkeypatch.setattr(meters, "device_infos", lambda name, count: [meter.device_info])

    with pytest.raises(meters.UnsupportedError, match=r"needs 2 GPUs of a host, .* first of 1"):
        meter._check_supported(registry.resolve("all-reduce", "cuda").spec, all_reduce(64))


GATHER = '''
import torch
from torch import distributed
from flexq_bench.api import Input, Output, kernel, operation

@operation(
    "gather_rows",
    parameters=["elements", "gpus=2"],
    inputs=[Input("x", ("gpus", "elements"), "dtype", "activation")],
    outputs=[Output("y", ("gpus", "gpus", "elements"), "dtype")],
)
def gather_rows(x, gpus):
    """The vectors of all GPUs, on each of them."""
    return x.expand(gpus, *x.shape)

@kernel(gather_rows, "gather", dtype="bf16")
def gather(x, y, *, elements):
    distributed.all_gather_into_tensor(y.flatten(), x)

@kernel(gather_rows, "own", dtype="bf16", returns=True)
def own(x, *, gpus):
    return x.repeat(gpus, 1)

@operation(
    "narrow_rows",
    parameters=["elements", "gpus=2"],
    inputs=[Input("x", ("gpus", "elements"), "fp32", "activation")],
    outputs=[
        Output("y", ("gpus", "elements"), "fp8"),
        Output("is_large", ("gpus", "elements"), "bool"),
    ],
)
def narrow_rows(x):
    return {"y": x, "is_large": x > 1}

@kernel(narrow_rows, "narrow", returns=True)
def narrow(x):
    return x.to(torch.float8_e4m3fn), x > 1

kept = []

@kernel(gather_rows, "stale", dtype="bf16")
def stale(x, y):
    if not kept:
        distributed.all_gather_into_tensor(y.flatten(), x)
        kept.append(y.clone())
    y.copy_(kept[0])
'''


@pytest.fixture
def gathering(tmp_path):
    """Kernels of a file, for several GPUs, by name."""
    file = tmp_path / "acme.py"
    file.write_text(GATHER)
    loaded = load(KernelSource.parse(str(file))).kernels
    return {k.spec.name.partition(".")[2]: k for k in loaded if k.spec.backend == "cpu"}


def gather_case(name, **fields):
    workload = operation("gather_rows").workload(elements=256, gpus=2)
    return Case(f"acme.{name}", workload, stage="op", **fields)


@pytest.mark.parametrize("name", ["gather", "own", "stale"])
def test_function_of_several_gpus_is_given_its_rows(gathering, monkeypatch, name):
    here, launch = threading.local(), RankedFunction.launch

    def noting(kernel, ranks, given):
        here.ranks = ranks
        return launch(kernel, ranks, given)

    def gathered(y, x):
        y.copy_(here.ranks.joined(x[None]).view(y.shape))

    monkeypatch.setattr(RankedFunction, "launch", noting)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(registry, "resolve", lambda *_: gathering[name])
    case = RankedCase(RankThreads(), gather_case(name), 0, 1)
    details = [case.check("before").detail]
    with case.placed(0) as placed:
        placed.rotation.sample(2)
        details.append(placed.inspect())

    assert [bool(detail) for detail in details] == [name == "own", name != "gather"]


def test_outputs_of_one_byte_are_joined_as_bytes(gathering, monkeypatch):
    class OfBytes(Alike):
        def joined(self, x):
            assert x.dtype == torch.uint8
            return super().joined(x)

    monkeypatch.setattr(registry, "resolve", lambda *_: gathering["narrow"])
    operations = RankOperations(CPU, OfBytes(None))
    operations._link_rate = 1.0
    workload = operation("narrow_rows").workload(elements=64, gpus=2)
    operations.prepare(Case("acme.narrow", workload, stage="op").key, 0, 1)

    detail = operations.check("before")["detail"]

    assert "y[1," in detail  # both ranks have the row of this one


@pytest.mark.slow
def test_functions_of_two_processes_are_judged_by_their_parent(tmp_path):
    file = tmp_path / "acme.py"
    file.write_text(GATHER)
    kernels = adopt([KernelSource.parse(str(file))])
    options = ProcessOptions("cpu", 0, Tuning.NONE, 100.0, 100.0)

    with ProcessMeter(options, kernels) as meter:
        results = [meter.measure(gather_case(name)) for name in ("gather", "stale")]

    assert results[0].status in ("ok", "noisy"), results[0].detail
    assert results[1].status == "incorrect"


@pytest.mark.parametrize(
    ("shape", "options", "error"),
    [
        (("elements",), {}, "begin all shapes with gpus"),
        (("gpus", "elements"), {"dtype": "fp16", "updates": {"y": "x"}}, "has no updates"),
        (("gpus", "elements"), {"activation": "int8/row"}, "x of mine is quantized"),
    ],
)
def test_declarations_that_no_rank_can_run_are_refused(shape, options, error):
    def declared():
        mine = Operation(
            "mine",
            "",
            (Parameter("elements", ""), Parameter("gpus", "", minimum=2)),
            (Input("x", shape, "activation", "activation"),),
            (Output("y", shape, "activation"),),
        )
        kernel(mine, "mine", **options)(lambda x, y: None)

    with pytest.raises((WorkloadError, DefinitionError), match=error):
        declared()


@pytest.mark.slow
def test_ranks_that_die_fail_one_case_only(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        prepared = meter._ranked.prepared(all_reduce(4096), 0, 1)
        prepared._ranks._processes[1].kill()
        # Either comes first.
        with pytest.raises(WorkerError, match=r"died|closed by peer"):
            prepared.check("before")
        assert meter._ranked.prepared(all_reduce(4096), 0, 1).check("before").detail == ""
    finally:
        meter._ranked.end()


class Scripted:
    """Ranks that answer without processes."""

    is_broken = False

    def __init__(self):
        self.asked = []

    def ask(self, what, **arguments):
        self.asked.append(what)
        times = [20.0 + 0.1 * (i % 3) for i in range(arguments.get("count", 0))]
        prepared = {"launches": 4, "floor_us": 10.0, "link_gb_s": 1.0}
        checked = {"max_rel_error": 0.0, "exact": False, "detail": ""}
        return [{"uuid": "a", "times_us": times, **prepared, **checked}] * 2


@pytest.fixture
def side(monkeypatch):
    """A worker of a comparison on a CPU, and its ranks."""
    operations, ranks = WorkerOperations(Meter("cpu", tuning=Tuning.NONE)), Scripted()
    monkeypatch.setattr(
        RankedCases, "prepared", lambda _, case, *seeds: RankedCase(ranks, case, *seeds)
    )
    return operations, ranks


def test_a_comparison_times_all_ranks(side):
    operations, ranks = side

    prepared = operations.prepare("base", all_reduce(4096).key)
    operations.place("base", 0, launches=4)
    turn = operations.turn("base")
    operations.leave("base")
    operations.release("base")

    assert (prepared["wrong"], prepared["config"], turn["launches"]) == ("", {}, 4)
    assert set(turn["samples_us"]) <= {20.0, 20.1, 20.2}
    assert ranks.asked[:4] == ["describe", "prepare", "check", "place"]
    assert ranks.asked[-2:] == ["inspect", "release"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_commit_is_compared_with_itself_on_two_ranks():
    rules = InterleaveRules(processes=5, looks=1)
    head = git_output(ROOT, "rev-parse", "HEAD").strip()

    [result] = compare_commits(ROOT, head, head, [all_reduce(8192)], device="cpu", rules=rules)

    assert result.detail == ""
    assert len(result.comparison.placement) == 10
