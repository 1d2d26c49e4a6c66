from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.kernels.patterns.attention import SPEC
from tests.inductor_ext.kernels.checks import assert_as_near
from tests.passes.kernels.test_substitute_kernels import substitute

LOWEST = torch.finfo(torch.float32).min


def _inputs(dtype: torch.dtype = torch.float32, *, keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 6, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def _upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2).contiguous()


def _upcast_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).float() * 0.5).softmax(3).type_as(v) @ v


def _scaled_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / 8**0.5) @ k.permute(0, 1, 3, 2)).softmax(-1) @ v


def _scaled_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((0.5 * q) @ (k.transpose(-1, -2) * 0.5), -1) @ v


def _without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.Softmax(-1)(q.matmul(k.swapaxes(-1, -2))).matmul(v)


def _three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(-1), v)


def _two_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q[0, 0] @ k[0, 0].T, 1) @ v[0, 0]


def _dropout_in_inference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.5, training=False) @ v


def _positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places, document = torch.arange(6), (q[:, 0, :, 0] > 0).cumsum(-1)  # [time], [batch, time]
    rows, first, second = torch.arange(2)[:, None, None, None], places[None, None, :, None], places[None, None, None]
    mask = torch.ones((), dtype=torch.bool) & (second <= first) & (document[rows, first] == document[rows, second])
    bias = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def _filled_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = (torch.arange(6)[:, None] >= torch.arange(6)[None, :]) | (q[0, 0, :, :1] > 0)
    return (q @ k.mT * 0.3).masked_fill(~far, -math.inf).softmax(-1) @ v


def _from_a_place(q: Tensor, least: int) -> Tensor:
    mask = (torch.arange(6)[None, None, :, None] >= least).expand(2, -1, 6, 6)
    return torch.where(mask, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)


def _all_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + _from_a_place(q, 0)).softmax(-1) @ v


EVERYWHERE_THE_SAME = [
    *(_plain, _upcast, _upcast_before, _scaled_queries, _scaled_both, _without_scale, _three_dimensions),
    *(_two_dimensions, _dropout_in_inference, _positions, _filled_positions, _all_places),
]


def _tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lower = torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6)
    return (q @ k.mT * 0.3).masked_fill(lower[:, :, :6, :6] == 0, -math.inf).softmax(-1) @ v


def _triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    upper = torch.ones(6, 6, dtype=torch.bool).triu(diagonal=1)
    return (q @ k.mT * 0.3).masked_fill(upper, torch.finfo(q.dtype).min).softmax(-1) @ v


def _where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lower = torch.ones((6, 6), dtype=torch.bool).tril()[None, None]
    lowest = torch.full([], LOWEST, dtype=q.dtype)
    return torch.where(lower, q @ k.mT * 0.3, lowest).softmax(-1) @ v


def _added_triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + torch.full((6, 6), -math.inf, dtype=q.dtype).triu(1)).softmax(-1) @ v


def _added_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lower = torch.ones(6, 6, dtype=torch.bool).tril(0)
    bias = torch.zeros(6, 6, dtype=q.dtype).masked_fill(lower.logical_not(), -math.inf)
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def _added_new_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + q.new_full((6, 6), -math.inf).triu(1)).softmax(-1) @ v


CAUSAL = [_tril, _triu, _where, _added_triu, _added_zeros, _added_new_full]


