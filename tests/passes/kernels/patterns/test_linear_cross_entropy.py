from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.kernels.patterns.linear_cross_entropy import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from tests.passes.kernels.test_substitute_kernels import substitute

BATCH, LENGTH, WIDTH, CLASSES = 3, 5, 8, 11


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, bias, labels, of which some are to be ignored."""
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (BATCH, LENGTH))
    labels[1, 2:] = -100
    shapes = ((BATCH, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, bias = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias, labels


def _nanogpt(h, w, b, y):
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1000, reduction="sum")


def _nanochat(h, w, b, y):
    logits = F.linear(h, w)
    logits = logits[..., : CLASSES - 2].float()
    logits = 15 * torch.tanh(logits / 15)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1) % (CLASSES - 2), ignore_index=-1)


def _transformers(h, w, b, y):
    """`ForCausalLMLoss`: labels are shifted, and the sum is divided by the number of items."""
    logits = F.linear(h, w).float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1), ignore_index=-100, reduction="sum")
    return loss / (y != -100).sum()


def _shifted_logits(h, w, b, y):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1))


def _last_positions(h, w, b, y):
    return F.cross_entropy(F.linear(h, w, b)[:, -2:].flatten(0, 1), y[:, -2:].flatten())


def _last_position(h, w, b, y):
    return F.cross_entropy(F.linear(h, w, b)[:, -1, :], y[:, 0])


def _picked_by_number(h, w, b, y):
    rows = torch.arange(BATCH * LENGTH, device=y.device)[::2]
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES)[rows], y.view(-1)[rows])


def _cut_with_a_bias(h, w, b, y):
    return F.cross_entropy(F.linear(h, w, b)[:, :, :9].reshape(-1, 9), y.flatten() % 9)


def _matmul(h, w, b, y):
    return F.cross_entropy((h @ w.t()).reshape(-1, CLASSES), y.reshape(-1), label_smoothing=0.1)


def _matmul_with_bias(h, w, b, y):
    return F.cross_entropy((b + torch.matmul(h, w.T)).reshape(-1, CLASSES), y.reshape(-1))


def _matmul_with_a_matrix(h, w, b, y):
    matrix = w.reshape(WIDTH, CLASSES) * 1.5
    return F.cross_entropy((h @ matrix).reshape(-1, CLASSES), y.reshape(-1))


def _transposed(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).transpose(1, 2), y)


def _permuted(h, w, b, y):
    return F.cross_entropy(F.linear(h, w, b).permute(0, 2, 1), y, reduction="none").mean()


def _scaled(h, w, b, y):
    """Granite divides, Cohere multiplies."""
    return F.cross_entropy((0.7 * (F.linear(h, w, b) / 3.0)).view(-1, CLASSES), y.view(-1))


def _capped(h, w, b, y):
    """Gemma 2."""
    logits = F.linear(h, w) / 30.0
    logits = torch.tanh(logits) * 30.0
    return F.cross_entropy(logits.float().view(-1, CLASSES), y.view(-1))


def _capped_upside_down(h, w, b, y):
    return F.cross_entropy((-2.0 * F.linear(h, w).mul(-0.25).tanh()).view(-1, CLASSES), y.view(-1))


def _of_modules(h, w, b, y):
    return nn.CrossEntropyLoss(ignore_index=3)(F.linear(h, w).flatten(0, 1), y.flatten().clamp(min=0))


def _one_row(h, w, b, y):
    return F.cross_entropy(F.linear(h[0, 0], w), y[0, 0])


SPELLINGS = [
    *(_nanochat, _transformers, _shifted_logits, _last_positions, _last_position, _picked_by_number),
    *(_cut_with_a_bias, _matmul, _matmul_with_bias, _matmul_with_a_matrix),
    *(_transposed, _permuted, _scaled, _capped, _capped_upside_down, _of_modules, _one_row),
]
if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    def _torch_s_own(h, w, b, y):
        return F.linear_cross_entropy(h.view(-1, WIDTH), w, y.view(-1), linear_bias=b)

    SPELLINGS.append(_torch_s_own)


def _gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def _assert_found(function, inputs, tolerance=1e-5, **how):
    gm, record, loss = substitute(function, *inputs, kernels=[SPEC], **how)
    assert record.changed == 1 and record.notes == (), record.notes
    assert "cross_entropy.default" in gm.code
    for gone in ("nn.linear", "functional.cross_entropy", "matmul", "tanh"):
        assert gone not in gm.code
    plain = function(*inputs)
    assert loss.dtype == plain.dtype and loss.shape == plain.shape
    torch.testing.assert_close(loss, plain, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(_gradients(loss, inputs), _gradients(plain, inputs), rtol=tolerance, atol=tolerance)
    return gm


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found_and_means_the_same(spelling):
    _assert_found(spelling, _inputs())


@pytest.mark.parametrize("spelling", [_transformers, _shifted_logits, _matmul_with_bias, _capped])
def test_low_precision(spelling):
    _assert_found(spelling, _inputs(torch.bfloat16), tolerance=0.05)


@pytest.mark.parametrize("spelling", [_transformers, _shifted_logits, _matmul])
def test_under_autocast_the_head_is_computed_as_it_was(spelling):
    inputs = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        gm = _assert_found(spelling, inputs, tolerance=0.05)
    assert "to(torch.bfloat16)" in gm.code


def test_a_bias_that_autocast_does_not_round():
    with torch.autocast("cpu", torch.bfloat16):
        _, record, _ = substitute(_matmul_with_bias, *_inputs(), kernels=[SPEC])
    assert record.changed == 0 and "its bias is torch.float32 and the product torch.bfloat16" in record.notes[0]


def test_nothing_is_added_where_nothing_is_picked():
    gm = _assert_found(_transformers, _inputs())
    assert "cross_entropy.default(l_h_, l_w_, shift" in gm.code or "cross_entropy.default(l_h_, l_w_, view" in gm.code


def test_targets_that_must_not_be_read():
    h, w, b, y = _inputs()
    _assert_found(_nanogpt, (h, w, b, y.clamp(min=0)))


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(_transformers, marks=pytest.mark.full),
        pytest.param(_shifted_logits, marks=pytest.mark.full),
        _matmul_with_bias,
    ],
)
def test_batches_of_any_size_share_the_graph(spelling):
    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": ["linear_cross_entropy"], "strict": True}
    compiled = torch.compile(spelling, backend="dsgraph", dynamic=True, options=options)
    h, w, b, y = _inputs()
    for length in (5, 4, 3):
        inputs = (h[:, :length].detach().requires_grad_(), w, b, y[:, :length].contiguous())
        loss, plain = compiled(*inputs), spelling(*inputs)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(_gradients(loss, inputs), _gradients(plain, inputs))


def test_sizes_that_are_computed_in_the_graph():
    def function(h, w, b, y):
        batch, length, _ = h.shape
        logits = F.linear(h, w)[:, :-1].contiguous().view(batch * (length - 1), -1)
        return F.cross_entropy(logits, y[:, 1:].reshape(batch * (length - 1)))

    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": ["linear_cross_entropy"], "strict": True}
    compiled = torch.compile(function, backend="dsgraph", dynamic=True, options=options)
    inputs = _inputs()
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.full])])
def test_through_the_backend(codegen):
    torch._dynamo.reset()
    compiled = torch.compile(
        _transformers, backend="dsgraph", options={"codegen": codegen, "kernels": ["linear_cross_entropy"]}
    )
    inputs = _inputs()
    loss, plain = compiled(*inputs), _transformers(*inputs)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(_gradients(loss, inputs), _gradients(plain, inputs))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), plain)


def test_in_a_checkpoint_region():
    inputs = _inputs()
    _, record, loss = substitute(
        lambda *tensors: checkpoint(_shifted_logits, *tensors, use_reentrant=False), *inputs, kernels=[SPEC]
    )
    assert record.changed == 1
    plain = _shifted_logits(*inputs)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(_gradients(loss, inputs), _gradients(plain, inputs))


def test_tied_embedding():
    def function(ids, w, b, y):
        return _transformers(F.embedding(ids, w).tanh(), w, b, y)

    _, w, b, y = _inputs()
    ids = torch.randint(CLASSES, (BATCH, LENGTH))
    _, record, loss = substitute(function, ids, w, b, y, kernels=[SPEC])
    assert record.changed == 1
    torch.testing.assert_close(_gradients(loss, (w,)), _gradients(function(ids, w, b, y), (w,)))


def _returned(h, w, b, y):
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)), logits


def _wide_ones_returned(h, w, b, y):
    logits = F.linear(h, w).view(-1, CLASSES)
    return F.cross_entropy(logits, y.view(-1)), logits


def _accuracy(h, w, b, y):
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)), (logits.argmax(-1) == y).sum()


def _bias_apart_returned(h, w, b, y):
    logits = h @ w.t()
    return F.cross_entropy((logits + b).view(-1, CLASSES), y.view(-1)), logits


def _weighted_classes(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES), y.view(-1), b.detach().exp())


def _probabilities(h, w, b, y):
    return F.cross_entropy(F.linear(h, w), torch.softmax(h @ w.detach().t(), -1))


def _old_reduction(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).view(-1, CLASSES), y.view(-1), size_average=False)


def _masked(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).masked_fill(b > 0, -1e4).view(-1, CLASSES), y.view(-1))


def _scaled_by_a_parameter(h, w, b, y):
    return F.cross_entropy((F.linear(h, w) * b[0]).view(-1, CLASSES), y.view(-1))


def _rounded(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).bfloat16().view(-1, CLASSES), y.view(-1))


def _in_double(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).double().view(-1, CLASSES), y.view(-1))


def _capped_twice(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).tanh().tanh().view(-1, CLASSES), y.view(-1))


def _other_classes(h, w, b, y):
    return F.cross_entropy(F.linear(h, w)[..., 1:].reshape(-1, CLASSES - 1), y.view(-1) - 1, ignore_index=-101)


def _across_classes(h, w, b, y):
    return F.cross_entropy(F.linear(h, w).view(BATCH, CLASSES, LENGTH), y)


def _matrices_of_a_batch(h, w, b, y):
    return F.cross_entropy((h @ w.t().expand(BATCH, WIDTH, CLASSES)).reshape(-1, CLASSES), y.view(-1))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_returned, "the graph returns the logits as well: compile a function that returns the loss alone"),
        (_wide_ones_returned, "the graph returns the logits as well"),
        (_bias_apart_returned, "the graph returns the logits as well"),
        (_accuracy, "the logits are read by argmax as well"),
        (_weighted_classes, "its classes have weights"),
        (_probabilities, "its targets are probabilities, not numbers of classes"),
        (_old_reduction, "it is told how to reduce by size_average or reduce"),
        (_masked, "masked_fill stands between the head and the loss"),
        (_scaled_by_a_parameter, "which is no number"),
        (_rounded, "its logits are cast from torch.float32 to [torch.bfloat16]"),
        (_in_double, "its logits are cast from torch.float32 to [torch.float64]"),
        (_capped_twice, "its logits are capped twice"),
        (_other_classes, "its classes are indexed with"),
        (_across_classes, "its classes are not the last dimension"),
        (_matrices_of_a_batch, "its head is no product with one matrix"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    h, w, b, y = _inputs()
    inputs = (h, w, b, y if function in (_other_classes,) else y.clamp(min=0))
    gm, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "dsgraph" not in gm.code
    (note,) = record.notes
    assert note.startswith("linear_cross_entropy is not substituted (test_linear_cross_entropy.py:")
    assert reason in note
    torch.testing.assert_close(result, function(*inputs))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo does not capture this loss")
def test_rows_whose_number_the_data_decide():
    """Picked by a mask they are counted: the count reads the logits. Without `fullgraph` the graph breaks before it."""

    def function(h, w, b, y):
        return F.cross_entropy(F.linear(h, w)[y >= 0], y[y >= 0])

    _, record, loss = substitute(function, *_inputs(), kernels=[SPEC])
    assert record.changed == 0 and "the logits are read by sym_size_int as well" in record.notes[0]
    torch.testing.assert_close(loss, function(*_inputs()))


def test_a_loss_without_a_head_is_no_near_miss():
    _, record, _ = substitute(lambda x, y: F.cross_entropy(x.tanh(), y), torch.randn(4, 7), torch.zeros(4).long())
    assert not any("linear_cross_entropy is not substituted" in note for note in record.notes)


def test_it_is_substituted_where_memory_is_to_gain():
    def function(h, w, y):
        return F.cross_entropy(F.linear(h, w), y, reduction="mean")

    def none(h, w, y):
        return F.cross_entropy(F.linear(h, w), y, reduction="none").sum()

    large = (torch.zeros(2048, 4), torch.zeros(4096, 4), torch.zeros(2048).long())
    gm, record, _ = substitute(function, *large, asked=False)
    assert "linear_cross_entropy.default" in gm.code
    # Logits and their gradient, but for a chunk of 256 rows.
    spared = (2 * 2048 - 256) * 4096 * 4
    assert record.done == (f"linear_cross_entropy in 1 place, saves {spared:,} bytes: no logits in memory",)
    _, record, _ = substitute(function, *large, asked=False, inference=True)
    assert f"{(2048 - 256) * 4096 * 4:,} bytes" in record.done[0]
    low = [tensor.bfloat16() for tensor in large[:2]]
    _, record, _ = substitute(function, *low, large[2], asked=False)
    assert f"{(2 * 2048 - 256) * 4096 * 2 - 4096 * 4 * 4:,} bytes" in record.done[0]
    _, record, _ = substitute(function, *(tensor[:16] for tensor in large), asked=False)
    assert record.changed == 0
    assert any("because nothing is gained: its logits take less than 16 MiB more" in note for note in record.notes)
    _, record, _ = substitute(none, *large, asked=False)
    assert record.changed == 0 and "with reduction='none' it computes the logits twice" in record.notes[0]
    _, record, _ = substitute(none, *large, asked=False, inference=True)
    assert record.changed == 1


def test_it_is_among_the_kernels():
    assert SPEC in KERNELS


def _models():
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GraniteConfig,
        GraniteForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 33, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, **ends}
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, head_dim=4)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=3.0)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**sizes, **heads)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=33, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "items"),
    [
        *(("llama", None), ("gemma2", 7)),  # the others spell it as these do
        *(
            pytest.param(name, items, marks=pytest.mark.full)
            for name in ("llama", "gemma2", "granite", "cohere", "gpt2")
            for items in (None, 7)
            if (name, items) not in (("llama", None), ("gemma2", 7))
        ),
    ],
)
def test_models_of_transformers(name, items):
    torch.manual_seed(0)
    model = _models()[name]().eval()
    model.loss_type = "ForCausalLM"  # of GPT-2 transformers warns that it guesses, and a warning breaks the graph
    ids = torch.randint(33, (2, 6))

    def loss_of(ids: Tensor, number: Tensor | None) -> Tensor:
        extra = {} if number is None else {"num_items_in_batch": number}
        return model(input_ids=ids, labels=ids, use_cache=False, **extra).loss

    number = None if items is None else torch.tensor(items)
    _, record, loss = substitute(loss_of, ids, number, kernels=[SPEC])
    assert record.changed == 1, record.notes
    plain = loss_of(ids, number)
    torch.testing.assert_close(loss, plain)
    weights = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(plain, weights))
    _, record, _ = substitute(lambda ids: model(input_ids=ids, labels=ids, use_cache=False)[:2], ids, kernels=[SPEC])
    assert "the graph returns the logits as well" in record.notes[0]
