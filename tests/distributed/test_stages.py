"""Every stage, model and world size against one process."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import dsgraph
from dsgraph.passes.graph import is_collective, is_wait
from tests.distributed.training import compare
from tests.models import CASES, build, tokens

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
WORLDS = (2, 3)

# Compiling takes most of the time: sizes that change without notice (two compiles) on 2 ranks, announced ones on 3; and
# graphs without a backward for three models.
CASES_BY_WORLD = [
    (case, world)
    for case in sorted(CASES)
    for world in WORLDS
    if (case, world) not in {("dynamic", 3), ("marked_dynamic", 2)}
]
ALSO_EVALUATED = ("gpt", "graph_break", "uneven")


def _compare(case: str, **how: object) -> None:
    compare(CASES[case].build, CASES[case].batches, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("case", "world"), CASES_BY_WORLD)
def test_matches_one_process(ranks, case, stage, world):
    # With two ranks nothing may differ, not even a bit: a sum of two is the same in any order, and halving is exact.
    exact, evaluate = case == "gpt" and world == 2, case in ALSO_EVALUATED and world == 2
    ranks(world).run(_compare, case, stage=stage, exact=exact, evaluate=evaluate)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_matches_one_process(ranks, stage, world):
    ranks(world).run(_compare, "gpt", stage=stage, micro_batches=4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mesh_shape", [(2, 1), (1, 2), (3, 1), (1, 3)])
def test_hybrid_mesh_matches_one_process(ranks, stage, mesh_shape):
    ranks(max(mesh_shape)).run(_compare, "uneven", stage=stage, mesh_shape=mesh_shape)


@pytest.mark.parametrize("stage", STAGES)
def test_two_by_two_mesh_matches_one_process(ranks, stage):
    ranks(4).run(_compare, "uneven", stage=stage, mesh_shape=(2, 2), micro_batches=2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"dynamic", "marked_dynamic"}))
def test_uncompiled_model_matches_one_process(ranks, case, stage):
    ranks(2).run(_compare, case, stage=stage, codegen=None, exact=case == "gpt", evaluate=True)


@pytest.mark.inductor
@pytest.mark.parametrize(("case", "stage"), [("tied", 1), ("uneven", 3)])
def test_inductor_matches_one_process(ranks, case, stage):
    ranks(2).run(_compare, case, stage=stage, codegen="inductor")


COLLECTIVES = re.compile(r"torch\.ops\.(?:_c10d_functional|dsgraph)\.(\w+)\.default\(")


def _compare_order() -> None:
    """Inductor must not move collectives past one another, nor waits back to where they overlap with nothing."""
    expected: list[list[str]] = []

    @dsgraph.graph_pass(phase="forward")
    def note_forward(gm, ctx):
        calls = [node for node in gm.graph.nodes if is_collective(node) or is_wait(node)]
        expected.append([node.target._schema.name.split("::")[1] for node in calls])
        return 0

    @dsgraph.graph_pass(phase="backward")
    def note_backward(gm, ctx):
        return note_forward.run(gm, ctx)

    model = dsgraph.partition(build("gpt"), stage=3, keep_whole_below=0)
    pipeline = dsgraph.default_pipeline() + [note_forward, note_backward]
    compiled = torch.compile(model, backend="dsgraph", options={"pipeline": pipeline})
    x, y = tokens(0, dist.get_rank())

    def step():
        compiled(x, y).backward()

    _, sources = run_and_get_code(step)
    found = [COLLECTIVES.findall(source) for source in sources]
    assert found == expected and {"gather_by_broadcasts", "all_to_all_single"} <= {*found[0], *found[1]}


@pytest.mark.inductor
def test_inductor_keeps_the_order_of_collectives(ranks):
    ranks(2).run(_compare_order)
