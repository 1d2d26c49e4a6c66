"""Arguments of a pipeline that each micro-batch gets whole, on gloo ranks against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from tests.models import VOCAB

pytestmark = pytest.mark.distributed

COUNT, ROWS, TIME = 4, 2, 8


class Weighted(nn.Module):
    """A loss with class weights and a scale; positions that all rows share are read in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor, *, more: dict[str, Any]) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * scale + more["positions"] * more["factor"]
        assert more["nothing"] is None and more["flag"]
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), more["classes"])


def _given(step: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, VOCAB, (2, COUNT * ROWS, TIME), generator=generator)
    classes, positions = torch.rand(VOCAB, generator=generator), torch.randn(ROWS, TIME, 16, generator=generator)
    more = {"classes": classes, "positions": positions, "factor": 0.5, "nothing": None, "flag": True}
    return (x, y, torch.rand((), generator=generator)), {"more": more}


def _against_one_process(schedule: str, options: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    model, mesh = Weighted(), init_device_mesh("cpu", (2,))
    alone = copy.deepcopy(model)
    (x, y, scale), named = _given(0)
    piped = dsgraph.pipeline(
        *(model, mesh, (x[:ROWS], y[:ROWS], scale)),
        example_kwargs=named,
        schedule=schedule,
        microbatches=COUNT,
        options=options,
    )
    expected = dict(alone.named_parameters())
    for step in range(2):
        (x, y, scale), named = _given(step)
        with torch.no_grad():
            parts = zip(x.chunk(COUNT), y.chunk(COUNT), strict=True)
            wanted = sum(alone(*rows, scale, **named) for rows in parts) / COUNT
        torch.testing.assert_close(piped.evaluate(x, y, scale, **named), wanted, rtol=1e-6, atol=0)
        loss = piped.step(x, y, scale, **named)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        for rows in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
            (alone(*rows, scale, **named) / COUNT).backward()
        for name, value in piped.named_parameters():
            torch.testing.assert_close(value.grad, expected[name].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1F1B", {"codegen": "eager", "memory_limit": "10MB"}),
        pytest.param("ZBVZeroBubble", None, marks=pytest.mark.full),
    ],
)
def test_what_has_no_rows_is_given_to_each_micro_batch(ranks, schedule, options):
    ranks(2).run(_against_one_process, schedule, options)


def _family(name: str) -> nn.Module:
    tf = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        return tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=TIME)
        ).eval()
    if name == "bert":
        return tf.BertForMaskedLM(tf.BertConfig(**sizes, intermediate_size=32)).eval()
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, intermediate_size=32))


def _with_padding(name: str) -> None:
    torch.manual_seed(0)
    model, mesh = _family(name), init_device_mesh("cpu", (2,))
    ids = torch.randint(0, VOCAB, (COUNT * ROWS, TIME), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(TIME) < torch.arange(1, COUNT * ROWS + 1).unsqueeze(1)).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    rows = [{key: value[part * ROWS : (part + 1) * ROWS] for key, value in batch.items()} for part in range(COUNT)]
    wanted = [float(model(**part).loss.detach()) for part in rows]
    piped = dsgraph.pipeline(
        *(model, mesh, ()), example_kwargs=rows[0], split=[_SECOND[name]], microbatches=COUNT
    )  # fmt: skip
    assert piped.report.cut_bytes == (ROWS * TIME * 16 * 4,), "only hidden states are sent"
    assert float(piped.step(**batch)) == pytest.approx(sum(wanted) / COUNT, rel=1e-6)
    others: list[Any] = [None] * 2
    dist.all_gather_object(others, [name for name, _ in piped.named_parameters()])
    assert all(others)


_SECOND = {"gpt2": "transformer.h.1", "bert": "bert.encoder.layer.1", "llama": "model.layers.1"}


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "bert"))])
def test_a_padding_mask_is_computed_on_each_rank(ranks, name):
    ranks(2).run(_with_padding, name)
