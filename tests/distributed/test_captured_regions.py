"""`partition(regions=...)`: blocks that are captured once compute what each block computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.compat.torch_version import why_no_regions
from dsgraph.compiler.codegen import REGIONS
from dsgraph.utils.errors import PartitionError
from examples.gpt import GPT, GPTConfig
from tests.distributed.test_transformers import DECODER, ENCODER, VOCAB
from tests.distributed.training import compare, full
from tests.models import tokens, tokens_of_any_length

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(bool(why_no_regions()), reason=why_no_regions())]

SHAPE = GPTConfig(vocab=64, width=16, heads=2, layers=2)


class _Checkpointed(GPT):
    def __init__(self) -> None:
        super().__init__(SHAPE)
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class _CheckpointsAPart(nn.Module):
    """A block with a checkpoint inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._part, x, use_reentrant=False)

    def _part(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(self.norm(x)))


class _Skipped(nn.Module):
    """A block of which every second call returns its argument as it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.skips = nn.Linear(16, 16), number % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skips else x + torch.sin(self.linear(x))


class _Chain(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


class _Passing(nn.Module):
    """A block that returns one of its arguments as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.sin(self.linear(x)) * scale, scale


class _PassingOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_Passing() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, scale = self.embedding(tokens), 2 * self.scale
        for layer in self.layers:
            x, scale = layer(x, scale)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


def _frozen() -> nn.Module:
    model = GPT(SHAPE)
    model.blocks[1].requires_grad_(False)
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(SHAPE),
    "tied": lambda: GPT(GPTConfig(vocab=64, width=16, heads=2, layers=3, tie=True)),
    "frozen": _frozen,
    "checkpointed": _Checkpointed,
    "any_length": lambda: GPT(SHAPE),
    "passing": _PassingOn,
    "checkpoint inside": lambda: _Chain(_CheckpointsAPart() for _ in range(3)),
    "skipped": lambda: _Chain(_Skipped(number) for number in range(5)),
    "torch's layers": lambda: _Chain(
        nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, dropout=0.0, batch_first=True) for _ in range(2)
    ),
}


def _compare(case: str, **how: Any) -> None:
    compare(BUILDS[case], tokens_of_any_length if case == "any_length" else tokens, blocks="auto", **how)


@pytest.mark.parametrize(
    ("case", "stage", "micro_batches"),
    [
        pytest.param("gpt", 3, 2, marks=pytest.mark.full),
        ("passing", 1, 1),
        pytest.param("checkpointed", 3, 1, marks=pytest.mark.full),  # it has no regions, as is said below
        ("checkpoint inside", 3, 1),
        ("skipped", 3, 1),
        pytest.param("torch's layers", 3, 1, marks=pytest.mark.full),
        *(
            pytest.param(case, stage, micro_batches, marks=pytest.mark.full)
            for case in BUILDS
            for stage in range(4)
            for micro_batches in (1, 2)
            if (case, stage, micro_batches) not in (("gpt", 3, 2), ("passing", 1, 1))
            and (stage, micro_batches) != (3, 1)
        ),
    ],
)
def test_blocks_learn_as_in_one_process(ranks, case, stage, micro_batches):
    ranks(2).run(_compare, case, stage=stage, micro_batches=micro_batches, evaluate=True)


@pytest.mark.full  # test_regions.py has a model under Inductor
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("world", "stage"), ((1, 3), *(pytest.param(2, stage, marks=pytest.mark.full) for stage in range(4)))
)
def test_fused_kernels_of_blocks_learn_as_in_one_process(ranks, world, stage):
    ranks(world).run(_compare, "gpt", stage=stage, codegen="inductor")


