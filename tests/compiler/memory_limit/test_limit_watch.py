from __future__ import annotations

import warnings

import pytest
import torch

import dsgraph

from .test_limit_scope import WIDTH, _Blocks, _compiled, _least, _step, _text

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]
ROWS = 256
BYTES = 4 * sum(param.numel() for param in _Blocks().parameters())


def test_two_forwards_before_a_backward_are_named():
    limit = _least(ROWS)
    model, compiled = _compiled(limit)
    _step(compiled, ROWS)
    with pytest.warns(UserWarning, match="2 forwards wait for their backward at once"):
        loss = compiled(torch.randn(ROWS, WIDTH)) + compiled(torch.randn(ROWS, WIDTH))
    loss.backward()
    assert "cannot be promised: 2 forwards wait" in _text(model)
    _, strict = _compiled(limit, strict=True)
    first = strict(torch.randn(ROWS, WIDTH))
    with pytest.raises(dsgraph.utils.errors.StrictError, match="2 forwards wait"):
        strict(torch.randn(ROWS, WIDTH))
    first.backward()


def test_gradients_of_an_earlier_backward_are_named():
    model, compiled = _compiled(_least(ROWS))
    compiled(torch.randn(ROWS, WIDTH)).backward()
    with pytest.warns(UserWarning, match=rf"{BYTES:,} bytes of gradients are held from an earlier backward"):
        compiled(torch.randn(ROWS, WIDTH)).backward()
    assert "cannot be promised" in _text(model)


def test_what_fits_is_not_named():
    model, compiled = _compiled(10**8, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # of Dynamo's own
        (compiled(torch.randn(ROWS, WIDTH)) + compiled(torch.randn(ROWS, WIDTH))).backward()
        compiled(torch.randn(ROWS, WIDTH)).backward()
        for _ in range(2):  # a forward that is thrown away does not wait
            compiled(torch.randn(ROWS, WIDTH))
    assert "met by that prediction" in _text(model)
