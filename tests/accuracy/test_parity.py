from __future__ import annotations

import copy

import pytest
import torch

from flexq_bench.accuracy.parity import kernel_parity
from flexq_bench.kernels.errors import UnknownKernelError
from flexq_bench.schemes.registry import resolve

KERNELS = ("flexq-w6a6", "flexq-w6a8")
SEGMENT = torch.arange(3, 19)


def under(model, scheme):
    copied = copy.deepcopy(model)
    resolve(scheme).quantize(copied)
    return copied


def test_kernels_match_with_biases_and_odd_sizes(an_opt):
    sites = kernel_parity(an_opt, under(an_opt, "w6a6"), SEGMENT, KERNELS, backend="cpu")
    assert len(sites) == 12
    assert {site.kernel for site in sites} == {"flexq-w6a6"}
    assert all(site.max_rel_error <= 1e-3 for site in sites)


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_wrong_layer_is_found(an_opt, what):
    quantized = under(an_opt, "w6a6")
    layer = quantized.get_submodule("model.decoder.layers.1.fc2")
    getattr(layer, what)[0] *= -1
    sites = kernel_parity(an_opt, quantized, SEGMENT, KERNELS, backend="cpu")
    wrong = [site.site for site in sites if site.max_rel_error > 1e-3]
    assert wrong == ["model.decoder.layers.1.fc2"]


def test_each_layer_is_compared_with_the_kernel_of_its_formats(an_opt):
    quantized = under(an_opt, "flexq-w6ax[a8=fc1]")
    sites = kernel_parity(an_opt, quantized, SEGMENT, KERNELS, backend="cpu")
    assert {site.site for site in sites if site.kernel == "flexq-w6a8"} == {
        f"model.decoder.layers.{block}.fc1" for block in range(2)
    }


@pytest.mark.parametrize("scheme", ["w4a4", "w5a6", "rtn-w6a6", "w6a16"])
def test_formats_without_named_kernel_are_reported(an_opt, scheme):
    sites = kernel_parity(an_opt, under(an_opt, scheme), SEGMENT, KERNELS, backend="cpu")
    assert {(site.kernel, site.max_rel_error) for site in sites} == {("", None)}


def test_an_unknown_kernel_is_refused(an_opt):
    with pytest.raises(UnknownKernelError, match="no kernel 'flexq-w6a9'"):
        kernel_parity(an_opt, an_opt, SEGMENT, ("flexq-w6a9",), backend="cpu")
