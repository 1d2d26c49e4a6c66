from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.passes import CaptureFacts, PassContext, Phase, Pipeline, Runner
from dsgraph.tools.dumping.records import CompileRecord, GraphRecord
from dsgraph.tools.dumping.writer import DumpFolder
from dsgraph.utils.json_records import json_schema
from tests.models import build, tokens
from tests.passes.tracing import trace
from tests.pipelines import without_buckets
from tests.tools.dumping.dumps import dump, manifest, read

pytestmark = pytest.mark.slow

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "dump.schema.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return dump(tmp_path_factory.mktemp("dump"))


def test_every_pass_has_a_graph_before_and_after(place):
    record = manifest(place)
    names = ["", "merge_gathers", "slice_tensors", "substitute_kernels"]
    expected = [*[("capture", name) for name in names], ("joint", ""), ("joint", "compress_gathers")]
    assert [(step.phase, step.pass_name) for step in record.steps[:6]] == expected
    assert [step.pass_name for step in record.steps if step.phase == "backward"] == [
        "",
        "release_kept_gather",
        "bucket_backward_gathers",
        "prefetch_backward_gathers",
        "bucket_reductions",
        "delay_reduction_waits",
    ]
    for step in record.steps:
        assert (place / f"{step.graph}.py").is_file()
        assert (place / f"{step.same_as or step.graph}.json").is_file()
    assert not list(place.glob("*.tmp"))


def test_files_obey_the_schema(place):
    schemas = json.loads(SCHEMA.read_text())
    for path in place.glob("*.json"):
        kind = "compile" if path.name == "compile.json" else "graph"
        jsonschema.validate(json.loads(path.read_text()), schemas[kind])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"format": "dsgraph-graph"}, schemas["graph"])


def test_the_written_schema_is_that_of_the_records():
    assert json.loads(SCHEMA.read_text()) == {
        "compile": json_schema(CompileRecord),
        "graph": json_schema(GraphRecord),
    }, (
        "python -m dsgraph.tools.dumping.schema > docs/reference/dump.schema.json; "
        "raise VERSION if old readers would misread"
    )


def test_text_reads_like_python(place):
    text = (place / "joint-4-insert_zero_collectives.py").read_text()
    assert text.startswith("# joint graph after pass 4, insert_zero_collectives (rank 0, compile 1):")
    assert re.search(r'mm: "f32\[16, \d+\] cpu" = torch\.ops\.aten\.mm\.default\(view\w*, t\w*\)', text)
    assert "# blocks.0.attention.qkv  examples/gpt.py:53  q, k, v = self.qkv(x)" in text
    assert "gather_param" not in text.replace("gather_param_", "")
    compile(
        re.sub(r'"', "", re.sub(r': "[^"]*"', "", text)).replace("(primals_1, ..., tangents_1)", "(*a)"), "x", "exec"
    )


def test_nodes_know_their_origin_and_their_passes(place):
    joint = read(place, "joint-4-insert_zero_collectives")
    gathers = [node for node in joint.nodes if node.target.endswith("all_gather_into_tensor.default")]
    head = next(node for node in gathers if node.collective.parameters == ("head.weight",))
    first = head.history[0]
    assert (first.phase, first.pass_name, first.action) == ("joint", "insert_zero_collectives", "made")
    assert head.module == "head"
    assert head.source.startswith("examples/gpt.py:")
    assert "self.head(" in head.code
    assert (head.collective.axis, head.collective.ranks) == ("shard", 2)
    forward = read(place, "forward-0-before")
    (again,) = [node for node in forward.nodes if node.name == head.name]
    actions = [(event.pass_name, event.action) for event in again.history]
    assert ("insert_zero_collectives", "made") in actions, "history goes along into later graphs"
    (bucket,) = [node for node in read(place, "forward-1-bucket_forward_gathers").nodes if node.collective]
    assert [(event.pass_name, event.action) for event in bucket.history] == [("bucket_forward_gathers", "made")]
    assert bucket.collective.parameters[-1] == "head.weight"
    assert bucket.collective.wait == "wait_tensor_default"


