"""Formulas against published figures, and against counting by hand."""

from __future__ import annotations

import pytest

from dsgraph.parallel.planning.gpus import NODE_GPUS
from dsgraph.parallel.planning.layout import ModelShape
from dsgraph.parallel.planning.layout_plan import efficiency
from tests.parallel.layouts import GIB, SMALL, SMALL_OF_16_HEADS, TRILLION, planned


def test_a_trillion_parameters_on_4096_gpus():
    """30 GB of model states and 2.5 GB of activations, by DeepSpeed's publication of September 2020."""
    plan = planned(TRILLION, tp=8, pp=64, dp=8, batch=4096)
    states, activations = (plan.even[part] / GIB for part in ("model_states", "activations"))
    assert states == pytest.approx(30, rel=0.05)
    assert activations == pytest.approx(2.5, rel=0.05)
    assert states + activations == pytest.approx(32.5, rel=0.05)
    assert states == 10**12 * 16 / 512 / GIB
    assert activations == 298 * 2048 * 17408 * 2 / 8 / GIB
    assert plan.fits
    assert plan.first["total"] > plan.even["total"]


@pytest.mark.parametrize("stages", [8, 16, 64])
@pytest.mark.parametrize(("times", "published"), [(4, 0.81), (8, 0.90)])
def test_efficiency_of_a_pipeline(stages, times, published):
    assert efficiency(stages, times * stages) == pytest.approx(published, rel=0.05)


def test_the_bubble_is_the_pipelines_only():
    plan = planned(SMALL, tp=1, pp=4, dp=2, batch=64)
    assert plan.values["efficiency"] == 32 / 35
    assert plan.values["waiting"] == pytest.approx(plan.values["busy"] * 3 / 32)
    alone = planned(SMALL, tp=1, pp=1, dp=8, batch=64)
    assert (alone.values["waiting"], alone.values["pp_bytes"], alone.values["tp_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_under_zero(stage, gigabytes):
    """7.5 B parameters on 64 ranks: figure 1 of the ZeRO paper."""
    model = ModelShape(params=7_500_000_000, layers=36, hidden=4096, seq=1024, vocab=50304, heads=32)
    plan = planned(model, tp=1, pp=1, dp=64, batch=64, zero_stage=stage)
    assert plan.even["model_states"] / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_bytes_between_data_parallel_ranks(stage, volume):
    """In half precision, of the parameters' bytes: section 7 of the ZeRO paper, for one micro-batch."""
    plan = planned(SMALL, tp=1, pp=1, dp=8, batch=8, zero_stage=stage)
    assert plan.values["dp_bytes"] == pytest.approx(volume * 2 * SMALL.params * 7 / 8)


def test_bytes_of_tensor_and_pipeline_parallelism():
    plan = planned(SMALL_OF_16_HEADS, tp=4, pp=2, dp=1, batch=6, micro_batch=2)
    result = 2 * 2 * 1024 * 2048  # bytes of a layer's result for a micro-batch
    assert plan.values["tp_bytes"] == 3 * 12 * (4 + 2) * 2 * 3 / 4 * result
    assert plan.values["pp_bytes"] == 3 * 2 * result / 4
    kept = planned(SMALL_OF_16_HEADS, tp=4, pp=2, dp=1, batch=6, micro_batch=2, checkpointing=False)
    assert kept.values["tp_bytes"] == 3 * 12 * 4 * 2 * 3 / 4 * result


def test_kept_activations():
    """Equation 1 of arXiv 2205.05198, for every layer."""
    plan = planned(SMALL, tp=1, pp=1, dp=8, batch=8, checkpointing=False)
    assert plan.even["activations"] == pytest.approx(48 * 1024 * 1600 * (34 + 5 * 25 * 1024 / 1600))
    assert plan.values["hardware_rate"] == plan.values["model_rate"]


@pytest.mark.parametrize(("batch", "in_flight"), [(3, 3), (30, 8)])
def test_micro_batches_in_flight_are_no_more_than_there_are(batch, in_flight):
    plan = planned(SMALL, tp=1, pp=8, dp=1, batch=batch)
    assert plan.first["activations"] == in_flight * 6 * 2 * 1024 * 1600
    assert plan.last["activations"] == 6 * 2 * 1024 * 1600


def test_the_fuller_one_of_the_first_and_the_last_stage_has_to_fit():
    long = planned(TRILLION, tp=8, pp=64, dp=8, batch=4096)
    assert long.fullest == long.first["total"] > long.last["total"]
    wide = planned(SMALL, tp=1, pp=2, dp=1, batch=8, micro_batch=4)
    assert wide.fullest == wide.last["total"] > wide.first["total"]
    assert wide.last["buffers"] - wide.first["buffers"] == 4 * 1024 * 4 * (1600 + 50304)
    alone = planned(SMALL, tp=1, pp=1, dp=1, batch=8)
    assert alone.first == alone.last


def test_a_published_speed():
    """502 petaFLOP/s on 3,072 GPUs, recomputation counted: abstract of arXiv 2104.04473."""
    model = ModelShape(params=1_008_000_000_000, layers=128, hidden=25600, seq=2048, vocab=51200, heads=160)
    plan = planned(model, tp=8, pp=64, dp=6, batch=3072, gpu="a100-80gb")
    assert plan.values["hardware_rate"] * 3072 == pytest.approx(502e15, rel=0.1)


def test_the_slowest_stage_sets_the_pace():
    """The one with most layers, or the last one with the head where all have as many."""
    values = planned(TRILLION, tp=8, pp=64, dp=8, batch=4096).values
    assert values["stage_flops"] == 5 * 4 * values["layer_forward"]
    values = planned(SMALL, tp=1, pp=4, dp=1, batch=8).values
    assert values["stage_flops"] == 12 * 4 * values["layer_forward"] + 3 * values["head_forward"]


def test_steps_print_symbols_and_numbers():
    plan = planned(TRILLION, tp=8, pp=64, dp=8, batch=4096)
    steps = {(heading, step.formula.name): step for heading, step in plan.steps}
    given = steps["a step", "layer_input"]
    assert given.symbolic == "2*hidden*micro_batch*seq/tp"
    assert given.with_values == "2*17408*1*2048/8"
    optimizer = steps["divided evenly", "optimizer"]
    assert optimizer.symbolic == "12*stage_params*(1/dp if zero_stage >= 1 else 1)/tp"
    for _, step in plan.steps:
        assert step.formula.source
        arguments = {"Min": min, "Max": max, "ceiling": lambda x: -(-x // 1), "floor": lambda x: x // 1}
        assert eval(step.with_values, arguments) == pytest.approx(step.value, rel=1e-6)


def test_gpus_are_those_of_the_compiler():
    """Both know the same data sheets; the compiler counts 0.7 of the peak for products."""
    from dsgraph.passes.analysis.hardware import GPUS, PRODUCTS, product_of

    for gpu in NODE_GPUS.values():
        product = product_of(gpu.name.partition("-")[0].upper())
        assert 0.7 * gpu.peak_flops == pytest.approx(PRODUCTS[product].device.flops_per_s)
    for name, architecture in (("a100-80gb", "sm_80"), ("h100-80gb", "sm_90")):
        assert NODE_GPUS[name].memory_bytes == GPUS[architecture].memory_bytes
