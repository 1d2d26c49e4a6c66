"""Runs the code blocks of a page of documentation, and writes the outputs that it shows.

    python -m tests.doc_blocks PAGE...            run the blocks of pages
    python -m tests.doc_blocks --write PAGE...    run them and replace the outputs that the pages show

A page is run from top to bottom in an empty folder:

- a block with `title="train.py"` is written to that file;
- all other `python` blocks of a page are one program, `page.py`, which runs on one rank after the last block;
  `<!-- ranks: N -->` before a block begins a new program, which runs on N ranks;
- each `sh` block is run by `bash -e`; a `text` or `console` block right after one shows what it prints.

Readers do not see a block `<!-- hidden python` ... `-->`. `<!-- not run: REASON -->` before a block leaves it out.
Output is compared without its numbers, because they vary; `...` alone on a line stands for any lines.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?^```(?P<kind>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^```$"
    r"|^<!-- hidden python(?P<hidden_info>[^\n]*)\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """One block of a page: its language, its file name if it has one, its text and the position of the text."""

    kind: str
    title: str
    code: str
    span: tuple[int, int]
    skipped: bool
    hidden: bool


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page in order."""
    found = []
    for match in _BLOCK.finditer(text):
        hidden = match["hidden"] is not None
        info = match["hidden_info"] if hidden else match["info"]
        title = re.search(r'title="([^"]+)"', info)
        found.append(
            Block(
                "python" if hidden else match["kind"],
                title[1] if title else "",
                match["hidden"] if hidden else match["code"],
                match.span("hidden" if hidden else "code"),
                match["skip"] is not None,
                hidden,
            )
        )
    return found


def run_page(page: Path, folder: Path, write: bool = False) -> None:
    """Run the blocks of a page in `folder`.

    Raises:
        AssertionError: a block failed, or printed something else than the page shows.
    """
    text = page.read_text()
    marks = [(int(match[1]), match.end()) for match in re.finditer(r"<!-- ranks: (\d+) -->", text)]
    programs: dict[int, str] = {}  # number of markers before it -> text
    replaced, printed = [], None
    for block in blocks_of(text):
        if block.title and not block.skipped:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.code)
        elif block.kind == "python" and not block.skipped:
            before = sum(end <= block.span[0] for _, end in marks)
            programs[before] = programs.get(before, "") + block.code + "\n"
        elif block.kind in ("sh", "bash") and not block.skipped:
            printed = _run(block.code, folder, page)
            continue
        elif block.kind in ("text", "console") and printed is not None:
            if write:
                replaced.append((block.span, printed))
            else:
                assert _shows(block.code, printed), f"{page.name} shows\n{block.code}\nand this was printed:\n{printed}"
        printed = None
    for before, program in programs.items():
        ranks = marks[before - 1][0] if before else 1
        (folder / "page.py").write_text(program)
        _run(f"torchrun --nproc-per-node {ranks} page.py", folder, page)
    for (first, last), output in reversed(replaced):
        text = text[:first] + output + text[last:]
    if replaced:
        page.write_text(text)


def _run(command: str, folder: Path, page: Path) -> str:
    """Return what a shell block prints, without warnings of libraries on the error stream."""
    scripts = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _shows(shown: str, printed: str) -> bool:
    """Tell whether a page's output is what was printed, numbers apart and with `...` for any lines."""
    lines = [_plain(line) for line in shown.rstrip().splitlines()]
    pattern = "\n".join(".*" if line == "..." else re.escape(line) for line in lines)
    return (
        re.fullmatch(pattern, "\n".join(_plain(line) for line in printed.rstrip().splitlines()), re.DOTALL) is not None
    )


def _plain(line: str) -> str:
    """Return a line without numbers, versions of torch and widths of columns."""
    line = _NUMBER.sub("0", re.sub(r"torch \d\S*", "torch 0", line))
    return re.sub(r"\s+", " ", re.sub(r"-{3,}", "---", line)).strip()


def main(arguments: list[str] | None = None) -> int:
    """Run pages; the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.doc_blocks", description="Runs the code blocks of pages.")
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="replace the outputs that the pages show")
    options = parser.parse_args(arguments)
    for page in options.pages:
        with tempfile.TemporaryDirectory() as folder:
            run_page(page, Path(folder), options.write)
        print(f"{page}: {len(blocks_of(page.read_text()))} blocks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
