"""Imports in a process that runs a project's kernels: all modules come from one commit's build.

Developers often have the project itself installed next to this program, editable or not. Import
hooks of editable installations take precedence over PYTHONPATH, and a package that is missing in a
build would be imported from the installation. Both sides of a comparison would then run the same
code.
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

from flexq_bench.packages import PACKAGE

VARIABLE = "FLEXQ_BENCH_PROJECT_BUILD"
_INSTALLED = "site-packages"  # in a virtual environment, which may be inside of a checkout


@dataclass(frozen=True)
class BuildPlace:
    """Location of a build.

    home: the folder of the build. builds: the folder of all builds. checkout: the repository's
    working tree. distribution: name of its package; empty: it has none.
    """

    home: str
    builds: str
    checkout: str
    distribution: str = ""

    def variables(self) -> Mapping[str, str]:
        """Return environment variables that make a process import from this build."""
        return {VARIABLE: json.dumps(asdict(self))}


class _BuildFinder:
    """Import hook: finds modules in a build first, and refuses other copies of the project's."""

    def __init__(self, place: BuildPlace) -> None:
        self._place = place

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if path is not None or name == PACKAGE or name in sys.stdlib_module_names:
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
        if path.is_relative_to(self._place.builds):  # a build command installed another build
            return True
        checkout = self._place.checkout
        return path.is_relative_to(checkout) and (
            _INSTALLED not in path.relative_to(checkout).parts
        )

    @cached_property
    def _own_names(self) -> frozenset[str]:
        """Names of the project's top-level modules.

        These are the modules of its installed distribution, and the module of the distribution's
        name: the metadata of an editable installation may list no modules.
        """
        own = _canonical(self._place.distribution)
        if not own:
            return frozenset()
        owners = metadata.packages_distributions()
        names = {
            name for name, some in owners.items() if any(_canonical(owner) == own for owner in some)
        }
        return frozenset(names | {own.replace("-", "_")})


def _canonical(distribution: str) -> str:
    """Normalize the name of a distribution, as package indexes do."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def import_from_build() -> None:
    """Import a project's modules from the build that the environment names, if it names one.

    Importing a module of the project from elsewhere then raises ImportError with a one-line
    message.
    """
    described = os.environ.get(VARIABLE)
    if described and not any(isinstance(finder, _BuildFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BuildFinder(BuildPlace(**json.loads(described))))
