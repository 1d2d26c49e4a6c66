"""Sparse attention in models that are partitioned, against one process with the same layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsgraph
from dsgraph.sparse import Fixed

pytestmark = pytest.mark.distributed

LAYOUT = Fixed(block=4, num_local_blocks=2)


class _Bert(nn.Module):
    """BERT that guesses its own tokens; alone it computes the same layout, by the public op."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes, **none))

    def forward(self, tokens):
        return self.bert(input_ids=tokens, labels=tokens).loss


def _alone() -> nn.Module:
    """The model whose attention is sparse already: the pass finds nothing to do, and one process computes the same."""
    model = _Bert()

    def attend(module, query, key, value, attention_mask, **options):
        y = dsgraph.ops.block_sparse_attention(query, key, value, LAYOUT, scale=options.get("scaling"))
        return y.transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register("dsgraph_sparse_in_test", attend)
    model.bert.config._attn_implementation = "dsgraph_sparse_in_test"
    return model


def _tokens(rank: int, step: int):
    generator = torch.Generator().manual_seed(17 * step + rank)
    return (torch.randint(2, 32, (2, 24), generator=generator),)


def _losses(model, rank_batches, steps=2):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(*_tokens(rank, step)) for rank in rank_batches) / len(rank_batches)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _train(stage: int) -> None:
    import torch.distributed as dist

    torch.manual_seed(0)
    alone = _alone()
    torch.manual_seed(0)
    model = dsgraph.partition(_Bert(), stage=stage, keep_whole_below=12)
    options = {"codegen": "eager", "sparse_attention": LAYOUT, "strict": True}
    ran = torch.compile(model, backend="dsgraph", options=options)
    expected = _losses(alone, range(dist.get_world_size()))
    for mine, theirs in zip(_losses(ran, [dist.get_rank()]), expected, strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine / dist.get_world_size(), theirs, rtol=1e-5, atol=1e-6)
    count = "1 attention" if stage == 3 else "2 attentions"  # at stage 3 two blocks share a graph
    assert f"{count} in blocks of 4" in str(dsgraph.report(ran))


@pytest.mark.full  # tests/passes/kernels/test_sparsify_attention.py has the models; the passes over gathers know none
@pytest.mark.parametrize("stage", [2, 3])
def test_a_sparse_model_matches_one_process(ranks, stage):
    ranks(2).run(_train, stage)
