"""Model catalog: published dimensions by model name, read from data files."""

from __future__ import annotations

from functools import cache
from importlib import resources

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.model_spec import ModelSpec
from flexq_bench.workloads.names import unknown


def load_catalog() -> dict[str, ModelSpec]:
    """Return all models by name, grouped by family, smaller models first."""
    return dict(_catalog())


def get_model(name: str) -> ModelSpec:
    """Return a model of the catalog; upper case counts as lower case.

    Raises WorkloadError with the nearest names first.
    """
    catalog = _catalog()
    if name.lower() not in catalog:
        raise WorkloadError(
            f"{unknown('model', name.lower(), catalog)}; any other model: `flexq-bench sweep "
            "--config PATH`, its config.json"
        )
    return catalog[name.lower()]


def spelled(name: str) -> str:
    """Return a catalog model's name as the catalog writes it; any other name unchanged."""
    return name.lower() if name.lower() in _catalog() else name


@cache
def _catalog() -> dict[str, ModelSpec]:
    # Imported here: pydantic would slow down `flexq-bench --help`.
    from flexq_bench.workloads.family_files import read_family

    files = (resources.files("flexq_bench") / "workloads" / "catalog").iterdir()
    by_name = {f.name.removesuffix(".toml"): f for f in files if f.name.endswith(".toml")}
    families = [read_family(by_name[name]) for name in sorted(by_name)]
    return {model.name: model for family in families for model in family}
