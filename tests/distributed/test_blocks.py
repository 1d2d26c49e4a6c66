"""`partition(blocks=...)`: blocks that are frames of their own compute what one graph of all blocks computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import RanksDisagreeError
from tests.distributed.test_transformers import DECODER, ENCODER, VOCAB
from tests.distributed.training import full

pytestmark = pytest.mark.distributed

_WIDTH, _BLOCKS = 16, 4


class _Block(nn.Module):
    """A block with everything that a frame may contain.

    Attributes:
        ways: Names of what it does besides.
        leaked: A parameter that it has left.
    """

    leaked: Tensor | None = None

    def __init__(self, ways: set[str]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 40), nn.Linear(40, _WIDTH)
        self.statistics = nn.BatchNorm1d(_WIDTH)
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(self.norm(x)))
        if "break" in self.ways:
            torch._dynamo.graph_break()
        if "eager" in self.ways:
            h = h + self._eagerly(x)
        if "statistics" in self.ways:
            h = h + self.statistics(x.flatten(0, 1)).sum()
        if "dropout" in self.ways:
            h = functional.dropout(h, 0.3, training=self.training)
        if "leak" in self.ways:
            self.leaked = self.up.weight.T[1:]
        if "checkpoint inside" in self.ways:
            return x + checkpoint(self.down, h, use_reentrant=False)
        return x + self.down(h)

    @torch.compiler.disable
    def _eagerly(self, x: Tensor) -> Tensor:
        return self.up(x)


class _Model(nn.Module):
    """A model of blocks.

    Attributes:
        ways: Names of what its forward does; the test changes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ways: set[str] = set()
        self.embedding = nn.Embedding(64, _WIDTH)
        self.blocks = nn.ModuleList(_Block(self.ways) for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number == 1 and "skip" in self.ways:
                continue
            if number == 2 and "fail" in self.ways:
                raise ValueError("in the forward")
            for reentrant in (True, False):
                if f"checkpoint {reentrant}" in self.ways:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                    break
            else:
                x = block(x)
            if number == 1 and "twice" in self.ways:
                x = block(x)
            if number == 2 and "fail in backward" in self.ways:
                x.register_hook(_fail)
        if "tied" in self.ways:
            x = functional.linear(x, self.blocks[0].down.weight.T)[..., :_WIDTH] + x
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _fail(_: Tensor) -> None:
    raise ValueError("in the backward")


class _Run:
    """A model in training, and the numbers that it gives.

    Attributes:
        blocks: Argument of `partition`.
        compiles: False if the model runs uncompiled.
    """

    def __init__(self, blocks: str, *, compiles: bool = True) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.blocks, self.compiles = blocks, compiles
        self.take(dsgraph.partition(_Model(), stage=3, keep_whole_below=20, blocks=blocks))
        self.numbers: list[Tensor] = []
        self.steps = 0

    def take(self, model: _Model) -> None:
        """Train this model from now on."""
        self.model = model
        self.first = {name: value.clone() for name, value in model.state_dict().items()}
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        self.compiled = compiled if self.compiles else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def begin_again(self) -> None:
        """Train from the first values, by what was compiled."""
        self.model.load_state_dict(self.first)
        self.model.zero_grad()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self) -> Tensor:
        self.steps += 1
        draw = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
        loss: Tensor = self.compiled(torch.randint(0, 64, (3, 8), generator=draw))
        self.numbers.append(loss.detach())
        return loss

    def update(self) -> None:
        self.numbers += [full(param.grad) for param in self.model.parameters() if param.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *ways: str, steps: int = 2) -> None:
        self.model.ways.update(ways)
        for _ in range(steps):
            self.loss().backward()
            self.update()
        self.model.ways.clear()

    def fail(self, way: str) -> None:
        self.model.ways.add(way)
        with suppress(ValueError):
            self.loss().backward()
        self.model.ways.clear()
        self.optimizer.zero_grad()


def _trains(*ways: str) -> Callable[[_Run], None]:
    return lambda run: run.train(*ways, steps=3)


