"""Imports of a process that runs a project's kernels: a commit's modules come only from its build.

The project itself is often installed next to this program, editable or not. Import hooks of
editable installations precede PYTHONPATH, and a package missing in a build would be imported from
the installed ones. Both sides of a comparison would then run the same code.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from flexq_bench.repository.provenance import PACKAGES

VARIABLE = "FLEXQ_BENCH_PROJECT_BUILD"
_INSTALLED = "site-packages"  # a checkout may contain a virtual environment


@dataclass(frozen=True)
class BuildPlace:
    """A build. home: its folder. builds: the folder of all builds. checkout: of the repository.

    distribution: the name of its package; empty: it has none.
    """

    home: str
    builds: str
    checkout: str
    distribution: str = ""

    def variables(self) -> Mapping[str, str]:
        """Variables that make a process import from this build."""
        return {VARIABLE: json.dumps(asdict(self))}


class _BuildFinder:
    """Finds top-level modules in a build first, and refuses those of its project elsewhere."""

    def __init__(self, place: BuildPlace) -> None:
        self._place = place

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if path is not None or name in PACKAGES or name in sys.stdlib_module_names:
            return None
        inside = [entry for entry in sys.path if self._is_inside(entry)]
        spec = PathFinder.find_spec(name, inside, target)
        if spec is not None and spec.origin is not None:
            return spec
        spec = self._spec_elsewhere(name, target)
        if spec is not None:
            self._refuse_elsewhere(name, spec)
        return spec

    def _spec_elsewhere(self, name: str, target: ModuleType | None) -> ModuleSpec | None:
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, None, target) for finder in finders)
        return next((spec for spec in specs if spec is not None), None)

    def _refuse_elsewhere(self, name: str, spec: ModuleSpec) -> None:
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
        for place in filter(os.path.isabs, places):
            if not self._is_inside(place) and (
                name in self._own_names or self._is_of_a_checkout(place)
            ):
                raise ImportError(
                    f"{name} is found in {place}, which is not the commit's: have the commit "
                    'installed ([build] environment = "pip", packages = ["."]), or uninstall '
                    f"{name} there",
                    name=name,
                )

    def _is_inside(self, place: str) -> bool:
        return Path(os.path.realpath(place)).is_relative_to(self._place.home)

    def _is_of_a_checkout(self, place: str) -> bool:
        path = Path(os.path.realpath(place))
        if path.is_relative_to(self._place.builds):  # a build command that installed another one
            return True
        checkout = self._place.checkout
        return path.is_relative_to(checkout) and (
            _INSTALLED not in path.relative_to(checkout).parts
        )

    @cached_property
    def _own_names(self) -> frozenset[str]:
        """Top-level modules of an installed distribution with the project's name, and that name.

        The name itself is included because an editable installation may list no modules.
        """
        own = _canonical(self._place.distribution)
        if not own:
            return frozenset()
        owners = metadata.packages_distributions()
        names = {
            name for name, some in owners.items() if any(_canonical(one) == own for one in some)
        }
        return frozenset(names | {own.replace("-", "_")})


def _canonical(distribution: str) -> str:
    """A distribution's name in the form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def import_from_build() -> None:
    """From now on import modules of a project from the build in the environment, if any.

    A module of the project in another place then raises ImportError with one line.
    """
    described = os.environ.get(VARIABLE)
    if described and not any(isinstance(finder, _BuildFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BuildFinder(BuildPlace(**json.loads(described))))
