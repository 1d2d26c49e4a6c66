from __future__ import annotations

import pytest

from dsgraph.ranks.local_rank import local_rank


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, 0),
        ({"RANK": "11"}, 3),
        ({"RANK": "11", "LOCAL_RANK": "5"}, 5),
        ({"RANK": "7"}, 7),
        ({"LOCAL_RANK": "9"}, 9),
    ],
)
def test_launchers_without_local_rank_fill_one_host_after_the_other(environ, found):
    assert local_rank(8, environ) == found
