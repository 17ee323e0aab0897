"""Make a git repository of 30 commits with kernels in it, four of which a gate should find.

    python examples/byo/make_repository.py FOLDER --kernels torch

FOLDER must not be there yet. The commits of the list SEEDED are tagged by their names; all others
change a comment. What is seeded changes all kernels that the repository has.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

SAMPLE = Path(__file__).parent / "sample"
COMMITS = 30
KINDS = ("torch", "triton", "nvrtc")
# By number of the commit: its tag, then what is written for what in every kernel's source.
SEEDED = {
    11: ("slower-10-percent", "AGAIN_PERCENT = 0 ", "AGAIN_PERCENT = 10 "),
    15: ("fast-again", "AGAIN_PERCENT = 10 ", "AGAIN_PERCENT = 0 "),
    19: ("wrong-result", "SIGN = 1\n", "SIGN = -1\n"),
    20: ("right-again", "SIGN = -1\n", "SIGN = 1\n"),
    23: ("build-break", '"""\n', '"""\n(\n'),
    24: ("builds-again", '"""\n(\n', '"""\n'),
    27: ("slower-3-percent", "AGAIN_PERCENT = 0 ", "AGAIN_PERCENT = 3 "),
}


def make(folder: Path, kinds: tuple[str, ...]) -> None:
    """Make the repository in a new folder. kinds: of KINDS, the kernels that it has."""
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for kind in set(KINDS) - set(kinds):
        (folder / "kernels" / f"{kind}_kernels.py").unlink()
    project = folder / "flexq-bench.toml"
    files = ", ".join(f'"kernels/{kind}_kernels.py"' for kind in kinds)
    text = re.sub(r"kernels = \[.*\]", f"kernels = [{files}]", project.read_text())
    project.write_text(text)
    git(folder, 0, "init", "--quiet", "--initial-branch=main")
    for number in range(1, COMMITS + 1):
        tag, old, new = SEEDED.get(number, ("", "", ""))
        for kind in kinds:
            path = folder / "kernels" / f"{kind}_kernels.py"
            source = path.read_text()
            assert old in source, (tag, path)
            path.write_text(source.replace(old, new, 1))
        (folder / "CHANGES").write_text(f"change {number}\n")
        git(folder, number, "add", "--all")
        git(folder, number, "commit", "--quiet", "--message", tag or f"change {number}")
        if tag:
            git(folder, number, "tag", tag)


def git(folder: Path, number: int, *arguments: str) -> None:
    """Git with dates that make the same ids every time."""
    person = {"NAME": "acme", "EMAIL": "acme@example.com", "DATE": f"2026-01-01T00:{number:02}:00Z"}
    names = {f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in person.items()}
    subprocess.run(["git", *arguments], cwd=folder, check=True, env={**os.environ, **names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", default=",".join(KINDS), help="Of torch, triton and nvrtc.")
    options = parser.parse_args()
    kinds = tuple(options.kernels.split(","))
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kernels {options.kernels}: there are {', '.join(KINDS)}")
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: name a new folder")
    make(options.folder, kinds)


if __name__ == "__main__":
    main()
