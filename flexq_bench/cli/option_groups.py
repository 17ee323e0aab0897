"""Option groups: dataclasses whose fields are options, and commands that take them.

    @dataclass(frozen=True)
    class DeviceOptions:
        backend: Annotated[Backend, typer.Option()] = Backend.AUTO
        device: Annotated[str | None, typer.Option()] = None

    @takes_option_groups
    def compare(*, base: Annotated[str, typer.Argument()], place: DeviceOptions) -> None: ...

The parser sees a command with BASE, --backend and --device; the command gets a DeviceOptions. The
name of an option is its field's; only others (--json of `as_json`) and flags name it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def takes_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameters that are option groups by their fields.

    Typer reads the parameters of a command from its signature. Fields keep their order, names and
    defaults. They become keyword arguments, as a group may follow options with a default.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[parameter.name] = group
            parameters += _parameters_of(group)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    vars(expanded)["__signature__"] = inspect.Signature(parameters)
    return expanded


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(group)
    ]
