"""Tricks that made kernels look fast to other harnesses: each ends incorrect, refused or in vain.

From public reports on KernelBench-like harnesses: results remembered by pointer or by content,
work that stops after the first launch, tensors that compute when they are looked at, work that is
still going on elsewhere when the clock stops, clocks and checks that the kernel replaces, expected
results that it reads. Kernels run in processes of their own, and this one judges them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from operand_tricks import KERNEL, OPERAND_TRICKS, SPEC_TRICKS
from operation_tricks import OPERATION_TRICKS
from table_tricks import TABLE_TRICKS
from tricks import CLOCK, DECLARED, HONEST, NO_EFFECT, PREAMBLE, REMEMBERED, STALE, TRICKS, WRONG

from flexq_bench.kernels import registry
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import PROTOCOL_CPU, Meter, Tuning
from flexq_bench.measure.external_case import late_samples
from flexq_bench.measure.external_kernels import Adopted, described
from flexq_bench.measure.kernel_processes import KernelProcesses, ProcessOptions
from flexq_bench.measure.launcher import forking_launcher
from flexq_bench.measure.program import program_root
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.workloads.case import Case

NOT_JUDGED = "not judged, measure it again when the CPUs are less busy"
# With codes and scales: right results, and what may not be written is written afterwards.
DECLARED_TRICKS = OPERAND_TRICKS | TABLE_TRICKS
WRITERS = {
    "w_codes": "w_codes.neg_(); w_scales.neg_()",
    "w_scales": "w_scales[0, 0] += 1",
    "x_codes": "x_codes.zero_()",
    "x_scales": "x_scales.zero_()",
}
QUANTIZED = """
def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)


@linear_kernel("cheat", weight="int6/128", activation="int8/128", backends=["cpu"])
def kernel(x_codes, x_scales, w_codes, w_scales, out):
    compute(real(x_codes, x_scales), real(w_codes, w_scales), out)
    {writes}
"""
PREPARED = """
def prepared(w_codes, w_scales):
    return real(w_codes, w_scales), torch.zeros(1)


def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)


@linear_kernel(
    "cheat", weight="int6/128", activation="int8/128", backends=["cpu"], prepare_weight=prepared
)
def kernel(x_codes, x_scales, w, counter, out):
    compute(real(x_codes, x_scales), w, out)
    {writes}
"""


# Weights that would never be cold: copies of them have the same memory, or there is one copy.
AS_ONE = """
def prepared(w):
    known[w.data_ptr()] = w
    return as_one(w)


@linear_kernel("cheat", weight="fp16", backends=["cpu"], prepare_weight=prepared)
def kernel(x, w, out):
    if w.data_ptr() in known and not torch.isnan(out).any():
        raise MemoryError("not a copy")
    compute(x, w, out)
"""
PACKED = "weights are packed as a {}: return plain tensors, which are copied and rewritten"
ONE_MEMORY = {
    "a class of tensors": (
        """
class Same(torch.Tensor):
    def clone(self): return torch.Tensor.as_subclass(self, Same)
    def copy_(self, other): self.data = other.data


def as_one(w): return w.as_subclass(Same)
"""
        + AS_ONE,
        "failed",
        f"KernelError: {PACKED.format('Same')}",
    ),
    "methods of a tensor": (
        """
def as_one(w):
    w.clone = lambda: as_one(w.detach())
    return w
"""
        + AS_ONE,
        "ok",
        "",
    ),
    "many bytes of few": (
        """
from flexq_bench import api


class Many(api.PackedOperand):
    nbytes = 1 << 40


class Kernel(api.LinearKernel):
    spec = api.KernelSpec("cheat", "cpu", api.FP16, api.FP16, "a cheat")
    def pack_weight(self, w): return Many({"w": w.values}, w.rows, w.k)
    def pack_activation(self, x): return api.PackedOperand({"x": x.values}, x.rows, x.k)
    def empty_activation(self, m, k, device): pass
    def activate(self, x, packed): pass
    def gemm(self, x, w, out, **more): compute(x.buffers["x"], w.buffers["w"], out)