def test_a_move_is_in_the_history(tmp_path):
    forward = read(dump(tmp_path, pipeline=without_buckets()), "forward-1-prefetch_forward_gathers")
    moved = [node for node in forward.nodes if node.collective and node.collective.parameters == ("head.weight",)]
    actions = [(event.pass_name, event.action) for event in moved[0].history]
    assert ("prefetch_forward_gathers", "moved") in actions


def test_reductions_know_their_parameters(place):
    (path,) = [path for path in place.glob("backward-*.json") if "delay_reduction_waits" in path.name]
    backward = read(place, path.stem)
    reductions = [node for node in backward.nodes if "reduce" in node.target and node.collective]
    parameters = {name for node in reductions for name in node.collective.parameters}
    assert parameters == {name for name, _ in build("gpt").named_parameters()}
    (bucket,) = [node for node in reductions if "all_reduce" in node.target]
    assert all("norm" in name for name in bucket.collective.parameters)
    assert len(bucket.collective.parameters) > 1


def test_live_bytes_are_those_of_the_pieces(place):
    for phase in ("forward-2-prefetch_forward_gathers", "backward-5-delay_reduction_waits"):
        graph = read(place, phase)
        for number, live in enumerate(graph.live):
            assert live == sum(piece.bytes for piece in graph.memory if piece.first <= number <= piece.last)


def test_a_pass_that_changes_nothing_says_so(place):
    steps = {step.graph: step for step in manifest(place).steps}
    idle = steps["joint-6-choose_collective_algorithms"]
    assert idle.same_as == "joint-4-insert_zero_collectives"
    assert (idle.changed, idle.touched) == (0, 0)
    assert "see joint-4-insert_zero_collectives.py" in (place / f"{idle.graph}.py").read_text()
    assert steps["joint-7-keep_last_gather"].touched == 1, "a tag counts"


SECRET = 123456.75


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("secret", torch.full((8,), SECRET))
        self.plain = torch.full((8,), SECRET)
        nn.init.constant_(self.layer.weight, SECRET)

    def forward(self, x):
        return (self.layer(x) + self.secret * self.plain).sum()


def test_no_value_of_a_tensor_is_written(tmp_path):
    dump(tmp_path, Constants, (torch.full((2, 8), SECRET),))
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 10
    assert not any("123456" in text for text in texts)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        return checkpoint(lambda y: F.gelu(self.layer(y)), x, use_reentrant=False).sum()


def test_bodies_of_checkpoint_regions_are_there(tmp_path):
    place = dump(tmp_path, Checkpointed, (torch.randn(2, 12),))
    captured = read(place, "capture-0-before")
    assert any("gelu" in node.target for body in captured.bodies for node in body.nodes)
    assert "def wrap_body" in (place / "capture-0-before.py").read_text()


def test_symbolic_sizes_are_kept_as_text(tmp_path):
    x, y = tokens(0, 0)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(y, 1)
    forward = read(dump(tmp_path, batch=(x, y)), "forward-2-prefetch_forward_gathers")
    shapes = [value.shape for node in forward.nodes for value in node.values]
    assert any(isinstance(size, str) for shape in shapes for size in shape)
    assert any(isinstance(value.bytes, str) for node in forward.nodes for value in node.values)
    assert all(live > 0 for live in forward.live)


@pytest.mark.slow
def test_only_the_first_compiles_are_dumped(one_rank, tmp_path):
    model = dsgraph.partition(build("small"), stage=3, keep_whole_below=0)
    backend = dsgraph.api.new_backend()
    options = {"codegen": "eager", "dump": tmp_path, "dump_compiles": 2}
    for time in (8, 9, 10):
        torch._dynamo.reset()
        torch.compile(model, backend=backend, options=options, dynamic=False)(*tokens(0, 0, time=time))
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {"compile1", "compile2"}


