"""Plain functions as kernels, and the files and packages that they come from."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flexq_bench import api, kernels
from flexq_bench.kernels import registry
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external import external_code
from flexq_bench.kernels.external.described import DescribedKernel, spec_as_plain, spec_of_plain
from flexq_bench.kernels.external.loading import load, load_installed
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.reference import reference_gemm
from flexq_bench.measure import Meter
from flexq_bench.measure.inputs import realistic_inputs
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

GEMM = GemmWorkload(3, 40, 200)
CPU = torch.device("cpu")


def real(codes, scales, zeros=None):
    """Codes [rows, K] in groups of 128 as the numbers that they stand for."""
    wide = codes.float()
    if zeros is not None:
        wide = wide + zeros.float().repeat_interleave(128, 1)[:, : codes.shape[1]]
    return wide * scales.float().repeat_interleave(128, 1)[:, : codes.shape[1]]


def both(x_codes, x_scales, w_codes, w_scales, out):
    """W6A8 in torch."""
    assert (x_codes.dtype, w_codes.dtype, x_scales.dtype) == (torch.int8, torch.int8, torch.float16)
    assert (x_scales.shape, w_scales.shape) == ((3, 2), (40, 2))
    out.copy_(real(x_codes, x_scales) @ real(w_codes, w_scales).T)


def with_zeros(x, w_codes, w_scales, w_zero_points, out):
    assert x.dtype == torch.float16
    out.copy_(x.float() @ real(w_codes, w_scales, w_zero_points).T)


def prepared(x, w, out):
    out.copy_(x.float() @ w.T)


def computed(definition):
    """What a definition's kernel computes of drawn inputs, and what is right."""
    (kernel,) = definition.kernels()
    inputs = realistic_inputs(kernel, GEMM, CPU, 1)
    out = torch.full((3, 40), torch.nan, dtype=torch.float16)
    config = kernel.default_config(GEMM)
    weight = kernel.pack_weight(inputs.w)
    kernel.gemm(kernel.pack_activation(inputs.x), weight, out, config=config)
    return out, reference_gemm(inputs.x, inputs.w).y


def declared(function, **formats):
    return api.linear_kernel("mine", backends=["cpu"], **formats)(function)


@pytest.mark.parametrize(
    "definition",
    [
        declared(both, weight="int6/128", activation="int8/128"),
        declared(with_zeros, weight="uint4/128"),
        declared(prepared, weight="int4/128", prepare_weight=real),
        declared(lambda x, w, out: prepared(x, w.float(), out), weight="fp16"),
        declared(
            lambda x, w, s, out, factor: prepared(x, factor * real(w, s), out),
            weight="int6/128",
            configurations=[{"factor": 1.0}, {"factor": 2.0}],
        ),
    ],
    ids=["codes", "zero-points", "prepared", "dense", "configurations"],
)
def test_a_function_is_given_what_its_formats_have(definition):
    out, right = computed(definition)

    assert torch.allclose(out.double(), right, rtol=2e-3, atol=1e-3)


WIDE = torch.zeros(4, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda *given: torch.zeros(2, 2), "returned float32 [2, 2]: write the result into out"),
        (lambda *given: setattr(given[-1], "data", WIDE), "exchanged out for float16 [4, 4]"),
        (lambda *given: "done", "returned a str"),
    ],
)
def test_a_function_that_does_not_write_into_out_is_told_so(function, said):
    with pytest.raises(api.ShapeError, match=said.replace("[", r"\[")):
        computed(declared(function, weight="int6/128", activation="int8/128"))


class Lazy(torch.Tensor):
    """A tensor that may compute when somebody looks."""


def test_out_can_not_become_a_tensor_that_computes_when_it_is_looked_at():
    def lazily(*given):
        given[-1].__class__ = Lazy

    with pytest.raises(api.ShapeError, match="exchanged out for Lazy float16"):
        computed(declared(lazily, weight="int6/128", activation="int8/128"))


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        ({"weight": "dual4/128"}, "takes no weight of format dual4/128"),
        ({"weight": "int4/128", "activation": "mixed4/128"}, "takes no activation of format"),
        ({"weight": "uint4/128", "activation": "int8/row"}, "go with activation='fp16'"),
        ({"weight": "int4/128", "activation": "int99x"}, "no number format 'int99x'"),
    ],
)
def test_formats_that_functions_can_not_have_are_refused(formats, said):
    with pytest.raises(api.KernelError, match=said):
        declared(both, **formats)


