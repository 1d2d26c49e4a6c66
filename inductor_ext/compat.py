"""Every private torch API that the ops use, in one place.

Checked on torch 2.11.0, 2.12.1 and 2.13.0.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

# Functional collectives: public as `torch.distributed._functional_collectives`, whose Python wrappers add a tensor
# subclass that the ops and the lowered graphs do not want. Dynamo, AOTAutograd and Inductor all know these ops.
c10d_functional = torch.ops._c10d_functional


def resolve_group(name: str) -> ProcessGroup:
    """The process group that a graph names. There is no public lookup by name."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast("Any", name))
