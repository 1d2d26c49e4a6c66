from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dsgraph.compiler.costs.calibration_record import VERSION, TierRecord, merge, to_text
from dsgraph.compiler.costs.store import CalibrationError, folder, load, load_all, path_of, save
from tests.compiler.costs.records import LINK, calibration

HOST, DEVICE = calibration().host, calibration().device


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_written_is_read_back(cache):
    assert load(HOST, DEVICE) is None
    path = save(calibration())
    assert path == cache / "dsgraph" / "calibration" / "node_7-AMD_EPYC_9654_96_Core.json" == path_of(HOST, DEVICE)
    assert load(HOST, DEVICE) == calibration()
    assert "tiers" not in path.read_text()  # as in the files of older versions
    assert load(HOST, "AMD EPYC") is None
    assert json.loads(path.read_text())["flops_per_s"] == {"float32": 6e10}
    save(replace(calibration(), kernel_s=1.0))
    assert load(HOST, DEVICE).kernel_s == 1.0
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_all_devices_of_a_host():
    assert load_all(HOST) == []
    ours = [calibration(), calibration(device="NVIDIA H200", device_type="cuda", threads=0)]
    for record in [*ours, calibration(host="node-71"), calibration(host="node 7")]:
        save(record)  # "node 7" has the file name of "node-7", whose it then no longer is
    assert {record.device for record in load_all("node-71")} == {DEVICE}
    assert {record.device for record in load_all(HOST)} == {"NVIDIA H200"}


def _rewritten(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


def _link(**changes):
    return lambda text: json.dumps({**json.loads(text), "links": [{**json.loads(text)["links"][0], **changes}]})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "", "EOF"),
        (lambda text: text[: len(text) // 2], "EOF"),
        (lambda text: "[]", "object"),
        (lambda text: "\0\ufffd", "expected value"),
        (_rewritten(format="dsgraph-graph"), "its format is 'dsgraph-graph'"),
        (_rewritten(version=VERSION + 1), f"version {VERSION + 1}, and this dsgraph reads version {VERSION}"),
        (_rewritten(version=0), "version 0"),
        (_rewritten(kernel_s=None), "kernel_s"),
        (_rewritten(kernel_s=-1e-6), "kernel_s is -1e-06"),
        (_rewritten(bytes_per_s=0), "bytes_per_s is 0"),
        (_rewritten(bytes_per_s=float("inf")), "bytes_per_s is inf"),
        (_rewritten(flops_per_s={}), "flops_per_s: how many is 0"),
        (_rewritten(flops_per_s={"float32": float("nan")}), "flops_per_s.float32 is nan"),
        (_rewritten(threads=-2), "threads is -2"),
        (_rewritten(links=[{}]), "links.0"),
        (_link(latency_s=-1.0), "links.0.latency_s is -1"),
        (_link(bytes_per_s=0.0), "links.0.bytes_per_s is 0"),
        (_link(delay=-1.0), "links.0.delay is -1"),
        (_rewritten(tiers=[{"tier": "host", "latency_s": 0, "bytes_per_s": 0}]), "tiers.0.bytes_per_s is 0"),
        (_link(ranks=1), "links.0.ranks is 1"),
        (_link(hosts=0), "links.0.hosts is 0"),
        (_rewritten(host="node-8"), "on host 'node-8', not"),
        (_rewritten(device="AMD EPYC"), "of device 'AMD EPYC' on host"),
    ],
)
def test_every_damage_names_the_file_and_what_to_do(damage, said):
    path = save(calibration())
    path.write_text(damage(path.read_text()))
    with pytest.raises(CalibrationError) as error:
        load(HOST, DEVICE)
    for part in (str(path), said, "dsgraph calibrate", "delete it"):
        assert part in str(error.value)


def test_bytes_that_are_no_text_and_a_folder_in_its_place():
    path = save(calibration())
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="is damaged"):
        load(HOST, DEVICE)
    path.unlink()
    path.mkdir()
    with pytest.raises(CalibrationError, match=r"cannot be read \(Is a directory\)"):
        load(HOST, DEVICE)
    with pytest.raises(CalibrationError, match=r"cannot be written.*XDG_CACHE_HOME"):
        save(calibration())
    assert not list(path.parent.glob("*.tmp"))


def test_a_folder_that_cannot_be_made(cache):
    (cache / "dsgraph").write_text("")
    with pytest.raises(CalibrationError, match="XDG_CACHE_HOME"):
        save(calibration())


def test_a_relative_folder_is_ignored_and_home_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "somewhere/else"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert folder() == tmp_path / "home" / ".cache" / "dsgraph" / "calibration"


def test_who_may_read_it_is_the_users_choice():
    before = os.umask(0o077)
    try:
        assert stat.S_IMODE(save(calibration()).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_groups_that_were_not_measured_anew_are_kept():
    four = replace(LINK, ranks=4)
    old = calibration(links=(LINK, replace(LINK, kind="broadcast"), four), kernel_s=1.0)
    new = calibration(links=(replace(LINK, latency_s=1.0),))
    merged = merge(new, old)
    assert merged.links == (*new.links, four)
    assert merged.kernel_s == new.kernel_s
    assert merge(new, None) == new


def test_figures_survive_the_text_exactly():
    odd = calibration(kernel_s=0.1 + 0.2, links=(), tiers=(TierRecord("host", 0.1 + 0.2, 1e9 / 3),))
    save(odd)
    assert load(HOST, DEVICE) == odd
    assert to_text(odd) == to_text(load(HOST, DEVICE))
