"""Operations of a decode worker process, which loads models and decodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from flexq_bench.decode import profile
from flexq_bench.decode.architecture import check_capacity
from flexq_bench.decode.case import check_cache, open_decodable
from flexq_bench.decode.decoder import Model
from flexq_bench.decode.engine import Engine
from flexq_bench.decode.invariance import invariant_kernel, logits_hash
from flexq_bench.decode.loading import (
    RESERVE_BYTES,
    check_memory,
    compile_layers,
    footprint,
    linear_kernel,
    load,
    release,
)
from flexq_bench.decode.modules import ModuleEngine, ModuleModel, ModuleWeights
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.serving import serve, slots_within
from flexq_bench.decode.tensor_parallel import RankWeights
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import WeightSource
from flexq_bench.errors import MeasureError, UsageError
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.decoder import DecoderOperations
from flexq_bench.kernels.decoder.invariant import invariant_operations
from flexq_bench.kernels.runtime.ranks import ALONE, Ranks
from flexq_bench.measure import Tuning
from flexq_bench.measure.device import describe_device, describe_environment, find_device
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.telemetry import NvmlSensor, Sensor, Telemetry

_PROFILED_STEPS = 3
_MIN_POWER_S = 1.2  # steps of at least this time: a GPU's energy counter changes every 0.1 s
_POWER_PERIOD_S = 0.02
_STEPS_PER_SYNCHRONIZATION = 32
_MAX_WARM_UP_TOKENS = 64  # decoding them takes some tenths of a second, in which clocks rise


class DecodeWorkerOperations:
    """Operations of a decode worker. Values in and out are plain JSON.

    ranks: processes that decode together, each with its share of every layer; all are asked the
    same.
    """

    OPERATIONS = ("describe", "check", "load", "decode", "slots", "serve", "unload")

    def __init__(self, device: str, seed: int, ranks: Ranks = ALONE) -> None:
        self.device = find_device(device)
        self._seed, self._ranks = seed, ranks
        self._nvml = open_handle(self.device) if self.device.type == "cuda" else None
        self._sensor: Sensor | None = None if self._nvml is None else NvmlSensor(self._nvml)
        self._operations: DecoderOperations = operations_on(self.device)
        self._is_invariant = False
        self._model: Model | None = None
        self._modules: ModuleModel | None = None  # instead of _model
        self._source: tuple[tuple[str, str], WeightSource | ModuleWeights] | None = None
        self._tuner: StepTuner | None = None

    @property
    def backend(self) -> Backend:
        return "cuda" if self.device.type == "cuda" else "cpu"

    def describe(self) -> dict[str, Any]:
        """Describe the device and the environment, as in records."""
        return {
            "device": asdict(describe_device(self.device, self._nvml)),
            "environment": describe_environment(self.device, self._nvml),
        }

    def check(
        self, model: str, scheme: str, batch: int, capacity: int, kv_bits: int
    ) -> dict[str, Any]:
        """Check that `batch` sequences of up to `capacity` tokens fit, without allocating anything.

        Raises UsageError with the reason, or with the required and the free memory.
        """
        self.unload()
        source = self._open(model, scheme)
        check_cache(kv_bits)
        if isinstance(source, ModuleWeights):
            check_capacity(capacity, source.context, model)
            needed = source.footprint(batch, capacity)
        else:
            check_capacity(capacity, source.architecture.dimensions.context, model)
            needed = footprint(source, batch, capacity, kv_bits)
        check_memory(needed, f"{model} under {scheme}, batch {batch},", self.device)
        return {}

    def load(
        self,
        model: str,
        scheme: str,
        batches: list[int],
        capacity: int,
        tuning: str,
        invariant: bool = False,
    ) -> dict[str, Any]:
        """Load a model for sequences of up to `capacity` tokens, after `check` was called.

        invariant: its logits are to be independent of the batch, by kernels that can.
        """
        self.unload()
        source = self._open(model, scheme)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if isinstance(source, ModuleWeights):
            if invariant:
                raise UsageError(f"{model} is decoded by transformers' modules: drop --invariant")
            return self._load_modules(source, f"{model} under {scheme}")
        self._operations = (invariant_operations if invariant else operations_on)(self.device)
        self._is_invariant = invariant
        tuner = StepTuner(self.device, self._operations, Tuning(tuning), frozenset(batches))
        compile_layers(source, self.device, tuner, batches)
        began = time.perf_counter()
        with self._in_memory(f"{model} under {scheme}"):
            loaded = load(
                source,
                self.device,
                capacity,
                tuner,
                tuple(batches),
                find=invariant_kernel if invariant else linear_kernel,
                ranks=self._ranks,
            )
            load_s = time.perf_counter() - began
            tuner.tune(loaded)
        self._model, self._tuner = loaded, tuner
        return {
            "load_s": load_s,
            "weights_bytes": loaded.nbytes,
            "load_peak_bytes": self._peak_bytes(),
            "is_synthetic": source.is_synthetic,
            "model": source.architecture.dimensions.name,
            "kernels": loaded.kernels(),
            "content_hashes": {str(bits): digest for bits, digest in source.content_hashes.items()},
            "scheme_version": source.scheme_version,
            "configs": {str(m): tuner.configs(loaded, m) for m in batches},
        }

    def _load_modules(self, source: ModuleWeights, what: str) -> dict[str, Any]:
        began = time.perf_counter()
        with self._in_memory(what):
            loaded = self._modules = source.load(self.device)
        return {
            "load_s": time.perf_counter() - began,
            "weights_bytes": loaded.nbytes,
            "load_peak_bytes": self._peak_bytes(),
            "is_synthetic": source.is_synthetic,
            "model": source.name,
            "kernels": loaded.kernels(),
            "content_hashes": {str(bits): digest for bits, digest in source.content_hashes.items()},
            "scheme_version": source.scheme_version,
            "configs": {},
        }

    def decode(
        self,
        batch: int,
        prompt_tokens: int,
        new_tokens: int,
        kv_bits: int,
        profiled: bool,
        powered: bool = True,
    ) -> dict[str, Any]:
        """Decode random prompts: a warm-up of the first tokens, then a timed decode of all.

        profiled: also profile the time of each part of a step. powered: also measure its power.
        """
        if self._modules is not None:
            return self._decode_modules(batch, prompt_tokens, new_tokens, kv_bits)
        with self.engine(batch, prompt_tokens + new_tokens, kv_bits) as engine:
            answer = self._decode(engine, batch, prompt_tokens, new_tokens, powered=powered)
            length = prompt_tokens + new_tokens // 2
            began = time.perf_counter()
            answer["parts"] = self._parts(engine, batch, length) if profiled else []
            answer["spent_s"]["profile"] = time.perf_counter() - began
            answer["cache_token_bytes"] = engine.cache_token_bytes
            return answer

    def slots(
        self,
        model: str,
        scheme: str,
        capacity: int,
        kv_bits: int,
        batch_limit: int,
        memory_limit_bytes: int | None,
    ) -> dict[str, Any]:
        """Number of concurrent sequences within a memory limit, without loading the model."""
        source = self._open(model, scheme)
        if isinstance(source, ModuleWeights):
            raise UsageError(
                f"{model} is decoded by transformers' modules, which serve no requests: leave "
                "--serve out, or pick a model of decode's own architectures"
            )
        if memory_limit_bytes is None:
            return {"slots": batch_limit}
        single = footprint(source, 1, capacity, kv_bits)
        # Temporaries of quantizing are freed before the cache is allocated and don't count.
        slots = slots_within(
            memory_limit_bytes, single.weights, RESERVE_BYTES, single.cache, batch_limit
        )
        return {"slots": slots}

    def serve(
        self,
        slots: int,
        capacity: int,
        kv_bits: int,
        requests: list[list[int]],
        step_tokens: int,
    ) -> dict[str, Any]:
        """Serve requests of [prompt, new] tokens with random prompts."""
        wanted = [ServingRequest(*lengths) for lengths in requests]
        longest = max(request.prompt_tokens for request in wanted)
        with self.engine(slots, capacity, kv_bits) as engine:
            prompts = self._prompts(engine, len(wanted), longest)
            served = serve(engine, wanted, prompts, step_tokens)
            return {
                "latency_s": [ms / 1000 for ms in served.latency_ms],
                "ttft_ms": list(served.ttft_ms),
                "token_ms": list(served.token_ms),
                "seconds": served.seconds,
                "steady_bytes": self._allocated_bytes(),
            }

    def _decode(
        self, engine: Engine, batch: int, prompt_tokens: int, new_tokens: int, *, powered: bool
    ) -> dict[str, Any]:
        prompts = self._prompts(engine, batch, prompt_tokens)
        began = time.perf_counter()
        lengths = range(prompt_tokens + 1, prompt_tokens + new_tokens)
        for bucket in dict.fromkeys(map(engine.bucket, lengths)):
            engine.prepare(batch, bucket)
            engine.advance(batch, bucket)
        prepared = time.perf_counter()
        engine.generate(prompts, min(new_tokens, _MAX_WARM_UP_TOKENS))
        warm = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        generated = engine.generate(prompts, new_tokens)
        decoded = time.perf_counter()
        length = prompt_tokens + new_tokens // 2
        watts = self._power_w(engine, batch, length) if powered else None
        took_s = (generated.prefill_ms + sum(generated.step_ms)) / 1000
        return {
            "prefill_ms": generated.prefill_ms,
            "step_ms": list(generated.step_ms),
            "steady_memory_bytes": self._allocated_bytes(),
            "peak_memory_bytes": self._peak_bytes(),
            "energy_j": None if watts is None else watts * took_s,
            "logits_sha256": logits_hash(engine, prompts, new_tokens) if self._is_invariant else "",
            "spent_s": {
                "prepare": prepared - began,
                "warm_up": warm - prepared,
                "decode": decoded - warm,
                "power": time.perf_counter() - decoded,
            },
        }

    def unload(self) -> dict[str, Any]:
        """Free the model, and memory of a failed load."""
        self._model = self._tuner = self._modules = None
        release(self.device)
        return {}

    def _parts(self, engine: Engine, batch: int, length: int) -> list[dict[str, Any]]:
        """Time that each part adds to a step at this length; empty on a CPU."""
        if self.device.type != "cuda":
            return []
        bucket = engine.bucket(length)
        engine.prepare(batch, bucket)
        engine.positions.fill_(length - 1)
        runs = profile.record(lambda: engine.advance(batch, bucket), _PROFILED_STEPS)
        model = engine.model
        shares = profile.shares(runs[-1], model.architecture.block, len(model.blocks))
        return [asdict(share) for share in shares]

    def _power_w(self, engine: Engine, batch: int, length: int) -> float | None:
        """Mean power of the GPU over repeated steps at this length; None: not available.

        A short decode ends between two changes of the energy counter, so its energy is its time
        multiplied by this power.
        """
        if self._sensor is None:
            return None
        bucket = engine.bucket(length)
        engine.prepare(batch, bucket)
        began = now = time.perf_counter()
        with Telemetry(self._sensor, period_s=_POWER_PERIOD_S) as telemetry:
            while self._ranks.any(now - began < _MIN_POWER_S):
                for _ in range(_STEPS_PER_SYNCHRONIZATION):
                    engine.positions.fill_(length - 1)
                    engine.advance(batch, bucket)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                now = time.perf_counter()
        return telemetry.mean_power_w(began, now)

    def _decode_modules(
        self, batch: int, prompt_tokens: int, new_tokens: int, kv_bits: int
    ) -> dict[str, Any]:
        assert self._modules is not None
        capacity = prompt_tokens + new_tokens
        engine = ModuleEngine(self._modules, capacity=capacity, kv_bits=kv_bits)
        prompts = self._random_prompts(self._modules.vocab, batch, prompt_tokens)
        began = time.perf_counter()
        with self._in_memory(f"batch {batch} of {capacity} tokens"):
            engine.generate(prompts, min(new_tokens, _MAX_WARM_UP_TOKENS))
            warm = time.perf_counter()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            generated = engine.generate(prompts, new_tokens)
        return {
            "prefill_ms": generated.prefill_ms,
            "step_ms": list(generated.step_ms),
            "steady_memory_bytes": self._allocated_bytes(),
            "peak_memory_bytes": self._peak_bytes(),
            "energy_j": None,
            "spent_s": {"warm_up": warm - began, "decode": time.perf_counter() - warm},
            "parts": [],
        }

    def _prompts(self, engine: Engine, batch: int, tokens: int) -> torch.Tensor:
        vocab = engine.model.architecture.dimensions.vocab
        return self._random_prompts(vocab, batch, tokens)

    def _random_prompts(self, vocab: int, batch: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "prompts", batch, tokens))
        drawn = torch.randint(vocab, (batch, tokens), generator=generator, dtype=torch.int32)
        return drawn.to(self.device)

    def _open(self, model: str, scheme: str) -> WeightSource | ModuleWeights:
        """Open the weights, or return those of the last call, as opening takes time."""
        key = model, scheme
        if self._source is None or self._source[0] != key:
            self._source = key, self._share_of(open_decodable(model, scheme, self._seed), model)
        return self._source[1]

    def _share_of(
        self, source: WeightSource | ModuleWeights, model: str
    ) -> WeightSource | ModuleWeights:
        if self._ranks.count == 1:
            return source
        if isinstance(source, ModuleWeights):
            raise UsageError(
                f"{model} is decoded by transformers' modules, on one GPU: leave --gpus out"
            )
        return RankWeights(source, self._ranks)

    @contextmanager
    def engine(self, slots: int, capacity: int, kv_bits: int) -> Iterator[Engine]:
        """Create an engine of the loaded model; it is closed at the end of the context."""
        if self._model is None or self._tuner is None:
            raise UsageError("nothing is loaded: load a model first")
        release(self.device)
        with self._in_memory(f"batch {slots} of {capacity} tokens"):
            engine = Engine(
                self._model,
                self._operations,
                self._tuner,
                slots=slots,
                capacity=capacity,
                kv_bits=kv_bits,
            )
            try:
                yield engine
            finally:
                engine.close()

    @contextmanager
    def _in_memory(self, what: str) -> Iterator[None]:
        """Convert an out-of-memory error of torch to MeasureError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MeasureError(
                f"{what} ran out of GPU memory, which others use too: free some, or pick a smaller "
                "batch, fewer tokens, --kv-bits 8, --gpus 2 or another scheme"
            ) from error

    def _allocated_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_allocated(self.device)

    def _peak_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)
