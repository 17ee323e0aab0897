"""Kernels by name."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from flexq_bench.kernels import registry
from flexq_bench.kernels.errors import UnknownKernelError, UnsupportedError
from flexq_bench.kernels.registry import labels, list_kernels, resolve


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_label_resolves_to_its_kernel(backend):
    specs = list_kernels(backend)

    assert [spec.label for spec in specs] == list(labels(backend))
    assert all(spec.backend == backend and spec.summary for spec in specs)


def test_an_unknown_name_lists_the_nearest_first():
    with pytest.raises(UnknownKernelError, match="'flexq-w6a7': there are flexq-w6a"):
        resolve("flexq-w6a7", "cpu")


def test_unknown_kernel_of_a_package_lists_only_its_kernels(monkeypatch):
    one = resolve("flexq-w6a6", "cpu")
    named = copy.copy(one)
    named.spec = replace(one.spec, name="acme.fast-w6a6")
    monkeypatch.setattr(registry, "_external", {})
    registry.add([named])

    with pytest.raises(UnknownKernelError, match=r"'acme\.w6a6': acme has acme\.fast-w6a6 here; "):
        resolve("acme.w6a6", "cpu")
    with pytest.raises(UnknownKernelError, match=r"'other\.w6a6': other has none here; a renamed"):
        resolve("other.w6a6", "cpu")


def test_a_kernel_of_another_backend_is_not_unknown():
    with pytest.raises(UnsupportedError, match="no cpu implementation"):
        resolve("flexq-imma-w6a6", "cpu")


def test_the_same_label_is_the_same_object():
    assert resolve("flexq-w6a6", "cpu") is resolve("flexq-w6a6", "cpu")


def test_kernel_refuses_unsupported_gpu():
    spec = resolve("flexq-w6a6", "cuda").spec

    spec.check_capability((9, 0))
    with pytest.raises(UnsupportedError, match=r"8\.0 to 9\.0, this GPU has 12\.0"):
        spec.check_capability((12, 0))
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        spec.check_capability(None)
