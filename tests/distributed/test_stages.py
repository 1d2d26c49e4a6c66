"""Every stage, model and world size against one process."""

from __future__ import annotations

import pytest

from tests.distributed.training import compare
from tests.models import CASES

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
WORLDS = (2, 3)


def _compare(case: str, **how: object) -> None:
    compare(CASES[case].build, CASES[case].batches, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_matches_one_process(ranks, case, stage, world):
    ranks(world).run(_compare, case, stage=stage)


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
    ranks(4).run(_compare, "gpt", stage=stage, mesh_shape=(2, 2), micro_batches=2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_uncompiled_model_matches_one_process(ranks, case, stage):
    ranks(2).run(_compare, case, stage=stage, codegen=None)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_are_bit_equal_to_one_process(ranks, stage):
    """A sum of two is the same in any order, and halving is exact: nothing may differ, not even a bit."""
    ranks(2).run(_compare, "gpt", stage=stage, exact=True)
    ranks(2).run(_compare, "gpt", stage=stage, exact=True, codegen=None)


@pytest.mark.inductor
@pytest.mark.parametrize("stage", (1, 3))
def test_inductor_matches_one_process(ranks, stage):
    ranks(2).run(_compare, "tied", stage=stage, codegen="inductor")
