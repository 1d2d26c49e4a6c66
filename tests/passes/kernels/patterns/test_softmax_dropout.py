from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.passes.kernels.patterns.softmax_dropout import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.spec import Match, Setting
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.passes.kernels.patterns.cases import Cases
from tests.passes.kernels.test_substitute_kernels import substitute

OTHER_NUMBERS = "its dropout may draw other random numbers than the plain model's"
SPELLINGS = {
    "functions": lambda x: F.dropout(F.softmax(x, dim=-1), 0.3),
    "training": lambda x: F.dropout(torch.softmax(x, 3), p=0.3, training=True),
    "modules": lambda x: nn.Dropout(0.3)(nn.Softmax(-1)(x)),
    "eager_attention_forward": lambda x: F.dropout(F.softmax(x, -1, dtype=torch.float32).to(x.dtype), 0.3, True),
    "type_as": lambda x: F.dropout(x.softmax(-1, torch.float32).type_as(x), 0.3),
    "upcast before": lambda x: F.dropout(x.float().softmax(-1).to(x.dtype), 0.3),
    "in float32 to the end": lambda x: F.dropout(x.float().softmax(dim=3), 0.3) * 2,
    "in float64 in between": lambda x: F.dropout(x.softmax(-1, dtype=torch.float64).to(x.dtype), 0.3),
    "widened after it": lambda x: F.dropout(x.softmax(-1).float(), 0.3),
    "masked scores": lambda x: F.dropout((x * 0.3).masked_fill(torch.ones(6, 6).tril() == 0, -1e4).softmax(-1), 0.3),
}


def _scores(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 6, 6).mul(2).to(dtype).requires_grad_()


