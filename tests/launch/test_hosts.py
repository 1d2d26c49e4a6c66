"""Hostfiles and filters, and the commands that come of them."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsgraph.launch.commands import Job, commands_of, read_export
from dsgraph.launch.hosts import Host, exclude, first, include, parse_hostfile
from dsgraph.utils.errors import LaunchError

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,5}[a-z0-9])?", fullmatch=True)
POOLS = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=5)


def _hosts(pool: dict[str, int]) -> tuple[Host, ...]:
    return tuple(Host(name, tuple(range(slots))) for name, slots in pool.items())


@st.composite
def chosen(draw) -> tuple[dict[str, int], dict[str, set[int] | None]]:
    """A pool, and of some of its hosts some of the slots; None: the host alone is named."""
    pool = draw(POOLS)
    names = draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, unique=True))
    return pool, {name: draw(st.none() | st.sets(st.integers(0, pool[name] - 1), min_size=1)) for name in names}


def _written(wanted: dict[str, set[int] | None]) -> str:
    return "@".join(name if slots is None else f"{name}:{','.join(map(str, slots))}" for name, slots in wanted.items())


@given(POOLS, st.sampled_from(["", " ", "\t"]), st.booleans())
def test_a_hostfile_is_read_in_its_order(pool, space, comments):
    lines = [f"{space}{name} {space}slots={slots}{space}" for name, slots in pool.items()]
    if comments:
        lines = ["# all of them", "", *(f"{line} # here" for line in lines), "   "]
    assert parse_hostfile("\n".join(lines)) == _hosts(pool)


@given(chosen())
def test_filters_part_all_slots(case):
    """Included and excluded slots of one filter are all slots, each once, in the hostfile's order."""
    pool, wanted = case
    hosts, text = _hosts(pool), _written(wanted)
    inside = {host.name: set(host.slots) for host in include(hosts, text)}
    assert inside == {name: set(range(pool[name])) if slots is None else slots for name, slots in wanted.items()}
    rest = {name: set(range(slots)) - inside.get(name, set()) for name, slots in pool.items()}
    rest = {name: slots for name, slots in rest.items() if slots}
    if not rest:
        with pytest.raises(LaunchError, match="leaves no slot"):
            exclude(hosts, text)
        return
    outside = exclude(hosts, text)
    assert {host.name: set(host.slots) for host in outside} == rest
    for found in (include(hosts, text), outside):
        assert [host.name for host in found] == [name for name in pool if name in {host.name for host in found}]


@given(POOLS, st.integers(1, 6), st.integers(1, 10))
def test_the_first_hosts_and_slots(pool, nodes, slots):
    if nodes > len(pool) or slots > min(list(pool.values())[:nodes]):
        with pytest.raises(LaunchError, match=r"--num_nodes|--num_gpus"):
            first(_hosts(pool), nodes=nodes, slots=slots)
        return
    assert first(_hosts(pool), nodes=nodes, slots=slots) == _hosts(dict.fromkeys(list(pool)[:nodes], slots))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("worker-1", "line 1: 'worker-1'; a line is"),
        ("worker-1 slots=x", "line 1"),
        ("# one\nworker-1 slots=4 max=2", "line 2"),
        ("a slots=1\na slots=2", "line 2: a appears twice"),
        ("a slots=0", "a has no slot"),
        *((f"{name} slots=1", "is no name of a host") for name in ("-oProxyCommand=x", "a;b", "$(x)", "me@a", "a:b")),
        *((f"{name} slots=1", "is no name of a host") for name in ("a`b`", "a|b", "../a", "a'b", "é", "a-", ".")),
    ],
)
def test_a_bad_hostfile_is_refused(text, message):
    with pytest.raises(LaunchError, match=message):
        parse_hostfile(text)


