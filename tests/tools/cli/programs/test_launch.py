from __future__ import annotations

import json
import shlex

import pytest

from dsgraph.tools.cli.main import main

HOSTS = "worker-1 slots=4\nworker-2 slots=4\n"


@pytest.fixture
def hostfile(tmp_path) -> str:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return str(path)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ([], {"worker-1": "0,1,2,3", "worker-2": "0,1,2,3"}),
        (["--include=worker-1@worker-2:0,2"], {"worker-1": "0,1,2,3", "worker-2": "0,2"}),
        (["-e", "worker-2:1"], {"worker-1": "0,1,2,3", "worker-2": "0,2,3"}),
        (["--num_nodes", "1", "--num_gpus", "2"], {"worker-1": "0,1"}),
    ],
)
def test_a_dry_run_shows_the_command_of_each_host(options, slots, hostfile, capsys):
    assert main(["launch", "--json", "-H", hostfile, *options, "--dry-run", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    for each in found:
        line = shlex.split(shlex.split(each["command"])[-1])
        assert f"CUDA_VISIBLE_DEVICES={slots[each['host']]}" in line and line[-2:] == ["--", "train.py"]
    assert [each["host"] for each in found] == list(slots)


@pytest.mark.parametrize(
    ("own", "script"),
    [
        (["--num_gpus", "2"], ["train.py", "--num_gpus", "3", "--", "--json"]),
        (["--num_gpus=2", "-m"], ["package.train", "-m", "--dry-run"]),
        (["--export", "A=-b", "--num_gpus", "1"], ["train.py"]),
    ],
)
def test_what_stands_behind_the_script_is_its_own(own, script, capsys):
    assert main(["launch", *own, "--dry-run", *script]) == 0
    line = shlex.split(capsys.readouterr().out)
    expected = ["-m", *script] if "-m" in own else script
    assert line[line.index("--") + 1 :] == expected and not any("CUDA" in word for word in line)
    assert ("A=-b" in line) == ("--export" in own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: SCRIPT"),
        (["-H", "nowhere", "s.py"], "hostfile nowhere: No such file"),
        (["-H", "HOSTS", "-i", "worker-3", "s.py"], "there is no host 'worker-3'; there are worker-1, worker-2"),
        (["-H", "HOSTS", "-i", "worker-1", "-e", "worker-2", "s.py"], "not allowed with argument"),
        (["-H", "HOSTS", "-i", "worker-1", "--num_gpus", "2", "s.py"], "leave out --num_nodes and --num_gpus"),
        (["-H", "HOSTS", "--num_gpus", "5", "s.py"], "worker-1 has 4 slots"),
        (["--num_gpus", "1", "--num_nodes", "2", "s.py"], "--num_nodes 2: there are 1 hosts (localhost)"),
        (["--num_gpus", "0", "s.py"], "it takes a whole number above 0"),
        (["--num_gpus", "1", "--master_port", "0", "s.py"], "it takes a port from 1 to 65535"),
        (["--hostfil", "HOSTS", "s.py"], "unrecognized arguments: --hostfil"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, hostfile, capsys):
    given = [hostfile if word == "HOSTS" else word for word in arguments]
    assert main(["launch", *given]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_host_without_ssh_is_named(hostfile, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "-H", hostfile, "s.py"]) == 2
    assert "ssh cannot be started for worker-1: No such file" in capsys.readouterr().err


def test_devices_are_chosen_once(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert main(["launch", "-i", "localhost:0", "s.py"]) == 2
    assert "leave one out" in capsys.readouterr().err