def _evaluates(run: _Run) -> None:
    run.train()
    for _ in range(2):
        with torch.no_grad():
            run.loss()
        run.loss()  # without a backward
        with torch.inference_mode():
            run.loss()
        run.train(steps=1)


def _writes(run: _Run) -> None:
    """Writes that leave no trace, between forwards without a backward."""
    run.train()
    for _ in range(3):
        run.loss()
        for param in run.model.parameters():
            param.data.mul_(0.5)
    run.train()


def _changes_order(run: _Run) -> None:
    for way in ("", "skip", "twice", "skip", ""):
        run.train(way, steps=1)


def _fails(run: _Run) -> None:
    for way in ("fail", "fail in backward", "fail"):
        run.train()
        run.fail(way)
    run.train()


def _two_forwards(run: _Run) -> None:
    for _ in range(3):
        (run.loss() + run.loss()).backward()
        run.update()


def _backward_of_an_older_forward(run: _Run) -> None:
    for _ in range(2):
        first = run.loss()
        run.loss().backward()
        first.backward()
        run.update()


def _accumulates(run: _Run) -> None:
    for _ in range(2):
        with dsgraph.accumulate(run.model):
            run.loss().backward()
        run.loss().backward()
        run.update()


def _reads_outside(run: _Run) -> None:
    run.train()
    with torch.no_grad():
        run.numbers.append(run.model.blocks[1].up.weight.abs().sum())
    run.train()
    run.numbers.append(run.model.blocks[2].up.weight.abs().sum().detach())
    run.train()


def _keeps_what_leaks(run: _Run) -> None:
    for _ in range(3):
        run.train("leak")
        run.numbers += [block.leaked.detach().clone() for block in run.model.blocks]


def _reads_in_hooks(run: _Run) -> None:
    def note(linear: nn.Module, *_: Any) -> None:
        run.numbers.append(linear.weight.detach().sum())

    for block in run.model.blocks:
        block.register_forward_hook(lambda module, *_: note(module.up))
        block.register_full_backward_hook(lambda module, *_: note(module.down))
        block.up.register_forward_hook(note)
    run.train()


def _freezes(run: _Run) -> None:
    run.train()
    run.model.blocks[2].requires_grad_(False)
    run.train()
    run.model.blocks[2].requires_grad_(True)
    run.train()


def _copies(run: _Run) -> None:
    run.train()
    run.take(copy.deepcopy(run.model))
    run.train()


def _converts(run: _Run) -> None:
    run.model.to(torch.float64)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    run.train()


def _used(model: nn.Module) -> Iterator[nn.Parameter]:
    return (param for name, param in model.named_parameters() if "statistics" not in name)


def _differentiates(run: _Run) -> None:
    for _ in range(2):
        run.numbers += torch.autograd.grad(run.loss(), list(run.model.blocks[1].up.parameters()))
        run.numbers += torch.autograd.grad(run.loss(), list(_used(run.model)))
        run.train()


def _loads(run: _Run) -> None:
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    run.loss()
    run.model.load_state_dict(state)
    run.train()


def _watches_gradients(run: _Run) -> None:
    """Hooks get the reduced gradient of their parameter, in whose place one of them puts another."""
    shards = [block.up._parameters["weight"] for block in run.model.blocks]
    shards[0].register_hook(lambda grad: run.numbers.append(grad.clone()))
    shards[1].register_hook(lambda grad: 2 * grad)
    shards[2].register_post_accumulate_grad_hook(lambda param: run.numbers.append(param.grad.clone()))
    run.train()
    run.train("twice")


def _runs_backward_after_a_failed_one(run: _Run) -> None:
    run.train()
    run.model.ways.add("fail in backward")
    failing = run.loss()
    run.model.ways.clear()
    loss = run.loss()
    with suppress(ValueError):
        failing.backward()
    run.optimizer.zero_grad()
    loss.backward()
    run.update()