class _Bound(nn.Module):
    """A block whose result the backward needs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x))


class _Bounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Bound() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 1.5 + 0.1
        return x.pow(2).sum()


def _keep_results_apart() -> None:
    x = torch.randn(4, 16)
    torch.manual_seed(0)
    alone = _Bounds()
    alone(x).backward()
    torch.manual_seed(0)
    model = dsgraph.partition(_Bounds(), stage=3, keep_whole_below=0, regions="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "inductor"})
    compiled(x).backward()
    assert "subgraph_1 is captured once and called 3 times" in _calls(compiled)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)


@pytest.mark.inductor
def test_fused_kernels_do_not_write_over_a_result_that_is_saved_as_well(ranks):
    ranks(1).run(_keep_results_apart)


def _calls(compiled: nn.Module) -> list[str]:
    passes = [item for each in dsgraph.report(compiled).compiles for item in each.passes]
    return [line for item in passes if item.name == REGIONS for line in (*item.done, *item.notes)]


def _captured() -> None:
    model = dsgraph.partition(GPT(SHAPE), stage=3, keep_whole_below=12, regions=["blocks"])
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(*tokens(0, 0)).backward()
    assert _calls(compiled) == ["subgraph_0 is captured once and called 2 times"]
    gathered = [item for item in dsgraph.report(compiled).compiles[0].passes if item.name == "insert_zero_collectives"]
    assert gathered[0].changed == 2 * len(list(model.parameters())), "each is gathered and reduced in the outer graph"
    held = dsgraph.report(compiled).compiles[0].activations
    assert held.gathered_again == len(list(model.parameters())) - 2, "all but the embedding and the last one"
    assert held.kept_parameters == 1, "the last one"
    model = dsgraph.partition(GPT(SHAPE), stage=3, keep_whole_below=12, regions="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", "memory_limit": "1GB"})
    compiled(*tokens(0, 0)).backward()
    assert _calls(compiled) == ["regions are written out: memory_limit is planned value by value"]
    model = dsgraph.partition(_Checkpointed(), stage=3, keep_whole_below=12, regions="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(*tokens(0, 0)).backward()
    (line,) = _calls(compiled)
    assert line == "blocks.0, blocks.1: no region, a forward was put in place of its class's"


def test_gathers_stand_in_the_outer_graph(fake_ranks):
    _captured()


class _Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.scale, 0.5)


class _Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Drop() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _draw(codegen: str) -> None:
    torch.manual_seed(0)
    model = dsgraph.partition(_Drops(), stage=3, keep_whole_below=12, regions="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    x = torch.ones(256, 64)
    first = compiled(x)
    first.sum().backward()
    assert _calls(compiled) == [
        "subgraph_1 is captured once and called 4 times",
        "region subgraph_0 is written out: it is called once",
    ], "the first one's input needs no gradient"
    kept = (first != 0).float().mean().item()
    assert 0.5**6 < kept < 0.5**4, "blocks draw numbers of their own"
    for block in model.blocks:
        torch.testing.assert_close(full(block._parameters["scale"].grad), first.detach().sum(0))
    assert not torch.equal(compiled(x) != 0, first != 0), "and others the next time"


@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=[pytest.mark.inductor])))
def test_each_block_draws_its_own_numbers(ranks, codegen):
    ranks(1).run(_draw, codegen)


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ("all", r"regions is 'all'; it takes 'auto', 'none' or a list of names"),
        (["block"], r"'block', which is no list of equal blocks; did you mean 'blocks'\?; there are blocks"),
    ],
)
def test_what_cannot_be_a_region_is_refused(one_rank, regions, said):
    with pytest.raises(PartitionError, match=said):
        dsgraph.partition(GPT(SHAPE), regions=regions)


def _family(name: str) -> None:
    import transformers as tf

    decoder, encoder = {**DECODER, "num_hidden_layers": 3}, {**ENCODER, "num_hidden_layers": 3}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "dropout_rate": 0}
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    builds: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**decoder)),
        "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**decoder, head_dim=8)),
        "mixtral": lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**decoder, num_local_experts=4, num_experts_per_tok=2)
        ),
        "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**decoder, head_dim=8)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2, **none)),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(vocab_size=VOCAB, **encoder)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **t5)
        ),
        "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**encoder, image_size=16, patch_size=8, num_labels=5)),
    }
    ids = torch.randint(1, VOCAB, (2, 8))
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}
    batch = images if name == "vit" else {"input_ids": ids, "labels": ids}
    found = []
    for regions in ("none", "auto"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dsgraph.partition(builds[name](), stage=3, keep_whole_below=0, regions=regions)
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        compiled(**batch).loss.backward()
        found.append([full(param.grad) for param in model.parameters() if param.grad is not None])
    calls = sum(int(line.split()[-2]) for line in _calls(compiled) if line.endswith("times"))
    assert calls == (4 if name == "t5" else 3), "its first blocks alone hold a table of positions"
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ("llama", "qwen3", "mixtral", "gemma", "gpt2", "bert", "t5", "vit"))
def test_blocks_of_transformers_are_found(ranks, name):
    pytest.importorskip("transformers")
    ranks(1).run(_family, name)
