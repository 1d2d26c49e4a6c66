"""Small models of trials."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trials.user import User


class MLP(nn.Module):
    def __init__(self, inward: int = 6, hidden: int = 8, outward: int = 4, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.inward = nn.Linear(inward, hidden)
        self.between = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, outward)
        self.dropout = nn.Dropout(dropout)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.between(self.dropout(torch.tanh(self.inward(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def square(user: User, run: Any, step: int, rows: int = 4) -> Tensor:
    """The mean square error of a model of six features and four targets."""
    loss: Tensor = F.mse_loss(run(user.numbers(step, rows, 6)), user.numbers(500 + step, rows, 4))
    return loss


def train(user: User, run: Any, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    """A plain training loop; losses are noted."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = square(user, run, step)
        loss.backward()
        optimizer.step()
        user.loss(loss)