@pytest.mark.parametrize("choose", (include, exclude))
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no host ''"),
        ("worker1", r"there is no host 'worker1'; did you mean 'worker-1'\?"),
        ("worker-1@", "there is no host ''"),
        ("worker-1:", "'' is no slot"),
        ("worker-1:0-1", "'0-1' is no slot"),
        ("worker-1:1:2", "is no slot"),
        ("worker-1:4", "worker-1 has no slot 4; it has 4"),
        ("worker-1:0@worker-1:1", "worker-1 appears twice"),
    ],
)
def test_a_bad_filter_is_refused(choose, text, message):
    with pytest.raises(LaunchError, match=message):
        choose(_hosts({"worker-1": 4, "worker-2": 4}), text)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=4))
def test_a_shell_gives_back_every_argument(arguments):
    (made,) = commands_of([Host("a", (0,))], Job(["train.py", *arguments], exports={"NAME": "a b;$(c)'\""}))
    *_, name, line = made.command
    assert name == "a" and made.command[0] == "ssh"
    words = shlex.split(line.partition(" && exec ")[2])
    assert words[1:3] == ["NAME=a b;$(c)'\"", "CUDA_VISIBLE_DEVICES=0"]
    assert words[words.index("--") + 1 :] == ["train.py", *arguments]


def test_a_real_shell_gives_back_strange_arguments():
    strange = ["a b", "", "'", '"', ";", "$(touch x)", "`id`", "*", "~", "\n", "-x", "--", "\\", "&", "é"]
    (made,) = commands_of([Host("a", (0,))], Job(["train.py", *strange]))
    shown = made.command[-1].replace("exec env", "exec printf '%s\\0'", 1)
    said = subprocess.run(["sh", "-c", shown], capture_output=True, check=True).stdout.decode().split("\0")
    assert said[said.index("--") + 2 : -1] == strange


def _options(hosts: dict[str, int], **more) -> list[list[str]]:
    found = []
    for made in commands_of(_hosts(hosts), Job(["s.py"], sets_devices=False, **more)):
        words = shlex.split(made.command[-1]) if made.command[0] == "ssh" else list(made.command)
        found.append(words[words.index("dsgraph.launch.on_host") + 1 : words.index("--")])
    return found


def test_how_hosts_meet():
    assert _options({"localhost": 2}) == [["2", "--standalone"]]
    assert _options({"localhost": 1}, max_restarts=3) == [["1", "--standalone", "--max-restarts=3"]]
    assert _options({"a": 2, "b": 1}) == [
        ["2", "--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=29500"],
        ["1", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29500"],
    ]
    one, two = _options({"a": 1, "b": 1}, max_restarts=1, master_addr="::1", master_port=5)
    assert "--rdzv-endpoint=[::1]:5" in one and "--rdzv-conf=is_host=true" in one and "--max-restarts=1" in one
    assert "--rdzv-conf=is_host=false" in two and "--local-addr=b" in two


@pytest.mark.parametrize(
    ("hosts", "job", "message"),
    [
        ({"localhost": 1, "a": 1}, {}, "give --master_addr"),
        ({"a": 1}, {"master_addr": "-x"}, "--master_addr: '-x' is no name"),
        ({"localhost": 1}, {"ssh_port": 22}, "--ssh_port: no host is reached by ssh"),
        ({"a": 1}, {"exports": {"CUDA_VISIBLE_DEVICES": "0"}}, "choose them with --include"),
    ],
)
def test_what_has_no_meaning_is_refused(hosts, job, message):
    with pytest.raises(LaunchError, match=message):
        commands_of(_hosts(hosts), Job(["s.py"], **job))


def test_exports(monkeypatch):
    monkeypatch.setenv("HERE", "x=y")
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert [read_export(text) for text in ("HERE", "A=b=c", "A=")] == [("HERE", "x=y"), ("A", "b=c"), ("A", "")]
    for text, message in [("NOT_HERE", "no such variable"), ("A B=c", "no name"), ("RANK=1", "torchrun sets it")]:
        with pytest.raises(LaunchError, match=message):
            read_export(text)
