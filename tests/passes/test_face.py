"""The names that `dsgraph.passes` exports."""

from __future__ import annotations

import pytest

import dsgraph.passes


def test_a_built_in_pass_is_imported_from_its_module():
    with pytest.raises(ImportError, match=r"`from dsgraph\.passes\.zero\.merge_gathers import MergeGathers`"):
        from dsgraph.passes import MergeGathers  # noqa: F401
    assert not hasattr(dsgraph.passes, "MergeGather")
