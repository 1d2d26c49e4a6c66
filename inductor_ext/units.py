"""The nodes of a step graph that stand for the run of a unit. A step's run-time runs the unit in their place.

    results, saved, token = run_forward(call, values, parameters)
    gradient of the input, gradients of parameters = run_backward(call, values, parameters)

`call` is the number of the unit's call in the step, `values` are what it reads besides its full `parameters`.
"""

from __future__ import annotations

import torch

_SCHEMA = "(int call, Tensor[] values, Tensor[] parameters) -> Tensor[]"

torch.library.define("dsgraph::run_forward", _SCHEMA)
torch.library.define("dsgraph::run_backward", _SCHEMA)

RUN_FORWARD = torch.ops.dsgraph.run_forward.default
RUN_BACKWARD = torch.ops.dsgraph.run_backward.default