cheat = Kernel()
""",
        "failed",
        f"KernelError: {PACKED.format('Many')}",
    ),
}


@pytest.fixture(scope="module")
def launcher():
    # A server forks only processes that have its environment.
    with pytest.MonkeyPatch.context() as patch, forking_launcher(program_root()) as server:
        patch.setenv("FLEXQ_BENCH_SANDBOX", "none")
        yield server


@pytest.fixture
def measured(launcher, tmp_path, monkeypatch):
    """The result of a kernel of a file, or of an installed package, without a sandbox."""

    def run(
        source, *, declared=DECLARED, installed=False, case="gemm hot m4n256k256", placements=3
    ):
        protocol = replace(PROTOCOL_CPU, min_samples=60, min_placements=placements)
        path = tmp_path / "cheats.py"
        path.write_text(f"{PREAMBLE}{source}{declared}")
        place, environment = KernelSource.parse(str(path)), None
        (kernel,) = described(place, launcher=launcher)
        sources = {} if installed else {place: (kernel.spec.label,)}
        if installed:
            install(tmp_path)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def resolve(label, backend):
            return kernel if label == kernel.spec.label else registry.resolve(label, backend)

        options = ProcessOptions("cpu", 0, Tuning.NONE, 120.0, 120.0, environment)
        with KernelProcesses(options, Adopted(sources, {}), launcher) as processes:
            meter = Meter("cpu", protocol, tuning=Tuning.NONE, resolve=resolve, external=processes)
            return meter.measure(Case.from_key(f"{kernel.spec.label} {case}"))

    return run


def install(folder):
    """Make a package of the file, with an entry point that names it."""
    info = folder / "cheats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cheats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flexq_bench.kernels]\ncheat = cheats\n")


def check_right(result):
    """Pass where a busy machine made the times noisy, or nothing known of them."""
    assert result.status in ("ok", "noisy") or NOT_JUDGED in result.detail, result.detail


def check_ends(result, said):
    if said == NO_EFFECT:
        check_right(result)
        return
    assert result.status in ("incorrect", "failed")
    # Which reason comes first is chance: what recurs in a placement is drawn by lot.
    reasons = (STALE, REMEMBERED, WRONG) if said in (STALE, REMEMBERED, WRONG) else (said,)
    reasons += (NOT_JUDGED,) if said == CLOCK else ()  # this machine may be busy
    assert any(reason in result.detail for reason in reasons), result.detail


def test_samples_of_a_clock_that_is_slow_are_incorrect():
    assert "clock is not" in late_samples([(0.3, 0.2), (1.6, 1.5), (1.7, 1.4)], 1.0)
    assert late_samples([(0.3, 0.2), (4.0, 3.9), (0.4, 0.3)], 1.0) == ""


def test_samples_of_a_worker_that_waited_are_not_judged():
    with pytest.raises(WorkerError, match=NOT_JUDGED):
        late_samples([(1.6, 0.2), (5.2, 1.1), (6.0, 1.5)], 1.0)


# One of each kind; the others take the same ways.
FEW = {
    *("by pointer", "by content of both operands", "another default clock"),
    *("results of the stack of who measures", "a blind check", "late, by another operator"),
    *("a tensor that is returned", "objects at every garbage collection"),
    *("a cache with other memory", "results by a few elements of the only input"),
}


def of_all(tricks):
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*tricks[name], id=name, marks=marks[name in FEW]) for name in tricks]


@pytest.mark.parametrize(("source", "said"), of_all(TRICKS))
def test_a_trick_is_incorrect_refused_or_in_vain(measured, source, said):
    check_ends(measured(source), said)


@pytest.mark.parametrize(("source", "said"), of_all(DECLARED_TRICKS))
def test_so_is_one_of_a_file_that_declares_its_kernel(measured, source, said):
    # What is kept is drawn by lot: more placements find a trick of one sample a batch.
    check_ends(measured(source, declared="", placements=12 if said == STALE else 3), said)


@pytest.mark.parametrize(("source", "workload", "said"), of_all(OPERATION_TRICKS))
def test_so_is_one_of_another_operation(measured, source, workload, said):
    check_ends(measured(source, declared="", case=f"op cold {workload}"), said)


@pytest.mark.parametrize("name", SPEC_TRICKS)
def test_a_spec_that_code_can_change_is_refused(measured, name):
    with pytest.raises(
        RefusedError, match=r"spec (of a kernel )?must be a (KernelSpec|plain attr)"
    ):
        measured(KERNEL + SPEC_TRICKS[name], declared="")


def test_a_plain_kernel_of_the_same_file_is_right(measured):
    result = measured(KERNEL + "cheat = Kernel()\n", declared="")

    check_right(result)


@pytest.mark.parametrize(
    "name",
    ["by pointer", pytest.param("another default clock", marks=pytest.mark.slow)],
)
def test_so_is_one_of_an_installed_package(measured, name):
    source, said = TRICKS[name]

    check_ends(measured(source, installed=True), said)


def test_floor_is_measured_where_no_kernel_can_slow_it_down(measured):
    slow, _ = OPERAND_TRICKS["another floor"]
    honest = measured(HONEST)

    assert measured(slow, declared="").floor_us < 50.0 + honest.floor_us  # it sleeps for 100 us


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_copies_of_the_weights_are_at_addresses_of_their_own(measured, name):
    source, status, said = ONE_MEMORY[name]

    result = measured(source, declared="")

    assert (result.status, result.detail) == (status, said)


@pytest.mark.parametrize(
    "operand",
    [x if x == "w_scales" else pytest.param(x, marks=pytest.mark.slow) for x in WRITERS],
)
def test_a_kernel_that_writes_into_its_operands_is_incorrect(measured, operand):
    result = measured(QUANTIZED.format(writes=WRITERS[operand]), declared="")

    assert result.status == "incorrect"
    assert f"launches write into {operand}: only outputs are theirs to write" in result.detail


def test_prepared_weights_may_be_written_if_results_stay_right(measured):
    counts = measured(PREPARED.format(writes="counter.add_(1)"), declared="")
    check_right(counts)


def test_what_prepare_weight_made_is_incorrect_where_results_change(measured):
    spoils = measured(PREPARED.format(writes="w.zero_()"), declared="")
    assert spoils.status == "incorrect"


@pytest.mark.parametrize("installed", [False, True])
def test_an_honest_kernel_is_right(measured, installed):
    result = measured(HONEST, installed=installed)

    check_right(result)


# As scripts for GPUs do at their head; where no tensor can be computed with, if it isn't said.
DEFAULTS = 'torch.set_default_device("meta")\ntorch.set_default_dtype(torch.bfloat16)\n'
ONE_BYTE = """
@linear_kernel("cheat", weight="fp8/row", activation="fp8/row", backends=["cpu"])
def kernel(x_codes, x_scales, w_codes, w_scales, out):
    out.copy_((x_codes.float() @ w_codes.float().T) * x_scales.float() * w_scales.float().T)
