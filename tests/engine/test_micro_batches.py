"""Batches on their way to the model, with the meta device in place of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.engine.loss_scale import LossScale
from dsgraph.engine.micro_batches import MicroBatches

META = torch.device("meta")


def test_batches_come_to_the_models_device():
    net, seen = nn.Linear(4, 4, device=META), list[Tensor]()
    state: Any = SimpleNamespace(
        module=net, optimizer=torch.optim.SGD(net.parameters()), loss_scale=LossScale(), layer_drop=None
    )

    def model(x: Tensor, *, targets: dict[str, Tensor]) -> Tensor:
        seen.extend([x, targets["y"]])
        return net(x)

    logger: Any = None  # which observes training alone
    batches = MicroBatches(model, state, logger, device=META, dtype=torch.float32)
    x, y = torch.ones(2, 4, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    result = batches.forward((x,), {"targets": {"y": y}}, is_training=False)
    assert [(item.device, item.dtype) for item in (*seen, result)] == [
        (META, torch.float32),
        (META, torch.int64),
        (META, torch.float32),
    ]
