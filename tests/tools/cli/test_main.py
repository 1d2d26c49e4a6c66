from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsgraph.tools.cli.document import page
from dsgraph.tools.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]


def test_help_fits_a_screen_and_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 120
    for command in COMMANDS:
        assert f"  {command} " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bisct"], "unknown command 'bisct'; did you mean 'bisect'?"),
        (["qqqqqq"], "unknown command 'qqqqqq'; known: "),
        (["passes", "--jsn"], "unrecognized arguments: --jsn (see dsgraph passes --help)"),
        (["run", "x.py", "--steps", "3"], "put arguments of the script after"),
        (["--nonsense"], "dsgraph: "),
        ([], "dsgraph: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_json_is_json(capsys):
    assert main(["passes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "merge_gathers"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", (["--help"], pytest.param(["passes"], marks=pytest.mark.full)))
def test_a_closed_pipe_is_no_failure(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "dsgraph", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `head` does when it has seen enough
    errors = process.stderr.read().decode()
    assert process.wait() == 0, errors
    assert errors == ""


def test_the_command_line_starts_without_torch():
    code = "import sys, dsgraph.tools.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_page_of_the_command_line_is_up_to_date():
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == page(), (
        "run python -m dsgraph.tools.cli.document docs/reference/cli.md"
    )


def test_the_page_does_not_depend_on_the_terminal(monkeypatch):
    before = page()
    monkeypatch.setenv("COLUMNS", "40")
    assert page() == before
    for command in COMMANDS:
        assert f"## dsgraph {command}\n" in before