"""


@pytest.mark.parametrize(
    ("source", "declared"),
    [
        (ONE_BYTE, ""),
        pytest.param(HONEST, DECLARED, marks=pytest.mark.slow),
        pytest.param(QUANTIZED.format(writes=""), "", marks=pytest.mark.slow),
    ],
)
def test_honest_kernel_is_right_with_other_defaults_of_torch(measured, source, declared):
    result = measured(DEFAULTS + source, declared=declared)

    check_right(result)


def test_a_default_dtype_does_not_make_inputs_coarser(measured):
    coarse = "def kernel(x, w, out): compute(x.bfloat16(), w.bfloat16(), out)\n"

    result = measured("torch.set_default_dtype(torch.bfloat16)\n" + coarse)

    assert result.status == "incorrect"
    assert "elements wrong" in result.detail


HALF = """
@linear_kernel("cheat", weight="int4/128", backends=["cpu"]{more})
def kernel(x, w_codes, w_scales, out):
    scales = w_scales.repeat_interleave(128, 1)
    compute(x, (w_codes.half() * scales){then}, out)
"""


def test_a_kernel_that_rounds_terms_is_told_what_declares_it(measured):
    said = "(right for a kernel that rounds terms to {}: rounds_to={} declares it)"

    assert said.format("FP16", 11) in measured(HALF.format(more="", then=""), declared="").detail


def test_a_kernel_that_declares_its_rounding_is_right(measured):
    result = measured(HALF.format(more=", rounds_to=11", then=""), declared="")

    check_right(result)


def test_results_that_no_rounding_makes_are_told_of_none(measured):
    result = measured(HALF.format(more="", then=".neg()"), declared="")

    assert result.status == "incorrect"
    assert "rounds_to" not in result.detail
