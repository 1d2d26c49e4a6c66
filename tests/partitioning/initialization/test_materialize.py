from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dsgraph
from examples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=64, width=32, heads=2, layers=2)


def _on_meta(build=lambda: GPT(CONFIG)):
    with torch.device("meta"):
        return build()


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    @pytest.mark.parametrize("stage", (0, 1, 3))
    def test_values_are_those_of_the_same_initialisation(self, stage):
        torch.manual_seed(7)
        alone = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Embedding(5, 8))
        model = _on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Embedding(5, 8)))
        dsgraph.partition(model, stage=stage, keep_whole_below=0)
        torch.manual_seed(7)
        dsgraph.materialize(model, "cpu")
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)
        x = torch.randn(3, 4)
        assert torch.equal(model[1](model[0](x)), alone[1](alone[0](x)))

    def test_tied_parameters_stay_tied(self):
        model = _on_meta(lambda: GPT(GPTConfig(vocab=64, width=32, heads=2, layers=1, tie=True)))
        dsgraph.partition(model, keep_whole_below=0)
        dsgraph.materialize(model)
        assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        assert torch.isfinite(model(tokens, tokens))

    @pytest.mark.parametrize("convert", (False, True))
    def test_hooks_survive(self, convert):
        model = dsgraph.partition(_on_meta(lambda: GPT(GPTConfig(64, 32, 2, 1, tie=True))), keep_whole_below=0)
        params, calls = dict(model.named_parameters()), []
        tied = params["embedding.weight"]
        removed = tied.register_hook(lambda grad: calls.append("removed"))
        tied.register_hook(lambda grad: calls.append("hook") or grad * 0)
        tied.register_post_accumulate_grad_hook(lambda param: calls.append(param is tied))
        dsgraph.materialize(model)
        removed.remove()
        if convert:
            model.double()
        assert all(param is params[name] and not param.is_meta for name, param in model.named_parameters())
        tokens = torch.arange(8)[None]
        model(tokens, tokens).backward()
        assert calls == ["hook", True]
        assert not tied.grad.full_tensor().any() and list(params.values())[-1].grad.full_tensor().any()

    def test_files_that_the_index_does_not_name_are_not_read(self, tmp_path):
        files = {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
        save_file({"weight": torch.ones(8, 4)}, tmp_path / files["weight"])
        save_file({"bias": torch.ones(8)}, tmp_path / files["bias"])
        save_file({"weight": torch.zeros(8, 4), "bias": torch.zeros(8)}, tmp_path / "model.safetensors")  # older
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        model = dsgraph.partition(_on_meta(lambda: nn.Linear(4, 8)), keep_whole_below=0)
        dsgraph.materialize(model, weights=tmp_path)
        assert torch.equal(model.weight, torch.ones(8, 4)) and torch.equal(model.bias, torch.ones(8))

    def test_a_function_of_the_users_initialises(self):
        model = dsgraph.partition(_on_meta(lambda: nn.Linear(4, 8)), keep_whole_below=0)

        def ones(module):
            assert module.weight.shape == (8, 4), "at full size"
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

        dsgraph.materialize(model, init=ones)
        assert torch.equal(model.weight, torch.ones(8, 4))

    def test_buffers_are_made_too(self):
        model = dsgraph.partition(_on_meta(lambda: nn.BatchNorm1d(4)), keep_whole_below=0)
        dsgraph.materialize(model)
        assert torch.equal(model.running_var, torch.ones(4))

    def test_transformers_initialise_themselves(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = dsgraph.partition(_on_meta(lambda: transformers.LlamaForCausalLM(config)), keep_whole_below=0)
        dsgraph.materialize(model)
        loss = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 4, dtype=torch.int64)).loss
        assert 2 < loss < 5

    def test_random_numbers_go_on_as_after_the_same_initialisation(self):
        torch.manual_seed(3)
        nn.Linear(4, 8)
        expected = torch.rand(3)
        model = dsgraph.partition(_on_meta(lambda: nn.Linear(4, 8)), keep_whole_below=0)
        torch.manual_seed(3)
        dsgraph.materialize(model)
        assert torch.equal(torch.rand(3), expected)

    def test_errors(self):
        class Bare(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
                self.register_buffer("angles", torch.ones(4), persistent=False)

        with pytest.raises(dsgraph.PartitionError, match="the model is not partitioned"):
            dsgraph.materialize(_on_meta(lambda: nn.Linear(2, 2)))
        with pytest.raises(dsgraph.PartitionError, match="nothing in the model is on the meta device"):
            dsgraph.materialize(dsgraph.partition(nn.Linear(2, 2)))
        bare = dsgraph.partition(_on_meta(lambda: nn.Sequential(Bare())))
        with pytest.raises(
            dsgraph.PartitionError, match=r"module '0' \(Bare\) holds scale, angles and has no reset_param"
        ):
            dsgraph.materialize(bare)
        with pytest.raises(dsgraph.PartitionError, match="buffer 'angles' of Bare is not part of checkpoints"):
            dsgraph.materialize(bare, init="empty")
        with pytest.raises(dsgraph.PartitionError, match="init is 'emtpy'; it takes a function of a module"):
            dsgraph.materialize(bare, init="emtpy")
        early = dsgraph.partition(_on_meta(lambda: nn.Linear(2, 2)))
        optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
        with pytest.raises(dsgraph.PartitionError, match="SGD was made before materialize"):
            dsgraph.materialize(early)
        assert optimizer

    def test_a_model_that_was_never_materialized_says_so(self):
        model = dsgraph.partition(_on_meta(), keep_whole_below=0)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(dsgraph.PartitionError, match=r"parameter 'weight' of Embedding .*dsgraph.materialize"):
            model(tokens, tokens)
        for fullgraph in (False, True):
            compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}, fullgraph=fullgraph)
            with pytest.raises(Exception, match=r"dsgraph\.materialize"):
                compiled(tokens, tokens)


