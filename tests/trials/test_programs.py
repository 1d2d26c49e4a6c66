"""Random programs are reproducible by seed; their judge detects faults; some programs run to a correct end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dsgraph.utils.errors import RanksDisagreeError
from tests.trials.programs.judge import FAULTS, NAMED, RIGHT, Ending, Failure, judge
from tests.trials.programs.play import Net, OwnError, Twin
from tests.trials.programs.program import PARTINGS, Batch, Call, Step, draw

ROWS = torch.arange(6.0).reshape(3, 2)
EXPECTED = [{"step 0, batch 0, loss": torch.tensor(1.0), "step 0, heads.0.weight": ROWS}] * 2


def _notes(rank: int, loss: float = 1.0, error: float = 0.0) -> list[tuple[str, object, bool]]:
    rows = ROWS.chunk(2)[rank] + error
    return [
        ("step 0, batch 0, loss", torch.tensor(loss).numpy(), False),
        ("step 0, heads.0.weight", rows.numpy(), True),
    ]


def _ended(rank: int, **more: float) -> Ending:
    return Ending("the end", _notes(rank, **more), has_ended=True)


def _failed(error: Exception, *, rank: int = 1, seconds: float = 1.0, notes: int = 2) -> Ending:
    return Ending("backward", _notes(rank)[:notes], Failure.of(error, seconds), has_ended=True)


NAMES_IT = RanksDisagreeError("rank 0 gathers parameter 'heads.0.weight', rank 1 has ended")
OF_GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.mark.parametrize(
    ("second", "outcome"),
    (
        (_ended(1), RIGHT),
        (_ended(1, error=0.01), "wrong numbers"),
        (_ended(1, loss=1.01), "wrong numbers"),
        (Ending("the end", _notes(1)[:1], has_ended=True), "wrong numbers"),
        (_failed(NAMES_IT), NAMED),
        (_failed(OwnError("of its own"), notes=1), RIGHT),
        (_failed(NAMES_IT, seconds=11), "late error"),
        (_failed(RanksDisagreeError("something differs")), "unnamed error"),
        (_failed(RuntimeError("rank 0 has no 'heads.0.weight'")), "unnamed error"),
        (_failed(OF_GLOO), "gloo's words"),
        (_failed(RanksDisagreeError(f"rank 0 gathers 'heads.0.weight': {OF_GLOO}")), "gloo's words"),
        (Ending("backward", exit_code=-6), "crash"),
        (Ending("backward", exit_code=None), "hang"),
    ),
)
def test_each_ending_is_told_from_the_others(second, outcome):
    verdict = judge([_ended(0), second], EXPECTED)
    assert verdict.outcome == outcome, verdict.said
    assert (outcome in FAULTS) == (outcome not in (RIGHT, NAMED))


def test_the_worst_rank_counts_and_a_refusal_is_a_fault_where_all_must_be_right():
    verdict = judge([_failed(NAMES_IT, rank=0), Ending("backward", exit_code=None)], EXPECTED)
    assert verdict.outcome == "hang"
    assert judge([_ended(0), _failed(NAMES_IT)], EXPECTED, must_be_right=True).outcome == "refused"


def _stopped(step: int, **more: float) -> Ending:
    return Ending(f"step {step}, batch 0, backward", _notes(1, **more), Failure.of(NAMES_IT, 0.0), has_ended=True)


def test_wrong_losses_of_steps_that_all_ranks_completed_are_found_though_an_error_follows():
    assert judge([_ended(0), _stopped(1, loss=2.0)], EXPECTED).outcome == "wrong before error"
    assert judge([_ended(0), _stopped(0, loss=2.0)], EXPECTED).outcome == NAMED
    assert judge([_ended(0, loss=2.0), _stopped(0)], EXPECTED).outcome == "wrong before error"


def test_parameters_that_no_forward_has_used_are_not_wrong_where_an_error_follows():
    assert judge([_ended(0), _stopped(1, error=1.0)], EXPECTED).outcome == NAMED


def test_a_seed_gives_one_program_and_seeds_give_all_kinds():
    programs = [draw(seed) for seed in range(400)]
    assert programs == [draw(seed) for seed in range(400)]
    assert {part for each in programs for part in each.parts} == set(PARTINGS)
    assert {(each.stage, each.compiles, each.world) for each in programs} == {
        (stage, compiles, world) for stage in range(4) for compiles in ("no", "whole", "parts") for world in (2, 3)
    }
    for each in programs:
        assert all(each.ranks)
        assert each.parts or len(set(each.ranks)) == 1


def test_the_twin_takes_the_mean_over_ranks():
    alone, other = (Step((Batch((Call(head=head, depth=1),)),)) for head in (0, 1))
    program = replace(draw(0), optimizer="sgd", clips=False, bias=False, frozen=False, experts=0)
    both = Twin(replace(program, ranks=((alone,), (other,)))).run()
    single = Twin(replace(program, ranks=((alone,),))).run()
    torch.manual_seed(program.seed)
    before = dict(Net(program).named_parameters())["heads.0.weight"].detach()
    decay = 0.3 * 0.01 * before  # of which no rank takes a mean
    moved = [before - each[0]["step 0, heads.0.weight"] - decay for each in (both, single)]
    torch.testing.assert_close(2 * moved[0], moved[1])
    assert torch.equal(both[0]["step 0, heads.1.weight"], both[1]["step 0, heads.1.weight"])


# For `make test-all` alone: each compiles in several processes.
@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(280)
def test_programs_end_with_the_numbers_of_one_process_or_with_an_error_that_names_the_cause():
    command = [sys.executable, "-m", "tests.trials.programs", "--count", "24", "--where", "not p.parts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right numbers" in done.stdout