def _gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad((y * torch.randn(y.shape).to(y.dtype)).float().sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", EVERYWHERE_THE_SAME + CAUSAL)
def test_every_spelling_is_found_and_means_the_same(spelling: Callable[..., Tensor], dtype):
    inputs = _inputs(dtype)
    gm, record, result = substitute(spelling, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 1 and "softmax" not in gm.code and record.notes == ()
    assert "not stored" in record.done[0]
    assert ("causal = True" in gm.code) == (spelling in CAUSAL)
    plain = spelling(*inputs)
    ours, theirs = [result, *_gradients(result, inputs)], [plain, *_gradients(plain, inputs)]
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        return
    wide = tuple(item.detach().float().requires_grad_() for item in inputs)
    truth = spelling(*wide)
    assert_as_near(ours, theirs, [truth, *_gradients(truth, wide)])


def test_one_op_stands_for_many():
    gm, record, _ = substitute(_upcast, *_inputs(), kernels=[SPEC], asked=False)
    FileCheck().check("dsgraph.attention.default(").check_same("contiguous = False").check(".contiguous()").run(gm.code)
    assert record.done == ("attention in 1 place, saves 864 bytes: its probabilities are not stored",)  # 2*3*6*6*4


def test_a_result_that_is_returned_keeps_its_layout():
    inputs = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in _inputs()]
    _, record, result = substitute(_plain, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 1 and result.stride() == _plain(*inputs).stride()


def _from_a_buffer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask == 0, -math.inf).softmax(-1) @ v


def _lowest_from_a_buffer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask == 0, LOWEST).softmax(-1) @ v


def _added_from_a_buffer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask.log()).softmax(-1) @ v


def _finite_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.where(mask > 0, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def _written_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(6, 6)
    bias.view(36).view(6, 6).masked_fill_(mask == 0, -math.inf)
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def _floor_divided_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.full((6, 6), -1.0)
    view = bias.view(6, 6)
    view //= mask
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def _dropped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.3).softmax(-1), 0.1) @ v


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_from_a_buffer, "a row without one is 0 instead of nan"),
        (_lowest_from_a_buffer, "a row without one passes on another gradient"),
        (_added_from_a_buffer, "a row without one is 0 instead of nan"),
        (_finite_bias, "a row without one passes on another gradient"),
        (_written_bias, "a row without one is 0 instead of nan"),
        (_floor_divided_bias, "a row without one is 0 instead of nan"),
        (_dropped, "its dropout may draw other random numbers"),
    ],
)
def test_what_is_not_proved_to_be_the_same_is_done_where_it_is_asked_for(function, reason):
    inputs, lower = _inputs(), torch.ones(6, 6).tril()
    _, record, result = substitute(function, *inputs, lower, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.done == ()
    assert reason in record.notes[0] and "options={'kernels': ['attention']}" in record.notes[0]
    gm, record, result = substitute(function, *inputs, lower, kernels=[SPEC], asked=True)
    assert record.changed == 1 and "softmax" not in gm.code and reason in record.done[0]
    plain = function(*inputs, lower)
    if function is not _dropped:
        torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(_gradients(result, inputs), _gradients(plain, inputs), rtol=1e-5, atol=1e-5)


def test_rows_without_a_score_are_where_it_says_and_nowhere_else():
    mask = torch.ones(6, 6).tril()
    mask[2] = 0
    for function in (_from_a_buffer, _lowest_from_a_buffer, _finite_bias):
        inputs = _inputs()
        _, _, result = substitute(function, *inputs, mask, kernels=[SPEC])
        plain, others = function(*inputs, mask), [0, 1, 3, 4, 5]
        torch.testing.assert_close(result[..., others, :], plain[..., others, :], rtol=1e-5, atol=1e-6)
        if function is _from_a_buffer:
            assert plain[..., 2, :].isnan().all() and result[..., 2, :].eq(0).all()
        else:
            torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(_gradients(plain[..., 2, :], inputs)[0], _gradients(result[..., 2, :], inputs)[0])


def test_places_from_a_later_one_leave_a_row_without_a_score():
    _, record, _ = substitute(
        lambda q, k, v: (q @ k.mT * 0.3 + _from_a_place(q, 1)).softmax(-1) @ v, *_inputs(), kernels=[SPEC], asked=False
    )
    assert record.changed == 0 and "a row without one passes on another gradient" in record.notes[0]


def test_without_a_gradient_there_is_no_other_one():
    inputs, mask = tuple(item.detach() for item in _inputs()), torch.ones(6, 6).tril()
    mask[2] = 0
    for function in (_lowest_from_a_buffer, _finite_bias):
        _, record, result = substitute(function, *inputs, mask, kernels=[SPEC], asked=False)
        assert record.changed == 1 and record.notes == ()
        torch.testing.assert_close(result, function(*inputs, mask), rtol=1e-5, atol=1e-6)


def _returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.3).softmax(-1)
    return weights @ v, weights


