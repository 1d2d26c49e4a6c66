"""The configuration's `sparse_attention`."""

from __future__ import annotations

import pytest

import dsgraph
from dsgraph.engine.config.options_of_config import backend_options
from dsgraph.engine.config.read_config import read_config
from dsgraph.sparse import BigBird, Fixed


def _layout(section, **more):
    config = read_config({"train_batch_size": 2, "sparse_attention": section, **more}, ranks=1).config
    return backend_options(config)["sparse_attention"]


def test_deepspeeds_section_is_a_layout():
    section = {"mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4}
    more = {"num_global_blocks": 1, "attention": "bidirectional", "num_different_global_patterns": 4}
    expected = Fixed(different_layout_per_head=True, num_different_global_patterns=4)
    assert _layout(section | more | {"horizontal_global_attention": False}) == expected
    assert _layout({"mode": "bigbird", "num_random_blocks": 2}) == BigBird(num_random_blocks=2)


@pytest.mark.parametrize(
    ("section", "more", "said"),
    [
        ({"mode": "fixed", "num_random_blocks": 2}, {}, "'num_random_blocks' is no field of mode 'fixed'"),
        ({"mode": "fixt"}, {}, "sparse_attention.mode is 'fixt'"),
        ({"blocks": 16}, {}, "unknown key 'sparse_attention.blocks'"),
        ({"block": 0}, {}, "block is 0; it takes 1 or more"),
        ({}, {"dsgraph": {"compile": False}}, "sparse_attention needs dsgraph.compile true, and it is false"),
    ],
)
def test_what_cannot_be_is_refused(section, more, said):
    with pytest.raises(dsgraph.ConfigError, match=said):
        _layout(section, **more)
