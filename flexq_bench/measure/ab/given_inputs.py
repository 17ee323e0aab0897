"""Files that pass inputs from a gate to a worker and outputs back."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import torch

from flexq_bench.kernels.formats import Operand
from flexq_bench.measure.inputs import LinearInputs


def write_inputs(path: Path, inputs: LinearInputs) -> None:
    """Write codes and scales of both operands, and the real activations if any, for read_inputs."""
    torch.save(
        {"x_real": _on_cpu(inputs.x_real), "x": _parts(inputs.x), "w": _parts(inputs.w)}, path
    )


def read_inputs(path: Path, device: torch.device) -> LinearInputs:
    """Read the inputs that write_inputs stored, onto a device."""
    stored = torch.load(path, map_location=device, weights_only=True)
    return LinearInputs(stored["x_real"], Operand(**stored["x"]), Operand(**stored["w"]))


def read_output(path: Path, rows: int, columns: int) -> torch.Tensor:
    """Read FP16 [rows, columns] from a file written by an untrusted process.

    Raises ValueError if it is no such matrix, OSError if it can't be read.
    """
    size = 2 * rows * columns
    # A link may point to any file, even to an endless one.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(size + 1) or b""
    if len(content) != size:
        raise ValueError(f"an output of {rows}x{columns} has {size:,} bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.float16).view(rows, columns)


def _parts(operand: Operand) -> dict[str, object]:
    values = {field.name: getattr(operand, field.name) for field in fields(operand)}
    return {
        name: _on_cpu(value) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _on_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # A view would be written with its whole base tensor.
    return None if tensor is None else tensor.cpu().clone()
