"""Bytecode that a comparison writes for the checkouts of its sides."""

from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import flexq_bench
from flexq_bench import errors
from flexq_bench.measure.ab.tree_bytecode import add_bytecode

OWN = Path(errors.__file__)
PLACE = OWN.relative_to(Path(flexq_bench.__file__).parents[1])


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """The value of a name in this program's `errors` as a checkout has it, never compiled again."""

    def load(text: str, name: str) -> object:
        source = tmp_path / PLACE
        source.parent.mkdir(parents=True)
        source.write_text(text)
        add_bytecode(tmp_path)

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("compiled again")

        monkeypatch.setattr(SourceFileLoader, "source_to_code", refuse)
        found: dict[str, object] = {"__name__": "errors"}
        exec(SourceFileLoader("errors", str(source)).get_code("errors"), found)
        return found[name]

    return load


def test_module_of_equal_text_has_bytecode(loaded):
    assert loaded(OWN.read_text(), "FlexqError").__name__ == "FlexqError"


def test_changed_module_has_bytecode_of_its_own(loaded):
    assert loaded(f"{OWN.read_text()}\nMINE = 7\n", "MINE") == 7


@pytest.mark.parametrize("text", ["this is no Python", f"{'-' * 200_000}1", "0" + ".a" * 200_000])
def test_module_that_does_not_compile_is_left_out(loaded, text):
    with pytest.raises(AssertionError, match="compiled again"):
        loaded(text, "MINE")
