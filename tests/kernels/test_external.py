"""External kernels: plain functions as kernels, and the files and packages that define them."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata

import pytest
import torch

from flexq_bench import api
from flexq_bench.kernels import registry
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.described import as_plain, described_by
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
def test_function_gets_the_tensors_of_its_formats(definition):
    out, right = computed(definition)

    assert torch.allclose(out.double(), right, rtol=2e-3, atol=1e-3)


def of_blocks(codes, scales, rows, columns, matrix_scale=1.0):
    """Codes [rows, K] times the scale of their block."""
    wide = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]] * matrix_scale


@pytest.mark.parametrize(
    ("weight", "activation", "block", "scales"),
    [
        ("fp8/128x128", "fp8/128", (128, 128), (torch.float32, (1, 2))),
        ("fp8/128", "fp8/128", (1, 128), (torch.float16, (40, 2))),
        ("fp8/tensor", "fp8/tensor", (40, 200), (torch.float32, (1, 1))),
        ("mxfp6-e3m2", "mxfp8", (1, 32), (torch.float8_e8m0fnu, (40, 7))),
        ("mxfp4", "fp16", (1, 32), (torch.float8_e8m0fnu, (40, 7))),
        ("nvfp4", "nvfp4", (1, 16), (torch.float8_e4m3fn, (40, 13))),
        ("int4/32", "int8/128", (1, 32), (torch.float16, (40, 7))),
    ],
)
def test_function_of_block_formats_is_measured_and_correct(weight, activation, block, scales):
    x_block = {"fp8/tensor": (3, 200), "mxfp8": (1, 32), "nvfp4": (1, 16)}.get(activation, (1, 128))

    def function(*tensors):
        *operands, out = tensors
        per_operand = 3 if weight == "nvfp4" else 2
        codes, of_weights, *shared = operands[-per_operand:]
        assert (of_weights.dtype, tuple(of_weights.shape)) == scales
        x = operands[0].float()
        if activation != "fp16":
            x_codes, x_scales, *x_shared = operands[:per_operand]
            x = of_blocks(x_codes, x_scales, *x_block, *x_shared)
        out.copy_(x @ of_blocks(codes, of_weights, *block, *shared).T)

    definition = declared(function, weight=weight, activation=activation)
    registry.add(definition.kernels())
    try:
        measured = Meter("cpu", seed=1).measure(Case("mine", GEMM))
    finally:
        registry.remove(["mine"])

    assert measured.status in ("ok", "noisy"), measured.detail


WIDE = torch.zeros(4, 4, dtype=torch.float16)


class Lazy(torch.Tensor):
    """A tensor that may compute when somebody looks."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *given: torch.zeros(2, 2), "returned float32 [2, 2]: write the result into out"),
        (lambda *given: setattr(given[-1], "data", WIDE), "exchanged out for float16 [4, 4]"),
        (lambda *given: "done", "returned a str"),
        (lambda *given: setattr(given[-1], "__class__", Lazy), "exchanged out for Lazy float16"),
    ],
)
def test_function_that_does_not_write_into_out_is_an_error(function, message):
    with pytest.raises(api.ShapeError, match=message.replace("[", r"\[")):
        computed(declared(function, weight="int6/128", activation="int8/128"))


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"weight": "dual4/128"}, "gets x, w_codes, w_scales, w_row_scales, w_zero_points, out"),
        ({"weight": "int4/48", "activation": "int8/32"}, "don't divide each other"),
        ({"weight": "int4/32", "activation": "int8/128", "returns": True}, "takes 5 tensors"),
        ({"weight": "int4/32", "activation": "int8/128", "dtype": "fp8"}, "no dtype 'fp8'"),
        ({"weight": "int4/128", "activation": "mixed4/128"}, "takes no activation of format"),
        ({"weight": "uint4/128", "activation": "int8/row"}, "w_zero_points, out: give it these"),
        ({"weight": "int4/128", "activation": "int99x"}, "no number format 'int99x'"),
    ],
)
def test_unsupported_formats_are_refused(formats, message):
    with pytest.raises(api.KernelError, match=message):
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


