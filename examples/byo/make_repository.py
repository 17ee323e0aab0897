"""Make a git repository of 30 commits with kernels in it, four of which a gate should find.

    python examples/byo/make_repository.py FOLDER --kernels torch

FOLDER must not be there yet. Commits with a seeded change are tagged by its name; all others change
a file that no kernel reads. What is seeded changes all kernels that the repository has. `slower`
pads the weights by 10 % of the input features, `slightly-slower` by 3 %, and kernels read and
multiply the zeros as they do the rest; --percent takes other numbers, for machines whose noise
hides these. The suite's layer is large enough for these shares to be shares of the time on a GPU,
or, with torch kernels alone, small enough for a CPU; --shape takes another.
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
PERCENT = (10, 3)  # of the input features that the slower commits pad the weights by
CPU_SHAPE = "1024x1024"  # N x K, as the sample has it
GPU_SHAPE = "8192x12800"  # 100 groups of K: 10 and 3 of them are 10 % and 3 %


def seeded(percent: tuple[int, int]) -> dict[int, tuple[str, str, str]]:
    """By number of a commit its tag, then what is replaced by what in every kernel's source."""
    fast, slower, slightly = (f"PADDING_PERCENT = {some} " for some in (0, *percent))
    return {
        11: ("slower", fast, slower),
        15: ("fast-again", slower, fast),
        19: ("wrong-result", "SIGN = 1\n", "SIGN = -1\n"),
        20: ("right-again", "SIGN = -1\n", "SIGN = 1\n"),
        23: ("build-break", '"""\n', '"""\n(\n'),
        24: ("builds-again", '"""\n(\n', '"""\n'),
        27: ("slightly-slower", fast, slightly),
    }


def make(
    folder: Path,
    kinds: tuple[str, ...],
    percent: tuple[int, int] = PERCENT,
    shape: str | None = None,
) -> None:
    """Make the repository in a new folder.

    kinds: of KINDS, the kernels that it has. shape: N x K of the suite; None: one for what they run
    on.
    """
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for kind in set(KINDS) - set(kinds):
        (folder / "kernels" / f"{kind}_kernels.py").unlink()
    project = folder / "flexq-bench.toml"
    files = ", ".join(f'"kernels/{kind}_kernels.py"' for kind in kinds)
    text = re.sub(r"kernels = \[.*\]", f"kernels = [{files}]", project.read_text())
    project.write_text(text)
    suite = folder / "bench" / "suite.toml"
    shape = shape or (CPU_SHAPE if kinds == ("torch",) else GPU_SHAPE)
    suite.write_text(suite.read_text().replace(CPU_SHAPE, shape))
    git(folder, 0, "init", "--quiet", "--initial-branch=main")
    changes = seeded(percent)
    for number in range(1, COMMITS + 1):
        tag, old, new = changes.get(number, ("", "", ""))
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
    parser.add_argument("--percent", default=PERCENT, nargs=2, type=int, metavar="P")
    parser.add_argument("--shape", metavar="NxK", help="Of the layer that the suite has.")
    options = parser.parse_args()
    kinds = tuple(options.kernels.split(","))
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kernels {options.kernels}: there are {', '.join(KINDS)}")
    if options.folder.exists():
        parser.error(f"{options.folder} is there already: name a new folder")
    make(options.folder, kinds, tuple(options.percent), options.shape)


if __name__ == "__main__":
    main()
