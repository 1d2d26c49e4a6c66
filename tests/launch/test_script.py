from __future__ import annotations

import pytest

from dsgraph.launch.processes import describe_exit
from dsgraph.launch.script import find_script, run_script
from dsgraph.utils.errors import LaunchError


@pytest.mark.parametrize(
    ("path", "module", "problem"),
    [
        (None, None, "give one script"),
        ("a.py", "a", "give one script"),
        ("nothing.py", None, "is not a file"),
        (".", None, "is a folder"),
        (None, "no.such.module", "there is no module 'no.such.module'"),
    ],
)
def test_what_cannot_be_run_is_refused(path, module, problem):
    with pytest.raises(LaunchError, match=problem):
        find_script(path, module)


def test_a_script_ends_with_its_own_exit_code(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys; sys.exit(int(os.environ['CODE']) + len(sys.argv))")
    script = find_script(str(tmp_path / "script.py"), None)
    assert run_script(script, ["one"], nproc=1, environment={"CODE": "3"}) == 5


def test_how_a_program_ended():
    assert [describe_exit(code) for code in (3, -9, 137, 200)] == [
        *("exit code 3", "killed by SIGKILL", "killed by SIGKILL", "exit code 200"),
    ]
