from __future__ import annotations

from pathlib import Path

import pytest

from kernels.registry import resolve
from workloads.errors import WorkloadError
from workloads.schemes import get_scheme, load_schemes, read_schemes

HEAD = '[[scheme]]\nname = "a"\nsummary = "s"\nsource = "p"\nkernel = "fp16"\n'


def test_every_scheme_names_kernels_that_both_backends_have() -> None:
    for scheme in load_schemes().values():
        for block in ("llama", "opt"):
            for label in scheme.kernels(block):
                assert resolve(label, "cpu").spec.label == label
                assert resolve(label, "cuda").spec.label == label


def test_a_layer_that_is_sensitive_has_its_own_kernel() -> None:
    scheme = get_scheme("flexq-w6ax")

    assert scheme.kernel_of("llama", "qkv_proj") == "flexq"
    assert scheme.kernel_of("llama", "down_proj") == "flexq[w6a8]"
    assert scheme.kernels("opt") == ("flexq",)


def test_an_unknown_scheme_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(WorkloadError, match="no scheme 'flexq': there are flexq-w6a"):
        get_scheme("flexq")


def test_a_layer_that_the_block_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schemes.toml"
    path.write_text(HEAD + '[scheme.llama]\nfc1 = "w8a16"\n')

    with pytest.raises(WorkloadError, match="no key 'fc1' here"):
        read_schemes(path)