def _freezes_between(run: _Run) -> None:
    loss = run.loss()
    run.model.blocks[1].requires_grad_(False)
    loss.backward()
    run.numbers.append(torch.tensor([param.grad is None for param in run.model.parameters()]))
    run.model.blocks[1].requires_grad_(True)
    run.train()


def _turns_gradients_on(run: _Run) -> None:
    for _ in range(2):
        with torch.no_grad():
            loss = run.loss()
        assert not loss.requires_grad
        with torch.no_grad(), torch.enable_grad():
            run.loss().backward()
        run.update()


def _adds_a_penalty(run: _Run) -> None:
    """Other gradients of the same parameters come from outside their block, before and after it."""
    for _ in range(2):
        penalty = sum(param.square().sum().full_tensor() for param in run.model.blocks[1].parameters())
        (run.loss() + penalty).backward()
        run.update()


def _trains_a_part(run: _Run) -> None:
    for _ in range(2):
        run.loss().backward(inputs=list(run.model.blocks[2].parameters())[:-2])
        run.loss().backward()
        run.optimizer.step()
        run.numbers += [full(param.grad) for param in _used(run.model)]
        run.optimizer.zero_grad(set_to_none=False)


WAYS: dict[str, Callable[[_Run], None]] = {
    "plain": _trains(),
    **{way: _trains(way) for way in ("break", "eager", "statistics", "twice", "skip", "tied", "checkpoint inside")},
    "checkpoint": _trains("checkpoint False"),
    "reentrant checkpoint": _trains("checkpoint True"),
    "checkpoint with a break": _trains("checkpoint False", "break"),
    "evaluates": _evaluates,
    "writes": _writes,
    "changes order": _changes_order,
    "fails": _fails,
    "two forwards": _two_forwards,
    "an older forward": _backward_of_an_older_forward,
    "accumulates": _accumulates,
    "reads outside": _reads_outside,
    "leaks": _keeps_what_leaks,
    "hooks": _reads_in_hooks,
    "freezes": _freezes,
    "copies": _copies,
    "converts": _converts,
    "differentiates": _differentiates,
    "loads": _loads,
    "watches gradients": _watches_gradients,
    "adds a penalty": _adds_a_penalty,
    "trains a part": _trains_a_part,
    "runs a backward after a failed one": _runs_backward_after_a_failed_one,
    "freezes between": _freezes_between,
    "turns gradients on": _turns_gradients_on,
}


def _compare(*ways: str, with_one_graph: bool) -> None:
    """One model goes these ways, one after the other."""
    found = []
    for blocks, compiles in (("none", with_one_graph), ("auto", True)):
        run = _Run(blocks, compiles=compiles)
        found.append({way: _numbers(run, way) for way in ways})
    reasons = [item.reason for item in dsgraph.report(run.compiled).fallbacks]
    assert not any("recompile limit" in reason for reason in reasons), "the other ways would run uncompiled"
    for way in ways:
        expected, values = (numbers[way] for numbers in found)
        assert len(expected) == len(values) > 2, f"{way}: {len(expected)} and {len(values)} numbers"
        for mine, theirs in zip(expected, values, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=lambda text, way=way: f"{way}: {text}")


def _numbers(run: _Run, way: str) -> list[Tensor]:
    """Return the numbers of a way, which begins with the values of a new model."""
    if run.numbers:
        run.begin_again()
    run.numbers = []
    WAYS[way](run)
    (state,) = partition_states(run.model)
    if run.blocks == "auto":
        assert [len(block.entries) for block in state.step.blocks] == [3] * _BLOCKS
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in run.numbers]


# One model goes several ways, so that its blocks are compiled once. Hooks count if they are registered before that.
@pytest.mark.parametrize(
    "ways",
    [
        ("plain", "evaluates", "writes", "two forwards", "fails", "runs a backward after a failed one"),
        ("differentiates", "trains a part", "adds a penalty", "freezes between", "watches gradients"),
        ("break", "eager", "checkpoint", "changes order"),
        ("hooks",),
    ],
    ids=", ".join,
)
def test_it_is_what_the_uncompiled_model_gives(ranks, ways):
    ranks(2).run(_compare, *ways, with_one_graph=False)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_one_graph_gives(ranks, way):
    ranks(2).run(_compare, way, with_one_graph=True)


