"""Operations of a decode worker, and its refusals before and after loading."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from decoders import small_llama

from flexq_bench.decode import loading
from flexq_bench.decode import operations as of_stand
from flexq_bench.decode.loading import Footprint, check_memory
from flexq_bench.decode.operations import DecodeWorkerOperations
from flexq_bench.errors import MeasureError, UsageError
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure.telemetry import DeviceState
from flexq_bench.workloads.errors import WorkloadError

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(scope="module")
def operations():
    return DecodeWorkerOperations("cpu", 0)


@pytest.fixture
def folder(tmp_path):
    small_llama(CPU).reference.save_pretrained(tmp_path, max_shard_size="200KB")
    return tmp_path


def asked(folder, **changes):
    usual = {"scheme": "fp16", "batch": 1, "capacity": 20, "kv_bits": 16}
    return {"model": str(folder), **usual, **changes}


def load(operations, folder):
    return operations.load(str(folder), "fp16", [1], 20, "none")


def test_intact_folder_is_loaded_and_decoded(operations, folder):
    operations.check(**asked(folder))
    assert load(operations, folder)["weights_bytes"] > 0
    assert len(operations.decode(1, 4, 5, 16, profiled=False)["step_ms"]) == 4


class PowerMeter:
    """A sensor whose energy counter changes every 0.1 s, at 200 W."""

    default_sm_clock_mhz = 1.0

    def read(self):
        return DeviceState(energy_j=20.0 * (time.perf_counter() // 0.1))


def test_energy_is_time_multiplied_by_power_of_long_steps(folder):
    operations = DecodeWorkerOperations("cpu", 0)
    operations._sensor = PowerMeter()  # a CPU has none
    load(operations, folder)

    decoded = operations.decode(1, 4, 2, 16, profiled=False)

    took_s = (decoded["prefill_ms"] + sum(decoded["step_ms"])) / 1000
    assert decoded["energy_j"] == pytest.approx(200 * took_s, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 257}, "context of 256 tokens, and prompt and answer make 257"),
        ({"kv_bits": 5}, "a KV cache has 16, 8 or 4 bits, got 5"),
        ({"scheme": "flexq-w6a"}, "no scheme 'flexq-w6a': there are flexq-w6a"),
    ],
)
def test_what_can_not_be_is_said(operations, folder, changes, message):
    with pytest.raises((UsageError, WorkloadError, KernelError), match=message):
        operations.check(**asked(folder, **changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "lacks model-00002"),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:1000]),
            r"model-00002.* is cut off or damaged .*download it again",
        ),
    ],
)
def test_damaged_shard_is_refused_before_loading(operations, folder, damage, message):
    damage(next(folder.glob("model-00002*")))

    with pytest.raises(UsageError, match=message):
        operations.check(**asked(folder))


def test_damaged_gguf_file_is_named(operations, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and nothing more")

    with pytest.raises(UsageError, match=r"can't read .*model\.gguf.*: download it again"):
        operations.check(**asked(path))


def test_refused_batch_reports_needed_and_free_memory(monkeypatch):
    monkeypatch.setattr(loading, "available_memory", lambda device: 23 * GIB)
    needed = Footprint(12 * GIB, 10 * GIB, 2 * GIB)

    with pytest.raises(MeasureError) as refused:
        check_memory(needed, "llama-7b under fp16, batch 64,", CPU)

    assert str(refused.value) == (
        "llama-7b under fp16, batch 64, needs 24.0 GiB (12.0 weights, 10.0 KV cache, 2.0 working "
        "space), and 23.0 GiB are free: pick a smaller batch, fewer tokens, --kv-bits 8, --gpus 2 "
        "or another scheme"
    )


def test_model_loads_after_running_out_of_memory(operations, folder, monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(of_stand, "load", run_out)
        with pytest.raises(MeasureError, match="ran out of GPU memory, which others use too"):
            load(operations, folder)

    assert load(operations, folder)["weights_bytes"] > 0
