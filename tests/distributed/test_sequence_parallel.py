"""Tensor-parallel models whose norms and residuals are sliced by tokens: the numbers are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import dsgraph
from tests.distributed.test_parallelize import _train as train_stages
from tests.distributed.test_tensor_parallel import _build, _check
from tests.distributed.training import compare, full
from tests.models import CASES

pytestmark = pytest.mark.distributed

ON = {"sequence_parallel": True}


class _Calls:
    """A pass that counts calls."""

    __name__ = "count_calls"
    __closure__ = (None,)  # nothing is cached

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, gm: torch.fx.GraphModule, ctx: Any) -> int:
        self.names += [str(node.target) for node in gm.graph.nodes]
        return 0


def _train(name: str, rows: int, codegen: str, **options: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = _build(name, **options)
    alone = copy.deepcopy(model)

    def batch(step: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 64, (rows, 8), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids}

    dsgraph.tensor_parallel(model, mesh["tp"], example_inputs=batch(0))
    calls = _Calls()
    pipeline = dsgraph.default_pipeline() + dsgraph.graph_pass(phase="capture")(calls)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen, "pipeline": pipeline, **ON})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (model, alone)]
    for step in range(2):
        losses = []
        for each in (compiled, alone):
            torch.manual_seed(step)  # for dropout
            losses.append(each(**batch(step)).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for (key, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            _check(full(mine.grad), theirs.grad, f"step {step}: gradient of {key}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # After the last of four sums, the output layer is sliced, or it reads the tokens of all ranks.
    last = name in ("gpt2", "bert")
    assert [sum(op in call for call in calls.names) for op in ("scatter_sum", "gather_entered")] == [4, 4 - last]


@pytest.mark.parametrize(
    ("name", "rows", "codegen", "options"),
    [
        ("llama", 3, "eager", {}),
        ("gpt2", 3, "eager", {"drop": 0.1}),
        pytest.param("llama", 2, "inductor", {}, marks=[pytest.mark.inductor, pytest.mark.full]),
        *(
            pytest.param(name, rows, "eager", {}, marks=pytest.mark.full)
            for name in ("gpt2", "llama", "qwen3", "bert", "phi3")
            for rows in (2, 3)
        ),
    ],
)
def test_trains_as_one_process(ranks, name, rows, codegen, options):
    ranks(2).run(_train, name, rows, codegen, **options)


def _train_partitioned(**how: Any) -> None:
    compare(CASES["gpt"].build, CASES["gpt"].batches, tp=2, **how, **ON)


@pytest.mark.full
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_partitioned_models_train_as_one_process(ranks, stage, micro_batches):
    ranks(4).run(_train_partitioned, stage=stage, micro_batches=micro_batches)


def test_stages_train_as_one_process(ranks):
    assert max(ranks(4).run(train_stages, 1, 2, 2, 1, options={"codegen": "eager", **ON})) <= 1e-5


def _without_slices() -> None:
    model = dsgraph.partition(CASES["gpt"].build(), stage=3, keep_whole_below=12)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "strict": True, **ON})
    with pytest.raises(
        dsgraph.StrictError, match="'sequence_parallel' has no effect: the model has no tensor-parallel"
    ):
        compiled(*CASES["gpt"].batches(0, dist.get_rank()))


def test_without_tensor_parallel_operators_strict_refuses_it(ranks):
    ranks(2).run(_without_slices)


def _train_experts(kind: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    if kind == "DeepseekV3":
        heads |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16}
        heads |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        heads |= {"first_k_dense_replace": 1}
    else:
        heads |= {"num_experts" if kind == "Qwen3Moe" else "num_local_experts": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, max_position_embeddings=32)

    def build() -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        model.set_experts_implementation("grouped_mm")
        return model

    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch, plain = {"input_ids": tokens, "labels": tokens}, build()
    parts = dsgraph.parallelize(build(), example_kwargs=batch, tp=2, options={"codegen": "eager", **ON})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, parts)]
    for _ in range(2):
        loss = plain(**batch).loss
        loss.backward()
        torch.testing.assert_close(parts.step(**batch), loss.detach(), atol=1e-4, rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.full
@pytest.mark.parametrize("kind", ("Qwen3Moe", "DeepseekV3", "Mixtral"))
def test_experts_train_as_one_process(ranks, kind):
    ranks(2).run(_train_experts, kind)