def test_kernels_of_a_file_are_named_after_it_and_measured(a_file):
    registry.add(load(a_file(RIGHT)).kernels)

    measured = Meter("cpu").measure(Case("my-kernels.copied", GemmWorkload(1, 32, 32)))

    assert measured.status in ("ok", "noisy"), measured.detail
    assert len(measured.source_hash) == 16


def test_source_hash_covers_imported_modules_of_the_folder(a_file, tmp_path):
    helped = "import help_of_mine\n" + textwrap.dedent(RIGHT)
    hashes = []
    for content in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "help_of_mine.py").write_text(content)
        sys.modules.pop("help_of_mine", None)
        (kernel, _) = load(a_file(helped)).kernels
        hashes.append(kernel.spec.source_hash)

    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_file_without_kernels_is_refused_in_one_line(a_file, text, message):
    with pytest.raises(SourceError, match=message) as caught:
        load(a_file(text))

    assert "\n" not in str(caught.value)


def test_every_decorated_function_is_a_kernel(a_file):
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


@pytest.fixture
def unchanged_imports(monkeypatch):
    """Undo what a test adds to sys.path and sys.modules; no package `kernels` is imported yet."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = sys.modules.copy()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        del sys.modules[name]
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("unchanged_imports")
@pytest.mark.parametrize("package", ["acme_gemm", "kernels"])  # a folder of this project, too
@pytest.mark.parametrize("imports", ["from ..errors import value", "from {}.errors import value"])
def test_file_imports_from_its_own_package(tmp_path, package, imports):
    inner = tmp_path / package / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    (inner / "fast.py").write_text(
        f"{imports.format(package)}\nassert value == 3\n" + textwrap.dedent(RIGHT)
    )
    hashes = []
    for content in ("value = 3", "value = 3  # edited"):
        (inner.parent / "errors.py").write_text(content)
        (kernel, _) = load(KernelSource.parse(str(inner / "fast.py"))).kernels
        hashes.append(kernel.spec.source_hash)
        for name in [name for name in sys.modules if "errors" in name and package in name]:
            del sys.modules[name]

    assert kernel.spec.name == "fast.copied"
    assert hashes[0] != hashes[1]


@pytest.mark.usefixtures("unchanged_imports")
def test_file_imports_its_package_before_an_installed_copy(tmp_path):
    for place, value in (("installed", 1), ("checkout/python", 3)):
        folder = tmp_path / place / "acme_twice"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "scales.py").write_text(f"value = {value}")
    text = "from acme_twice.scales import value\nassert value == 3\n" + textwrap.dedent(RIGHT)
    (folder / "fast.py").write_text(text)
    sys.path.append(str(tmp_path / "installed"))

    assert load(KernelSource.parse(str(folder / "fast.py"))).kernels


def test_tuples_in_configurations_are_stored_as_lists():
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


def test_output_of_an_imported_file_is_captured(a_file, capsys):
    loaded = load(a_file("print('hello')\n" + textwrap.dedent(RIGHT)))

    assert (loaded.printed, capsys.readouterr().out) == ("hello\n", "")


def test_described_kernel_has_the_spec_and_does_not_run(a_file):
    (kernel, _) = load(a_file(RIGHT)).kernels

    described = described_by(as_plain(kernel.spec, has_own_rule=True))

    assert (described.spec, described.has_own_rule) == (kernel.spec, True)
    with pytest.raises(api.UnsupportedError, match="runs in a worker process only"):
        described.activate(torch.zeros(1, 1), None)


def test_entry_points_of_installed_packages_are_loaded(tmp_path, monkeypatch, caplog):
    (tmp_path / "acme_fast.py").write_text(textwrap.dedent(RIGHT))
    info = tmp_path / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Kernels\nVersion: 1.0\n")
    points = "[flexq_bench.kernels]\nfast = acme_fast\nlost = no_such_module_of_acme\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))

    labels = [kernel.spec.label for kernel in load_installed()]

    assert labels == ["acme-kernels.copied", "acme-kernels.copied"]  # on the CPU and on GPUs
    assert "entry point lost does not import" in caplog.text
    assert metadata.entry_points(group="flexq_bench.kernels")


def test_api_exports_all_its_names():
    assert api.API_VERSION == 1
    assert all(hasattr(api, name) for name in api.__all__)