def _seeded(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    torch.manual_seed(5)
    return function(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found_and_drops_the_same(spelling, dtype):
    function, x = SPELLINGS[spelling], _scores(dtype)
    plain = _seeded(function, x)
    torch.manual_seed(5)
    gm, record, result = substitute(function, x, kernels=[SPEC])
    assert record.changed == 1 and record.notes == ()
    assert "softmax_dropout" in gm.code and "functional" not in gm.code and ".softmax(" not in gm.code
    assert torch.equal(result, plain) and result.dtype == plain.dtype
    ours, theirs = gradients(result, [x]), gradients(plain, [x])
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    else:
        wide = x.detach().float().requires_grad_()
        assert_as_near(ours, theirs, gradients(_seeded(function, wide), [wide]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x.softmax(-1), 0.3),
        lambda x: F.dropout(x.softmax(-1).float(), 0.3),
        lambda x: F.dropout(F.softmax(x.float(), -1, dtype=torch.float64), 0.3),
    ],
)
def test_doubles_are_computed_as_such(function):
    x = _scores(torch.float64)
    plain = _seeded(function, x)
    torch.manual_seed(5)
    _, record, result = substitute(function, x, kernels=[SPEC])
    assert record.changed == 1 and torch.equal(result, plain) and result.dtype == plain.dtype
    torch.testing.assert_close(gradients(result, [x]), gradients(plain, [x]), rtol=1e-6, atol=1e-7)


def test_one_op_stands_for_all():
    x = _scores(torch.bfloat16)
    gm, record, _ = substitute(SPELLINGS["upcast before"], x, kernels=[SPEC])
    FileCheck().check(
        "softmax_dropout.default(l_x_, 0.3, softmax_dtype = torch.float32, dtype = torch.bfloat16)"
    ).check("getitem").run(gm.code)
    FileCheck().check_not(".float()").check_not(".to(").run(gm.code)
    assert record.done == ("softmax_dropout in 1 place, because it was requested: on the CPU it is the same calls",)


def _dropped_weights_returned(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.dropout(F.softmax(x, -1, dtype=torch.float32).to(x.dtype), 0.3)
    return weights @ v, weights


def test_weights_that_are_returned_behind_the_dropout_are_the_same():
    x, v = _scores(), torch.randn(2, 3, 6, 4)
    torch.manual_seed(5)
    _, record, ours = substitute(_dropped_weights_returned, x, v, kernels=[SPEC])
    assert record.changed == 1 and record.notes == ()
    assert all(map(torch.equal, ours, _seeded(_dropped_weights_returned, x, v)))


def _written_behind(x: Tensor) -> Tensor:
    return F.dropout(x.softmax(-1), 0.3).mul_(2)


def test_a_write_behind_it_does_no_harm():
    x = _scores()
    torch.manual_seed(5)
    _, record, result = substitute(_written_behind, x, kernels=[SPEC])
    plain = _seeded(_written_behind, x)
    assert record.changed == 1 and torch.equal(result, plain)
    torch.testing.assert_close(gradients(result, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-6)


def _returned(x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.softmax(-1)
    return F.dropout(z, 0.3), z


def _cast_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.softmax(-1, dtype=torch.float64).to(x.dtype)
    return F.dropout(z, 0.3), z


def _dropped_twice(x: Tensor) -> Tensor:
    z = x.softmax(-1)
    return F.dropout(z, 0.3) + F.dropout(z, 0.3)


def _dropped_twice_behind_a_cast(x: Tensor) -> Tensor:
    z = x.softmax(-1).to(x.dtype)
    return F.dropout(z, 0.3) + F.dropout(z, 0.3)


def _in_place(x: Tensor) -> Tensor:
    return F.dropout(x.softmax(-1), 0.3, inplace=True)


def _in_place_by_position(x: Tensor) -> Tensor:
    return F.dropout(x.softmax(-1), 0.3, True, True)


def _scores_overwritten(x: Tensor) -> Tensor:
    scores = x * 2
    z = scores.softmax(-1)
    scores.zero_()
    return F.dropout(z, 0.3)


def _scores_overwritten_later(x: Tensor) -> Tensor:
    scores = x * 2
    y = F.dropout(scores.softmax(-1), 0.3)
    scores.zero_()
    return y


_NEAR_MISSES = [
    (_returned, "z, which it computes on the way, is read by output as well"),
    (_cast_returned, "which it computes on the way, is read by others as well"),
    (_dropped_twice, "which it computes on the way, is read by dropout_1 as well"),
    (_dropped_twice_behind_a_cast, "which it computes on the way, is read by others as well"),
    (_in_place, "its dropout writes to what it is given"),
    (_in_place_by_position, "its dropout writes to what it is given"),
    (_scores_overwritten, "writes to what it reads before it is through"),
    (_scores_overwritten_later, "zero_ writes later to what the kernel may keep for its backward"),
    (lambda x: F.dropout(x.softmax(-2), 0.3), "its softmax is over dimension -2, not over the last"),
    (lambda x: F.dropout(x.softmax(0), 0.3), "its softmax is over dimension 0, not over the last"),
    (lambda x: F.dropout(x.softmax(-1), 1.0), "its dropout leaves nothing"),
    (lambda x: F.dropout(F.softmax(x, -1, dtype=torch.bfloat16), 0.3), "rounds torch.float32 to torch.bfloat16"),
    (lambda x: F.dropout(F.softmax(x.double(), -1, dtype=x.dtype), 0.3), "rounds torch.float64 to torch.float32"),
    (lambda x: F.dropout(F.softmax((x > 0).long(), -1, dtype=x.dtype), 0.3), "its input is torch.int64"),
    (lambda x: F.dropout(x.sum().softmax(-1), 0.3), "its input is a number, not rows of them"),
]


_OTHERS = [
    lambda x: F.dropout(x.softmax(-1), 0.0),
    lambda x: F.dropout(x.softmax(-1), 0.3, training=False),
    lambda x: nn.Dropout(0.3).eval()(x.softmax(-1)),
    lambda x: x.softmax(-1) * 2,
    lambda x: F.dropout(x, 0.3).softmax(-1),
    lambda x: F.dropout(x.softmax(-1) * 2, 0.3),
    lambda x: F.dropout(x.softmax(-1).mean(-1), 0.3),
    lambda x: F.dropout(x.log_softmax(-1), 0.3),
    lambda x: F.dropout(F.softmin(x, -1), 0.3),
    lambda x: F.alpha_dropout(x.softmax(-1), 0.3, training=True),
    lambda x: F.dropout2d(x.softmax(-1), 0.3),
    lambda x: F.feature_alpha_dropout(x.softmax(-1), 0.3, training=True),
]


def test_dropout_of_a_module_follows_its_mode():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x.softmax(-1))

    model, x = Model(), _scores()
    for training in (True, False):
        model.train(training)
        _, record, _ = substitute(model, x, kernels=[SPEC], asked=False)
        assert len(record.notes) == training  # nothing to gain; nothing found


def _attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return F.dropout(F.softmax(q @ k.mT * 0.3, -1, dtype=torch.float32).to(q.dtype), p) @ v


def test_the_whole_attention_comes_first():
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    gm, record, _ = substitute(lambda q, k, v: _attention(q, k, v, 0.3), q, k, v, kernels=KERNELS)
    assert "dsgraph.attention" in gm.code and "softmax_dropout" not in gm.code and record.changed == 1
    gm, record, _ = substitute(lambda q, k, v: _attention(q, k, v, 0.0), q, k, v, kernels=KERNELS, asked=False)
    assert "dsgraph.attention" in gm.code and record.changed == 1 and record.notes == ()


def test_where_it_is_not_taken_softmax_and_dropout_are_looked_for():
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    kernels = [spec for spec in KERNELS if spec.name in ("attention", "softmax_dropout")]
    _, record, _ = substitute(lambda q, k, v: _attention(q, k, v, 0.3), q, k, v, kernels=kernels, asked=False)
    assert record.changed == 0 and record.notes[0].startswith("attention is not substituted")
    assert OTHER_NUMBERS in record.notes[0]
    assert record.notes[1:] == (
        "softmax_dropout is not substituted in 1 place, because nothing is gained: on the CPU it is the same calls",
    )

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((torch.tanh(q @ k.mT / 50) * 50).softmax(-1), 0.3) @ v

    torch.manual_seed(5)
    gm, record, result = substitute(capped, q, k, v, kernels=kernels)
    assert "softmax_dropout" in gm.code and record.changed == 1
    assert torch.equal(result, _seeded(capped, q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_real_attention_drops_the_same(name):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.3}
    shares = {"attention_dropout": 0.3, "attention_probs_dropout_prob": 0.3}
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes, **shares, attn_implementation="eager")
    torch.manual_seed(0)
    model, tokens = getattr(transformers, f"{name}Model")(config).train(), torch.randint(1, 64, (2, 8))

    def function(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens).last_hidden_state

    plain = _seeded(function, tokens)
    torch.manual_seed(5)
    _, record, result = substitute(function, tokens, kernels=[SPEC])
    assert record.changed == 2 and record.notes == () and torch.equal(result, plain)
    weights = list(model.parameters())[:8]
    ours, theirs = (torch.autograd.grad(y.square().sum(), weights) for y in (result, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_on_a_gpu_the_numbers_are_others_and_it_is_left_to_whoever_asks():
    found = []

    def backend(gm, _):
        (node,) = [node for node in gm.graph.nodes if SPEC.is_anchor(node)]
        found.append(SPEC.match(node))
        return gm

    with torch.device("meta"):  # there is no GPU here; what counts is that it is not the CPU
        torch._dynamo.reset()
        torch.compile(SPELLINGS["functions"], backend=backend)(torch.empty(2, 3))
    (match,) = found
    assert isinstance(match, Match) and match.caveat == OTHER_NUMBERS


def test_what_it_spares_is_counted():
    x = _scores()
    _, record, _ = substitute(SPELLINGS["functions"], x, kernels=[SPEC], asked=False)
    assert "because nothing is gained: on the CPU it is the same calls" in record.notes[0]
    _, record, _ = substitute(SPELLINGS["functions"], x, kernels=[SPEC], asked=False, fuses=True)
    assert "because nothing is gained: Inductor makes one kernel of it as well" in record.notes[0]
    low, wide = {"softmax_dtype": torch.float32, "dtype": torch.bfloat16}, dict.fromkeys(("softmax_dtype", "dtype"))
    for options, expected in ((wide, (0, 1)), (low, (1, 3))):
        for training in (False, True):
            gain = SPEC.gain(Match(None, (), options), Setting(fuses=False, device_type="cuda", training=training))
            assert gain.kernels == expected[training]


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(F.dropout(x.softmax(-1), 0.3) for _ in range(2))


def test_two_of_the_same_scores_are_not_merged():
    x = _scores()
    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": ["softmax_dropout"], "strict": True}
    ours = _seeded(torch.compile(_twice, backend="dsgraph", options=options), x)
    plain = _seeded(_twice, x)
    assert not torch.equal(*ours) and all(map(torch.equal, ours, plain))
    torch.testing.assert_close(gradients(ours[0] * ours[1], [x]), gradients(plain[0] * plain[1], [x]))


def _region(x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout((x * math.pi).softmax(-1), 0.3).sin(), x, use_reentrant=False)


def test_a_checkpoint_region_computes_it_again_with_the_same_numbers():
    x = _scores()
    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": ["softmax_dropout"], "strict": True}
    ours, plain = _seeded(torch.compile(_region, backend="dsgraph", options=options), x), _seeded(_region, x)
    torch.rand(10)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(gradients(ours, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-6)


def test_with_strict_it_must_be_found():
    torch._dynamo.reset()
    options = {"codegen": "eager", "kernels": ["softmax_dropout"], "strict": True}
    with pytest.raises(Exception, match="softmax_dropout was requested, but is not used in this graph"):
        torch.compile(lambda x: x.softmax(-1), backend="dsgraph", options=options)(_scores())


CASES = Cases(
    SPEC,
    lambda dtype: (_scores(dtype),),
    near_misses=_NEAR_MISSES,
    others=_OTHERS,
)
