"""Declared functions as kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flexq_bench.kernels.contract import (
    Backend,
    CheckedGemm,
    Config,
    GemmCall,
    LinearKernel,
    OperationKernel,
    PackedOperand,
)
from flexq_bench.kernels.external.declaration import Declaration, Prepared, Workload
from flexq_bench.kernels.external.external_code import note_declared
from flexq_bench.kernels.formats import Operand, quantize
from flexq_bench.kernels.operand_tensors import number_of, operand_tensors, parts_of
from flexq_bench.workloads.operation import Input, OperationWorkload, Output


class FunctionDefinition(Declaration):
    """A decorated function with its declaration; calling it calls the function."""

    def __post_init__(self) -> None:
        super().__post_init__()
        note_declared(self)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self.function(*arguments, **named)

    def kernels(self) -> tuple[LinearKernel | OperationKernel, ...]:
        """Return the kernel on each of its backends."""
        return tuple(map(self.kernel, self.backends))

    def kernel(self, backend: Backend) -> LinearKernel | OperationKernel:
        """Return the kernel on a backend."""
        return (FunctionKernel if self.is_linear else FunctionOperation)(self, backend)


class _Declared:
    """A kernel by a declaration, as far as linear layers and other operations are alike."""

    def __init__(self, declaration: Declaration, backend: Backend) -> None:
        self._declared = declaration
        self.spec = declaration.spec(backend)

    def candidates(self, workload: Workload) -> Sequence[Config]:
        return self._declared.configs(self.spec.label, workload)

    def default_config(self, workload: Workload) -> Config | None:
        return next(iter(self.candidates(workload)), None)

    def machine_code(self, target: str) -> bytes | None:
        compiled = self._declared.machine_code
        return None if compiled is None else compiled(target)


class FunctionKernel(_Declared, CheckedGemm):
    """Calls the function of a linear layer with the tensors of its formats.

    For an operand these are the tensors of kernels/operand_tensors.py; those that `prepare_weight`
    returned replace those of the weights.
    """

    def __init__(self, declaration: Declaration, backend: Backend) -> None:
        super().__init__(declaration, backend)
        self._prepared = self._prepared_by("prepare_weight", declaration.prepare_weight)
        self._prepared_x = self._prepared_by("prepare_activation", declaration.prepare_activation)

    def _prepared_by(self, what: str, function: Callable[..., object] | None) -> Prepared | None:
        return None if function is None else Prepared(self.spec.label, what, function, "prepared")

    def pack_weight(self, weight: Operand) -> PackedOperand:
        tensors = operand_tensors(weight, self.spec.weight)
        if self._prepared is not None:
            sizes = {"n": weight.rows, "k": weight.k}
            tensors = self._prepared.make((weight.rows, weight.k), tensors.values(), sizes)
        return PackedOperand(tensors, weight.rows, weight.k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        tensors = operand_tensors(x, self.spec.activation)
        if self._prepared_x is not None:
            sizes = {"m": x.rows, "k": x.k}
            tensors = self._prepared_x.make((x.rows, x.k), tensors.values(), sizes)
        return PackedOperand(tensors, x.rows, x.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        zeros = torch.zeros(m, k, dtype=torch.float16, device=device)
        return self.pack_activation(quantize(zeros, self.spec.activation))

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        if self.spec.activation.is_dense:
            packed.buffers["values"].copy_(x)
            return
        # otherwise the kernel does not have this stage
        assert self._declared.quantize_activation is not None
        self._declared.quantize_activation(x, *packed.buffers.values())

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        if self.spec.activation.is_dense:
            values = x.to(self.spec.input_dtype)  # decoded models have FP16
            return PackedOperand({"values": values}, packed.rows, packed.k)
        quantize_activation = self._declared.quantize_activation
        if self._declared.returns and quantize_activation is not None:
            made = zip(packed.buffers, quantize_activation(x), strict=True)
            return PackedOperand(dict(made), packed.rows, packed.k)
        return super().activated(x, packed)

    def compute(self, call: GemmCall, config: Config | None) -> torch.Tensor | None:
        x, w, out, bias, shape = call
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
        given = [
            *_arguments(self._prepared_x, x),
            *_arguments(self._prepared, w),
        ]
        made = self._declared.call(self.spec.label, given, [out], sizes, config)
        y = out if made is None else made[0]
        if bias is not None:
            y.add_(bias)
        return None if made is None else y

    def read_only(self) -> frozenset[str]:
        return frozenset("x" if self._prepared is not None else "xw")


def _arguments(prepared: Prepared | None, operand: PackedOperand) -> Sequence[object]:
    if prepared is None:
        return tuple(operand.buffers.values())
    return prepared.arguments((operand.rows, operand.k), operand)


class FunctionOperation(_Declared, OperationKernel):
    """Calls the function of another operation with its inputs' tensors, in the declared order.

    Tensors without elements are left out. Those that `prepare_weight` and `prepare_state` returned
    replace all weights, and all states. Outputs follow, unless the function returns them.
    """

    def __init__(self, declaration: Declaration, backend: Backend) -> None:
        super().__init__(declaration, backend)
        given = {"weight": declaration.prepare_weight, "state": declaration.prepare_state}
        self._prepared = {
            role: Prepared(self.spec.label, f"prepare_{role}", function, f"{role}:")
            for role, function in given.items()
            if function is not None
        }
        self._updates = dict(declaration.updates)
        self._names: dict[tuple[OperationWorkload, str], tuple[str, ...]] = {}

    def prepare(self, workload: OperationWorkload, streamed: PackedOperand) -> PackedOperand:
        buffers, values = dict(streamed.buffers), dict(workload.values)
        for role, prepared in self._prepared.items():
            of_role = [
                buffers.pop(name)
                for tensor in self._declared.definition.inputs
                if tensor.role == role
                for name in self._buffers(workload, tensor)
            ]
            buffers |= prepared.make(workload, of_role, values)
        return PackedOperand(buffers, streamed.rows, streamed.k)

    def launch(
        self,
        workload: OperationWorkload,
        fresh: PackedOperand,
        streamed: PackedOperand,
        out: Mapping[str, torch.Tensor],
        config: Config | None = None,
    ) -> Mapping[str, torch.Tensor] | None:
        given: list[object] = []
        inserted: set[str] = set()
        for tensor in self._declared.definition.inputs:
            prepared = self._prepared.get(tensor.role)
            if prepared is None:
                for name in self._buffers(workload, tensor):
                    of = fresh if name in fresh.buffers else streamed
                    given.append(of.buffers[name])
            elif tensor.role not in inserted:
                inserted.add(tensor.role)
                given += prepared.arguments(workload, streamed)
        names = [
            name
            for output in self._declared.definition.outputs
            if output.name not in self._updates
            for name in self._buffers(workload, output)
        ]
        outs = [out[name] for name in names]
        written = {
            name: (fresh if of in fresh.buffers else streamed).buffers[of]
            for output in self._declared.definition.outputs
            if output.name in self._updates
            for name in self._buffers(workload, output)
            for of in [f"{self._updates[output.name]}.{name.rpartition('.')[2]}"]
        }
        values, updated = dict(workload.values), tuple(written.values())
        made = self._declared.call(self.spec.label, given, outs, values, config, updated)
        if made is None and not self._updates:
            return None
        return dict(out) | written | dict(zip(names, made or outs, strict=True))

    def read_only(self) -> frozenset[str]:
        return frozenset("x" if self._prepared else "xw")

    def _buffers(self, workload: OperationWorkload, tensor: Input | Output) -> tuple[str, ...]:
        """Names of the buffers of an input or output; empty if it has no elements."""
        key = workload, tensor.name
        if key not in self._names:
            self._names[key] = self._found_buffers(workload, tensor)
        return self._names[key]

    def _found_buffers(
        self, workload: OperationWorkload, tensor: Input | Output
    ) -> tuple[str, ...]:
        shape = self._declared.definition.shape_of(tensor.name, dict(workload.values))
        if 0 in shape:
            return ()
        parts = parts_of(number_of(tensor.number, self.spec))
        return tuple(f"{tensor.name}.{part}" for part in parts)