class _Routed(nn.Module):
    """A block of which each rank may use other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.takes_b = False

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.b(x) if self.takes_b else self.a(x)


def _use_different_parameters() -> None:
    model = nn.Sequential(_Routed(), _Routed())
    dsgraph.partition(model, keep_whole_below=0, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    model[1].takes_b = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSGRAPH_EAGER_PATIENCE", "2")
        with pytest.raises(RanksDisagreeError, match=r"rank 0 gathers parameter '1\.a.*rank 1 gathers parameter '1\.b"):
            compiled(torch.ones(2, 8)).sum().backward()


def test_ranks_that_use_different_parameters_of_a_block_are_told(ranks):
    ranks(2).run(_use_different_parameters)


def _watch_on_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for blocks in ("none", "auto"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dsgraph.partition(_Model(), mesh, keep_whole_below=20, blocks=blocks)
        if dist.get_rank() == 0:
            model.blocks[1].up._parameters["weight"].register_hook(lambda grad: None)
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        compiled(torch.arange(16).view(2, 8) + dist.get_rank()).backward()
        found.append([param.grad.to_local() for param in model.parameters() if param.grad is not None])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_hook_on_one_rank_changes_no_order(ranks):
    ranks(2).run(_watch_on_one_rank)


class _Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x * self.scale, 0.5)


def _draw(codegen: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Drop() for _ in range(5)))
    dsgraph.partition(model, stage=3, keep_whole_below=12, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    x = torch.ones(256, 64)
    first = compiled(x)
    first.sum().backward()
    kept = (first != 0).float().mean().item()
    assert 0.5**6 < kept < 0.5**4, "blocks draw numbers of their own"
    for block in model:
        torch.testing.assert_close(full(block._parameters["scale"].grad), first.detach().sum(0))
    assert not torch.equal(compiled(x) != 0, first != 0), "and others the next time"


@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=[pytest.mark.inductor])))
def test_each_block_draws_its_own_numbers(ranks, codegen):
    ranks(1).run(_draw, codegen)


def _status(stage: int, *, fullgraph: bool = False, **options: Any) -> tuple[int, str]:
    torch._dynamo.reset()
    model = dsgraph.partition(_Model(), stage=stage, keep_whole_below=20, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager", **options}, fullgraph=fullgraph)
    for _ in range(2):
        compiled(torch.zeros(2, 8, dtype=torch.long)).backward()
    report = dsgraph.report(compiled)
    place = f"{Path(__file__).name}:{_Block.forward.__code__.co_firstlineno} "  # Python 3.10 does not know the class
    of_blocks = [item for item in report.compiles if place in item.function]
    return len(of_blocks), report.status


@pytest.mark.parametrize(("stage", "how"), ((0, {}), (1, {}), (3, {}), (3, {"memory_limit": "1GB"})))
def test_blocks_are_compiled_once_and_the_report_says_so(fake_ranks, stage, how):
    compiles, status = _status(stage, **how)
    assert compiles == 1
    assert f"{_BLOCKS} repeated blocks are graphs of their own" in status


@pytest.mark.parametrize("how", ({"activation_offload": "host"}, {"strict": True}, {"kernels": ["auto"]}))
def test_options_do_not_change_how_blocks_run(fake_ranks, how):
    compiles, status = _status(3, **how)
    assert compiles == 1
    assert f"{_BLOCKS} repeated blocks are graphs of their own" in status


def test_one_graph_is_one_graph(fake_ranks):
    compiles, status = _status(3, fullgraph=True)
    assert compiles == 0
    assert f"{_BLOCKS} repeated blocks were not compiled as graphs of their own" in status


class _Numbered(nn.Module):
    """A layer that reads its own number, as one does that writes to a cache of keys and values."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.number