def _peak_of_materialize() -> tuple[int, int, int]:
    """Bytes allocated at once while materialising; of the full model; of its largest parameter."""
    import torch.distributed as dist
    from torch.distributed._tools.mem_tracker import MemTracker

    config = GPTConfig(vocab=512, width=128, heads=2, layers=4)
    model = dsgraph.partition(_on_meta(lambda: GPT(config)), keep_whole_below=0)
    tracker = MemTracker()
    with tracker:
        dsgraph.materialize(model, "cpu")
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    sizes = [param.numel() * param.element_size() for param in model.parameters()]
    assert dist.get_world_size() > 1
    return peak, sum(sizes), max(sizes)


def _values_agree(seed_of_rank: bool) -> None:
    import torch.distributed as dist

    torch.manual_seed(5)
    alone = nn.Linear(6, 7)
    model = dsgraph.partition(_on_meta(lambda: nn.Linear(6, 7)), keep_whole_below=0)
    rank = dist.get_rank()
    torch.manual_seed(5 + rank if seed_of_rank else 5)
    dsgraph.materialize(model)
    assert torch.equal(model.weight, alone.weight)
    own = torch.rand(1)
    dist.all_reduce(own)
    assert not seed_of_rank or own != 2 * torch.rand(1), "each rank goes on with its own random numbers"


@pytest.mark.distributed
@pytest.mark.parametrize("world", (2, 3))
def test_no_rank_ever_holds_the_full_model(ranks, world):
    for peak, full, largest in ranks(world).run(_peak_of_materialize):
        assert peak <= full / world + largest + 64 * 1024, (peak, full, largest)
        assert peak < 0.8 * full


@pytest.mark.distributed
@pytest.mark.parametrize("seed_of_rank", (False, True))
def test_ranks_draw_the_first_ranks_values(ranks, seed_of_rank):
    ranks(2).run(_values_agree, seed_of_rank)