@pytest.fixture
def a_file(tmp_path):
    def write(text, name="my_kernels.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return KernelSource.parse(str(path))

    yield write
    registry.remove(registry.external_labels())


RIGHT = """
    from flexq_bench.api import linear_kernel

    @linear_kernel("copied", weight="fp16")
    def copied(x, w, out):
        "Dense."
        out.copy_(x.float() @ w.float().T)
"""


def test_kernels_of_a_file_are_named_after_it_and_measured_as_ours(a_file):
    registry.add(load(a_file(RIGHT)).kernels)

    measured = Meter("cpu").measure(Case("my-kernels.copied", GemmWorkload(1, 32, 32)))

    assert measured.status in ("ok", "noisy"), measured.detail
    assert len(measured.source_hash) == 16


def test_the_hash_is_that_of_the_file_and_of_what_lies_beside_it_and_is_imported(a_file, tmp_path):
    helped = "import help_of_mine\n" + textwrap.dedent(RIGHT)
    hashes = []
    for content in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "help_of_mine.py").write_text(content)
        sys.modules.pop("help_of_mine", None)
        (kernel, _) = load(a_file(helped)).kernels
        hashes.append(kernel.spec.source_hash)

    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module", "does not import: ModuleNotFoundError: No module named"),
        ("raise ValueError('first\\nsecond')", "does not import: ValueError: first$"),
        ("import sys; sys.exit(0)", "ends the process when it is imported: 0"),
        ("import os; os._exit(0)", "ends the process when it is imported: 0"),
        ("def f(:", "does not import: SyntaxError"),
        ("from . import x", "imports by a dot, and its folder is no package"),
        ("import sys; sys.exit()", "ends the process when it is imported$"),
        ("raise ValueError('z' * 1_000_000)", "does not import: ValueError: z{498} …$"),
        (RIGHT.replace('fp16"', 'fp16", configurations={1: 2}'), "must be a list of dicts"),
        (RIGHT.replace('fp16"', 'fp16", min_capability=8'), "must be two integers"),
        (RIGHT.replace('fp16"', 'fp16", rounds_to=1'), "rounds_to must be 8 .* to 11 .* got 1$"),
        ("x = 1", "has no kernel: decorate a function"),
        *(
            (RIGHT.replace('"copied"', name), "a kernel's name has lower-case letters")
            for name in ('"Bad Name"', '"ядро"', '""', '"every-*"', '"x" * 120')
        ),
    ],
)
def test_a_file_without_kernels_is_refused_in_one_line(a_file, text, said):
    with pytest.raises(SourceError, match=said) as caught:
        load(a_file(text))

    assert "\n" not in str(caught.value)


def test_every_function_that_a_file_decorates_is_a_kernel_assigned_or_not(a_file):
    declared = """
        a = dict(weight="int6/128", backends=["cpu"])
        for name in ("one", "two"):
            linear_kernel(name, **a)(lambda *given: None)
        KERNELS = [linear_kernel("listed", **a)(print)]
        class Called:
            __doc__ = property(id)  # no text
            def __call__(self, *given): pass
        linear_kernel("called", **a)(Called())
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=int)  # ends by os._exit
        child.start()
        child.join()
    """
    loaded = load(a_file(textwrap.dedent(RIGHT) + textwrap.dedent(declared)))

    labels = {kernel.spec.name.partition(".")[2] for kernel in loaded.kernels}
    assert labels == {"copied", "one", "two", "listed", "called"}


@pytest.mark.parametrize("name", ["acme_gemm", "kernels"])  # also one named as ours
def test_a_file_of_a_package_may_import_from_it_by_dots(tmp_path, name):
    inner = tmp_path / name / "inner"
    inner.mkdir(parents=True)
    (tmp_path / name / "errors.py").write_text("value = 3")  # `kernels` has one of its own
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    (inner / "fast.py").write_text(
        "from ..errors import value\nassert value == 3\n" + textwrap.dedent(RIGHT)
    )

    loaded = load(KernelSource.parse(str(inner / "fast.py")))

    assert {kernel.spec.name for kernel in loaded.kernels} == {"fast.copied"}


def test_a_file_of_a_package_finds_that_package_before_an_installed_one(tmp_path, monkeypatch):
    for place, value in (("installed", 1), ("checkout/python", 3)):
        folder = tmp_path / place / "acme_twice"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "scales.py").write_text(f"value = {value}")
    text = "from acme_twice.scales import value\nassert value == 3\n" + textwrap.dedent(RIGHT)
    (folder / "fast.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])

    assert load(KernelSource.parse(str(folder / "fast.py"))).kernels


@pytest.fixture
def in_kernels(tmp_path, monkeypatch):
    """in_kernels(imports): a source kernels/fast.py with these imports, beside kernels/help_of.py,
    whose package has the name of ours."""
    monkeypatch.setattr(kernels, "__path__", list(kernels.__path__))
    monkeypatch.delitem(sys.modules, "flexq_bench.kernels.help_of", raising=False)
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "help_of.py").write_text("value = 3")

    def write(imports):
        text = f"{imports}\nassert value == 3\n{textwrap.dedent(RIGHT)}"
        (folder / "fast.py").write_text(text)
        return KernelSource.parse(str(folder / "fast.py"))

    yield write
    sys.modules.pop("flexq_bench.kernels.help_of", None)