@pytest.mark.parametrize("stage", (0, 3))
def test_blocks_that_differ_are_all_compiled(fake_ranks, stage):
    torch._dynamo.reset()
    limit = 2
    model = nn.Sequential(*(_Numbered(number) for number in range(limit + 2)))
    model = dsgraph.partition(model, stage=stage, keep_whole_below=0, blocks="auto")
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        compiled(torch.zeros(2, 8))
        assert torch._dynamo.config.recompile_limit == limit
    assert len(dsgraph.report(compiled).compiles) >= len(model)


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, _WIDTH)
        self.layers = nn.ModuleList(_Takes() for _ in range(3))

    def forward(self, tokens: Tensor, given: object = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, given)
        return x


class _Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, given: object) -> Tensor:
        return torch.sin(self.linear(x))


class _Headed(nn.Module):
    """A model whose blocks are called by a part of it, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _Body(), nn.Linear(_WIDTH, 64)

    def forward(self, tokens: Tensor, given: object = None) -> Tensor:
        return functional.cross_entropy(self.head(self.body(tokens, given)).flatten(0, 1), tokens.flatten())


def _headed(given: object) -> dsgraph.Report:
    torch._dynamo.reset()
    model = dsgraph.partition(_Headed(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(torch.zeros(2, 8, dtype=torch.long), given).backward()
    return dsgraph.report(compiled)


def test_only_the_loop_that_calls_blocks_is_uncompiled(fake_ranks):
    report = _headed(None)
    assert "3 repeated blocks are graphs of their own" in report.status
    eager = [item.what for item in report.fallbacks if item.kind == "parameter read eagerly"]
    assert eager == ["body.embedding.weight"], "the head is in a graph"


@pytest.mark.parametrize(("given", "apart"), [([{"a": 1.0}, (True, None)], True), ([object()], False)])
def test_a_block_that_gets_an_object_stays_in_the_graph_of_the_model(fake_ranks, given, apart):
    report = _headed(given)
    assert ("3 repeated blocks are graphs of their own" in report.status) is apart
    assert len([item for item in report.compiles if item.kind == "training"]) == (2 if apart else 1)


class _Checkpointed(_Body):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, None, use_reentrant=False)
        return x


def test_checkpointed_blocks_stay_in_the_graph_of_the_model(fake_ranks):
    torch._dynamo.reset()
    model = dsgraph.partition(_Checkpointed(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    report = dsgraph.report(compiled)
    assert ([item.kind for item in report.compiles], report.fallbacks) == (["training", "step"], ())


class _TwoBodies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Body(), _Body()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.first(tokens) + self.second(tokens, object())


def test_only_blocks_that_are_apart_count_in_the_report(fake_ranks):
    torch._dynamo.reset()
    model = dsgraph.partition(_TwoBodies(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    report = dsgraph.report(compiled)
    assert "3 repeated blocks are graphs of their own" in report.status
    assert [item.kind for item in report.compiles] == ["training", "training", "step"]


def _traffic(blocks: str) -> int:
    torch._dynamo.reset()
    model = dsgraph.partition(nn.Sequential(*(_Drops(64) for _ in range(3))), keep_whole_below=0, blocks=blocks)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    for _ in range(2):
        compiled(torch.ones(4, 64)).sum().backward()
    sent = dsgraph.report(compiled).step.sent_bytes
    assert sent is not None
    return sent


class _Drops(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x))


def test_gathers_between_graphs_are_reported_with_those_inside(fake_ranks):
    assert _traffic("auto") == _traffic("none")


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
    for blocks in ("none", "auto"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dsgraph.partition(builds[name](), stage=3, keep_whole_below=0, blocks=blocks)
        model.config.use_cache = False
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        for _ in range(2):
            compiled(**batch).loss.backward()
        found.append([full(param.grad) for param in model.parameters() if param.grad is not None])
    assert "repeated blocks are graphs of their own" in dsgraph.report(compiled).status
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ("llama", "qwen3", "mixtral", "gemma", "gpt2", "bert", "t5", "vit"))
def test_blocks_of_transformers(ranks, name):
    pytest.importorskip("transformers")
    ranks(2).run(_family, name)