def test_a_graph_that_is_too_large_is_left_out(tmp_path):
    def function(x):
        for _ in range(100):
            x = x.sin()
        return x

    folder = DumpFolder(tmp_path, largest=5_000)
    sink = folder.begin(CaptureFacts(), codegen="eager", strict=False, most=1)
    ctx = PassContext(phase=Phase.FORWARD)
    Runner(Pipeline(), sink=sink).run(trace(lambda x: x.sin(), torch.randn(3)), ctx)
    Runner(Pipeline(), sink=sink).run(trace(function, torch.randn(3)), ctx)
    small, large = manifest(tmp_path / "rank0" / "compile1").steps
    assert small.left_out == ""
    assert re.fullmatch(r"its \.py has [\d,]+ bytes, more than 5,000", large.left_out)
    assert all(path.stat().st_size <= 5_000 for path in tmp_path.rglob("*-*.*"))


def test_what_an_earlier_run_left_goes_and_nothing_else(tmp_path):
    dump(tmp_path, lambda: build("small"))
    mine = tmp_path / "rank0" / "compile1" / "notes.txt"
    mine.write_text("mine")
    old = tmp_path / "rank0" / "compile7"
    old.mkdir()
    (old / "compile.json").write_text("{}")
    (old / "joint-0-before.json").write_text("{}")
    kept = [
        old / "weights.py",
        tmp_path / "rank0" / "compile1-good" / "joint-0-before.py",
        tmp_path / "rankings" / "a.py",
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "compile.json").write_text("mine")
    (tmp_path / "rank0" / "compile8").symlink_to(elsewhere)
    (tmp_path / "rank4" / "compile1").mkdir(parents=True)
    (tmp_path / "rank4" / "compile1" / "compile.json").write_text("{}")
    dump(tmp_path, lambda: build("small"))
    assert mine.read_text() == "mine"
    assert not (old / "compile.json").exists() and not (old / "joint-0-before.json").exists()
    assert all(path.read_text() == "mine" for path in kept)
    assert (elsewhere / "compile.json").read_text() == "mine", "links are not followed"
    assert not (tmp_path / "rank4").exists(), "a rank that is no more"


def test_a_folder_that_cannot_be_written_warns_once_and_training_goes_on(one_rank, tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = dsgraph.partition(build("small"), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "dump": tmp_path / "file"})
    with pytest.warns(UserWarning, match="cannot dump graphs") as caught:
        compiled(*tokens(0, 0)).backward()
    assert len([w for w in caught if "cannot dump" in str(w.message)]) == 1

    torch._dynamo.reset()
    options = {"codegen": "eager", "dump": tmp_path / "file", "strict": True}
    with pytest.raises(dsgraph.StrictError, match=r"^dsgraph cannot dump graphs"):
        torch.compile(model, backend="dsgraph", options=options)(*tokens(0, 0))


@pytest.mark.full  # a folder that cannot be written warns alike
@pytest.mark.slow
def test_a_disk_that_fills_up_warns_once_and_leaves_nothing_half_written(tmp_path):
    program = f"""
import resource, warnings
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the system refuses larger files, as a full disk would
from pathlib import Path
from tests.tools.dumping.dumps import dump
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dump(Path({str(tmp_path)!r}))
print(len([w for w in caught if "cannot dump graphs" in str(w.message)]))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_step_after_compiling_writes_nothing(one_rank, tmp_path):
    model = dsgraph.partition(build("small"), stage=3, keep_whole_below=0)
    backend = dsgraph.api.new_backend()
    compiled = torch.compile(model, backend=backend, options={"codegen": "eager", "dump": tmp_path})
    compiled(*tokens(0, 0)).backward()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    compiled(*tokens(1, 0)).backward()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_model_without_ranks_is_dumped_too(tmp_path):
    torch._dynamo.reset()
    backend = dsgraph.api.new_backend()
    model = nn.Linear(3, 3)
    torch.compile(model, backend=backend, options={"codegen": "eager", "dump": tmp_path})(torch.randn(2, 3))
    record = manifest(tmp_path / "rank0" / "compile1")
    assert (record.world, record.axes, record.parameters) == (1, (), ())
