"""Tensor-parallel models: unmodified, on two ranks, as in one process."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import clip_grad_norm_

import dsgraph
from dsgraph.utils.errors import RanksDisagreeError
from tests.distributed.fused_families import DECODER, FAMILIES, VOCAB, WIDTH, build_family
from tests.distributed.training import full

pytestmark = pytest.mark.distributed


def _build(name: str, **options: Any) -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    if name in FAMILIES:
        return build_family(name)
    kind, _, variant = name.partition("-")
    heads = (
        {"num_key_value_heads": {"": 2, "plan": 2, "vocab": 2, "mqa": 1, "odd": 3}[variant]} if kind != "gpt2" else {}
    )
    if variant == "odd":
        options |= {"num_attention_heads": 3, "hidden_size": 24}
    decoder = {**DECODER, **heads, **options}
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**decoder))
    if kind == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**decoder, head_dim=8))
    if kind == "mixtral":
        return tf.MixtralForCausalLM(tf.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2))
    if kind == "gpt2":
        drop = options.pop("drop", 0.0)
        config = tf.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, resid_pdrop=drop, embd_pdrop=drop,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = tf.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # transformers finds none for this class, and warns during the forward
        return model
    return tf.BertForMaskedLM(tf.BertConfig(**DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


SLICED = {
    **dict.fromkeys(
        ("falcon-new", "falcon-alibi", "falcon-mqa", "bloom"),
        ("query_key_value.weight", "dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight"),
    ),
    "phi3": ("qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight"),
    "deepseek": ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight", "up_proj.weight", "experts.down_proj"),
    "llama": ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
    "qwen3": ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"),
    "mixtral": ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "gpt2": ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    "bert": ("attention.self.query.weight", "attention.self.query.bias", "attention.output.dense.weight"),
}


# Row-sliced products of each model: of its two layers, attention's and the feed-forward part's.
SUMS = {
    **dict.fromkeys(
        ("falcon-new", "falcon-alibi", "falcon-mqa", "bloom", "phi3", "llama", "qwen3", "mixtral", "gpt2", "bert"), 4
    ),
    **{"deepseek": 5, "mixtral-plan": 4, "llama-mqa": 4, "llama-odd": 2, "llama-plan": 2},
    **{"llama-vocab": 0, "gpt2-vocab": 0},
}


class _Sums:
    """A pass that counts sums over slices."""

    __name__ = "count_sums"
    __closure__ = (None,)  # nothing is cached

    def __init__(self) -> None:
        self.found = 0

    def __call__(self, gm: torch.fx.GraphModule, ctx: Any) -> int:
        self.found += sum("sum_slices" in str(node.target) for node in gm.graph.nodes)
        return 0


def _forward_is_lowered(gm: torch.fx.GraphModule, ctx: Any) -> int:
    """Check that slices communicate by collectives that Inductor knows, by a pass after all others."""
    names = {str(node.target) for node in gm.graph.nodes}
    assert not {name for name in names if re.match(r"dsgraph\.(sum|gather|enter)_slices", name)}, names
    assert any("all_reduce" in name for name in names), names
    return 0


def _backward_is_lowered(gm: torch.fx.GraphModule, ctx: Any) -> int:
    return _forward_is_lowered(gm, ctx)


def _train(name: str, codegen: str = "eager", plan: Any = "auto", sliced: tuple[str, ...] = (), **options: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    alone, model = _build(name, **options), _build(name, **options)
    if dist.get_rank() == 1:  # the first rank's values count
        nn.init.zeros_(next(model.parameters()))
    names = [key for key, _ in model.named_parameters()]
    plan = model.tp_plan if plan == "transformers" else plan
    dsgraph.tensor_parallel(model, mesh["tp"], plan=plan, example_inputs=_batch(0))
    assert [key for key, _ in model.named_parameters()] == names
    for part in sliced:
        held = [param for key, param in model.named_parameters() if key.endswith(part)]
        assert held and all(param.to_local().numel() * 2 == param.numel() for param in held), part
    sums = _Sums()
    pipeline = dsgraph.default_pipeline() + dsgraph.graph_pass(phase="capture")(sums)
    pipeline += dsgraph.graph_pass(phase="forward")(_forward_is_lowered)
    pipeline += dsgraph.graph_pass(phase="backward")(_backward_is_lowered)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen, "pipeline": pipeline})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (model, alone)]
    for step in range(2):
        losses = []
        for each in (compiled, alone):
            torch.manual_seed(step)  # for dropout
            losses.append(each(**_batch(step)).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for (key, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            _check(full(mine.grad), theirs.grad, f"step {step}: gradient of {key}")
        norms = [full(clip_grad_norm_(each.parameters(), 0.1)) for each in (model, alone)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6)
        assert sums.found == SUMS[name], "one sum follows each row-sliced product"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        _check(full(mine), theirs, f"parameter {key}")


def _check(mine: Tensor, theirs: Tensor, what: str) -> None:
    close = (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-7
    assert close, f"{what}: differs by {(mine - theirs).abs().max()} of {theirs.abs().max()}"


@pytest.mark.full  # the rules are in tests/passes/parallel
@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_with_fused_heads_train_as_in_one_process(ranks, name):
    ranks(2).run(_train, name, sliced=SLICED[name])


# Llama is in the plan of the user's, in the sliced vocabulary and in test_parallelize.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "llama", "qwen3", "bert", "mixtral")
    ],  # a vocabulary below
)
def test_trains_as_in_one_process(ranks, name):
    ranks(2).run(_train, name, sliced=SLICED[name])


@pytest.mark.full  # a vocabulary is sliced below by such a plan
def test_a_plan_of_the_users(ranks):
    plan = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": "colwise",
            "model.layers.*.mlp.down_proj": "rowwise"}  # fmt: skip
    ranks(2).run(_train, "llama-plan", plan=plan, sliced=("mlp.up_proj.weight", "mlp.down_proj.weight"))


@pytest.mark.full  # slices of such plans are in test_plan_styles
def test_a_plan_of_transformers(ranks):
    sliced = ("embed_tokens.weight", "lm_head.weight", *SLICED["mixtral"])
    ranks(2).run(_train, "mixtral-plan", plan="transformers", sliced=sliced)


VOCABULARY = {
    "llama-vocab": {"model.embed_tokens": "rowwise", "lm_head": "colwise"},
    "gpt2-vocab": {"transformer.wte": "rowwise"},  # which the output layer shares
}


@pytest.mark.parametrize(
    ("name", "codegen"),
    [
        ("llama-vocab", "eager"),
        pytest.param("gpt2-vocab", "eager", marks=pytest.mark.full),
        pytest.param("llama-vocab", "inductor", marks=[pytest.mark.full, pytest.mark.inductor]),
    ],
)
def test_a_vocabulary_is_sliced_and_its_logits_are_not_gathered_for_the_loss(ranks, name, codegen):
    plan = VOCABULARY[name]
    ranks(2).run(_train, name, codegen, plan=plan, sliced=tuple(f"{module}.weight" for module in plan))


class _Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def _in_16_bits(how: str) -> None:
    torch.manual_seed(0)
    model = _Scorer() if how == "autocast" else _Scorer().bfloat16()
    ids = _batch(0)["input_ids"]
    alone = copy.deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dsgraph.tensor_parallel(model, mesh["tp"], plan={"head": "colwise"}, example_inputs=(ids,))
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        mine, theirs = compiled(ids), alone(ids)
    assert mine.dtype is theirs.dtype
    # Products are rounded alike; the loss of rounded logits is computed in float32.
    torch.testing.assert_close(mine, theirs, rtol=1e-6 if how == "autocast" else 2**-8, atol=0)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_a_sliced_loss_of_16_bits_is_computed_in_float32(ranks, how):
    ranks(2).run(_in_16_bits, how)


@pytest.mark.full
def test_one_head_of_keys_stays_whole(ranks):
    ranks(2).run(_train, "llama-mqa", sliced=("self_attn.q_proj.weight", "self_attn.o_proj.weight"))


@pytest.mark.full
def test_three_heads_stay_whole(ranks):
    ranks(2).run(_train, "llama-odd", sliced=("mlp.down_proj.weight",))


def _parted(what: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = dsgraph.tensor_parallel(_build("gpt2", drop=0.5 * (what == "seeds")), mesh["tp"], example_inputs=_batch(0))
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    own = dist.get_rank() + 1
    torch.manual_seed(own if what == "seeds" else 0)
    message = (
        "draw different random numbers" if what == "seeds" else r"different batches.*\[input_ids: torch.int64 \[2, 8\]"
    )
    with pytest.raises(
        RanksDisagreeError, match=f"ranks 0 and 1 would {'' if what == 'seeds' else 'compute with '}{message}"
    ):
        compiled(**_batch(own if what == "batches" else 0))


@pytest.mark.parametrize("what", ["batches", pytest.param("seeds", marks=pytest.mark.full)])
def test_ranks_that_are_given_other_batches_or_seeds_are_named(ranks, what):
    ranks(2).run(_parted, what)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.wide(x))


def _little() -> None:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for model, inputs in ((_Normed(), (torch.ones(2, 8),)), (_Scorer(), (_batch(0)["input_ids"],))):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            dsgraph.tensor_parallel(model, mesh["tp"], example_inputs=inputs)
        texts = [str(one.message) for one in found if "tensor_parallel" in str(one.message)]
        assert len(texts) == (isinstance(model, _Normed) and dist.get_rank() == 0), texts
        for text in texts:
            assert re.match(r"tensor_parallel: 0% of the matrices of _Normed", text)
            assert "wide.weight: layer_norm along the sharded dimension" in text


def test_a_model_of_which_little_is_sliced_is_named_with_reasons(ranks):
    ranks(2).run(_little)