def _returned_cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.3).softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v, weights


def _scores_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return (scores * 0.3).softmax(-1) @ v, scores


def _negative_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * -0.3).softmax(-1) @ v


def _no_scale_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.0) @ k.mT).softmax(-1) @ v


def _over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def _scaled_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * v.mean()).softmax(-1) @ v


def _scaled_after_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + torch.zeros(6, 6)) * 0.3).softmax(-1) @ v


def _two_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.zeros(6, 6) + torch.zeros(1, 6)).softmax(-1) @ v


def _small_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(torch.ones(6, 6).tril() == 0, -1e4).softmax(-1) @ v


def _shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].mT).softmax(-1) @ v


def _shared_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v[:, :1]


def _wide_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.bfloat16() @ k.bfloat16().mT + torch.zeros(6, 6)).softmax(-1).bfloat16() @ v.bfloat16()


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def _wider_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1, dtype=torch.float64).float() @ v


def _in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += torch.zeros(6, 6)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_returned, "is read by output as well"),
        (_returned_cast, "is read by others as well"),
        (_scores_returned, "is read by output as well"),
        (_over_the_queries, "its softmax is over dimension -2, not over the last"),
        (_negative_scale, "its scores are scaled by -0.3, which the kernel takes to be above 0"),
        (_no_scale_left, "its scores are scaled by 0.0"),
        (_scaled_by_a_tensor, "its scores are scaled by a tensor"),
        (_scaled_after_the_mask, "its scores are scaled after they are masked"),
        (_two_masks, "two masks or biases work on its scores"),
        (_small_fill, "its masked scores are -10000.0, which others may come near to"),
        (_shared_keys, "its queries and keys are broadcast against each other"),
        (_shared_values, "its values are broadcast over its scores"),
        (_wide_bias, "what is added to its scores is torch.float32, and they are torch.bfloat16"),
        (_capped, "what tanh does to its scores is not known here"),
        (_wider_softmax, "its softmax is in float64"),
        (_in_place, "does to its scores is not known here"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    inputs = tuple(item.detach() for item in _inputs())
    gm, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "dsgraph" not in gm.code and reason in record.notes[0]
    torch.testing.assert_close(result, function(*inputs), rtol=0, atol=0)


def test_a_fill_that_float16_cannot_tell_from_scores():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(torch.ones(6, 6).tril() == 0, torch.finfo(q.dtype).min).softmax(-1) @ v

    inputs = tuple(item.detach() for item in _inputs(torch.float16))
    _, record, _ = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "its masked scores are -65504.0" in record.notes[0]


def test_a_triangle_is_causal_only_over_as_many_queries_as_keys():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(torch.ones(6, 9).tril() == 0, -math.inf).softmax(-1) @ v

    def second_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(torch.ones(6, 6).tril(-1) == 0, -math.inf).softmax(-1) @ v

    for plain, keys in ((function, 9), (second_diagonal, 6)):
        inputs = tuple(item.detach() for item in _inputs(keys=keys))
        gm, record, result = substitute(plain, *inputs, kernels=[SPEC])
        assert record.changed == 1 and "causal = False" in gm.code
        rows = slice(1, None)  # below the diagonal row 0 is empty
        torch.testing.assert_close(result[..., rows, :], plain(*inputs)[..., rows, :], rtol=1e-5, atol=1e-6)


def test_layers_share_a_mask():
    def layers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        lower = torch.tril(torch.ones(6, 6))
        above = lower == 0
        for mask in (above, lower == 0, above):
            q = (q @ k.mT * 0.3).masked_fill(mask, -math.inf).softmax(-1) @ v
        return q, lower

    inputs = _inputs()
    gm, record, result = substitute(layers, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 3 and record.notes == ()
    FileCheck().check("tril").check_not("softmax").check_not("masked_fill").check("return").run(gm.code)
    plain = layers(*inputs)
    torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(_gradients(result[0], inputs), _gradients(plain[0], inputs), rtol=1e-5, atol=1e-5)


def test_a_shared_mask_that_is_written_between_layers():
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lower = torch.tril(torch.ones(6, 6))
        q = (q @ k.mT * 0.3).masked_fill(lower == 0, -math.inf).softmax(-1) @ v
        lower.view(36).fill_(1)
        return (q @ k.mT * 0.3).masked_fill(lower == 0, -math.inf).softmax(-1) @ v

    inputs = tuple(item.detach() for item in _inputs())
    gm, _, result = substitute(layers, *inputs, kernels=[SPEC], asked=False)
    assert "causal = True" not in gm.code
    torch.testing.assert_close(result, layers(*inputs), rtol=1e-5, atol=1e-6)


def test_a_softmax_that_is_no_attention_is_no_near_miss():
    def gate(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(F.linear(x, w), -1) @ w + F.softmax(x @ w, -1)

    _, record, _ = substitute(gate, torch.randn(4, 4), torch.randn(4, 4), kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()


def test_under_autocast():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (q @ k.mT * 0.3).softmax(-1) @ v

    inputs = _inputs()
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 1
    plain, truth = function(*inputs), (inputs[0] @ inputs[1].mT * 0.3).softmax(-1) @ inputs[2]
    assert_as_near([result], [plain], [truth])


def test_where_torch_has_no_kernel_nothing_is_to_gain():
    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + q.mean(-1, keepdim=True)).softmax(-1) @ v

    def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v[..., :4]

    _, record, _ = substitute(biased, *_inputs(), kernels=[SPEC])
    assert "because it was requested: for the gradient of its bias" in record.done[0]
    _, record, _ = substitute(narrow, *_inputs(), kernels=[SPEC], asked=False)
    assert record.changed == 0 and "values are not as wide as keys" in record.notes[0]


def test_sizes_that_change_and_checkpoint_regions():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return F.softmax((q @ k.mT * 0.3).masked_fill(~mask, -math.inf), -1) @ v

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(function, q, k, v, use_reentrant=False).sin()

    for plain in (function, region):
        torch._dynamo.reset()
        compiled = torch.compile(plain, backend="dsgraph", options={"codegen": "eager"}, dynamic=True)
        for time in (5, 7):
            inputs = tuple(torch.randn(2, 3, time, 8, requires_grad=True) for _ in range(3))
            ours, theirs = compiled(*inputs), plain(*inputs)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(_gradients(ours, inputs), _gradients(theirs, inputs), rtol=1e-5, atol=1e-5)
    inputs = _inputs()
    for item in inputs:
        torch._dynamo.mark_dynamic(item, 2)
    gm, record, _ = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert "causal = True" in gm.code and "saves 864 bytes" in record.done[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.full), "gpt2", "bert"])
def test_models_of_transformers_that_write_it_out(name):
    transformers = pytest.importorskip("transformers")
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {}),
        "bert": (transformers.BertConfig, transformers.BertModel, {}),
    }
    config_type, model_type, more = kinds[name]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "bos_token_id": 0}
    config = config_type(**sizes, eos_token_id=0, num_attention_heads=4, attn_implementation="eager", **more)
    torch.manual_seed(0)
    model = model_type(config).eval()
    tokens = torch.randint(0, 64, (2, 8))

    def outputs(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False)[0] if name != "bert" else model(tokens)[0]

    def padded(tokens: Tensor) -> Tensor:
        return model(tokens, attention_mask=(tokens > 0).long())[0]

    _, record, result = substitute(outputs, tokens, kernels=[SPEC], asked=False)
    assert record.changed == 2 and record.notes == ()
    plain = outputs(tokens)
    torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-5)
    parameters = [item for item in model.parameters() if item.requires_grad]
    ours, theirs = (torch.autograd.grad(item.square().sum(), parameters, allow_unused=True) for item in (result, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    _, record, _ = substitute(padded, tokens, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "passes on another gradient" in record.notes[0]
    with torch.no_grad():
        _, record, result = substitute(padded, tokens, kernels=[SPEC], asked=False)
    assert record.changed == 2
    torch.testing.assert_close(result, padded(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(60)
def test_masks_of_many_masks_are_read_in_time():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(6, 6, dtype=torch.bool).tril()
        for _ in range(30):
            keep = keep & keep
        return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v

    inputs = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0
    assert torch.equal(result, function(*inputs))