@pytest.mark.parametrize("has_init", [True, False])
def test_a_file_of_a_package_named_as_ours_may_import_from_it_by_its_name(in_kernels, has_init):
    source = in_kernels("from flexq_bench.kernels.help_of import value")
    if has_init:
        (Path(source.place).parent / "__init__.py").touch()

    before, _ = load(source).kernels
    sys.modules.pop("flexq_bench.kernels.help_of")
    Path(source.place).with_name("help_of.py").write_text("value = 3  # edited")
    after, _ = load(source).kernels

    assert before.spec.name == "fast.copied"
    assert before.spec.source_hash != after.spec.source_hash


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        (
            "from flexq_bench.kernels.errors import value",
            "imports from kernels.errors, which is flexq-bench's",
        ),
        (
            "from flexq_bench.kernels.no_such import value",
            "imports from kernels.no_such, which is flexq-bench",
        ),
        ("from kernels import get_kernel", "imports from kernels, which is flexq-bench's here"),
    ],
)
def test_what_only_ours_has_by_that_name_is_said_to_be_ours(in_kernels, imports, said):
    with pytest.raises(SourceError, match=said) as caught:
        load(in_kernels(imports))

    assert "\n" not in str(caught.value)


def test_a_module_in_a_package_named_as_ours_is_to_be_named_by_its_path():
    with pytest.raises(SourceError, match=r"by its path, such as kernels/no_such_one\.py$"):
        load(KernelSource.parse("flexq_bench.kernels.no_such_one"))


def test_tuples_in_configurations_are_given_as_they_are_and_stored_as_lists():
    given = []
    definition = declared(
        lambda x, w, out, tile: given.append(tile),
        weight="fp16",
        configurations=[{"tile": (1, 2)}],
    )

    computed(definition)

    (kernel,) = definition.kernels()
    assert given == [(1, 2)]
    assert kernel.default_config(GEMM).as_dict() == {"tile": [1, 2]}


def test_what_a_file_prints_is_kept_from_stdout(a_file, capsys):
    loaded = load(a_file("print('hello')\n" + textwrap.dedent(RIGHT)))

    assert (loaded.printed, capsys.readouterr().out) == ("hello\n", "")


def test_a_description_says_all_that_a_plan_needs(a_file):
    (kernel, _) = load(a_file(RIGHT)).kernels

    described = DescribedKernel(spec_of_plain(spec_as_plain(kernel.spec)))

    assert described.spec == kernel.spec
    with pytest.raises(api.UnsupportedError, match="runs in a worker process only"):
        described.activate(torch.zeros(1, 1), None)


def test_a_file_is_written_anew_where_a_machine_has_another_one(a_file, tmp_path):
    carried = a_file(RIGHT).carried()
    a_file("raise ValueError('another one')")

    (kernel, _) = load(carried.at_hand()).kernels

    assert kernel.spec.name == "my-kernels.copied"


def test_code_of_others_is_what_lies_there_but_for_python_and_this_program(tmp_path, monkeypatch):
    monkeypatch.setattr(external_code, "_places", set())
    (tmp_path / "files").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "files")

    external_code.add_place(tmp_path / "link")
    for name in ("files", "link"):
        assert external_code.is_external(str(tmp_path / name / "mine.py"))
    assert not external_code.is_external(str(tmp_path / "link/.venv/site-packages/numpy/a.py"))
    assert not external_code.is_external(str(tmp_path / "beside.py"))

    external_code.add_place(Path("/"))  # a home folder may have them all
    assert external_code.is_external(str(tmp_path / "beside.py"))
    for module in (textwrap, external_code, api):
        assert not external_code.is_external(module.__file__)


def test_installed_packages_bring_kernels_by_their_entry_points(tmp_path, monkeypatch, caplog):
    (tmp_path / "acme_fast.py").write_text(textwrap.dedent(RIGHT))
    info = tmp_path / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Kernels\nVersion: 1.0\n")
    points = "[flexq_bench.kernels]\nfast = acme_fast\nlost = no_such_module_of_acme\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(external_code, "_calls", {})  # a watch would be on for the tests after this

    labels = [kernel.spec.label for kernel in load_installed()]

    assert labels == ["acme-kernels.copied", "acme-kernels.copied"]  # on the CPU and on GPUs
    assert "entry point lost does not import" in caplog.text
    assert metadata.entry_points(group="flexq_bench.kernels")


def test_everything_public_is_there_and_versioned():
    assert api.API_VERSION == 1
    assert all(hasattr(api, name) for name in api.__all__)


def test_what_is_called_before_an_import_may_ask_for_a_call_itself(monkeypatch):
    """As the command line does: it imports what watches only then, and that asks to be called."""
    monkeypatch.setattr(external_code, "_calls", {})
    called = []

    def first():
        called.append("first")
        external_code.before_import(lambda: called.append("second"))

    external_code.before_import(first)
    external_code.about_to_import()

    assert called[0] == "first"
    external_code.about_to_import()
    assert called.count("second") == 1
