"""The loss scale of float16: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsgraph.utils.errors import LossScaleError

from .config.engine_config import Fp16Config

_MOVES = ("scale", "overflows_left", "steps", "last_overflow")


@dataclass
class LossScale:
    """The factor of the loss, which keeps small gradients from becoming zero in float16.

    A dynamic scale halves at the `hysteresis`-th overflow, and doubles after `window` steps without one.

    Attributes:
        scale: The current scale.
        dynamic: True if it changes.
        window: Steps without overflow until it doubles.
        hysteresis: Overflows until it halves.
        refills: True if a step without overflow resets the count of overflows; otherwise doubling does.
        minimum: The least scale.
        overflows_left: Overflows until it halves, from here.
        steps: Steps so far, the skipped ones included.
        last_overflow: The last step that overflowed; -1 if none has.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    refills: bool = False
    minimum: float = 1.0
    overflows_left: int = field(default=0)
    steps: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        self.overflows_left = self.overflows_left or self.hysteresis

    @classmethod
    def of(cls, config: Fp16Config) -> LossScale:
        """Return the scale of a configuration; 1 without float16."""
        if not config.enabled:
            return cls()
        return cls(
            scale=config.loss_scale or 2.0**config.initial_scale_power,
            dynamic=config.loss_scale == 0,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            refills=config.consecutive_hysteresis,
            minimum=config.min_loss_scale,
        )

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step.

        Raises:
            LossScaleError: There was an overflow at the least scale: training would skip steps for ever.
        """
        if not self.dynamic:
            return
        if overflow:
            self._back_off()
            self.last_overflow = self.steps
        else:
            self._grow()
        self.steps += 1

    def _back_off(self) -> None:
        if self.overflows_left > 1:
            self.overflows_left -= 1
            return
        if self.scale == self.minimum:
            raise LossScaleError(
                f"gradients are not finite at the least loss scale, {self.minimum:g} (fp16.min_loss_scale): look for "
                "what overflows in the model, or train in bf16"
            )
        self.scale = max(self.scale / 2, self.minimum)

    def _grow(self) -> None:
        if self.refills:
            self.overflows_left = self.hysteresis
        stable = self.steps - self.last_overflow - 1
        if stable > 0 and stable % self.window == 0:
            self.overflows_left = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float | int]:
        """Return the state of a dynamic scale; empty for a static one."""
        return {name: getattr(self, name) for name in _MOVES} if self.dynamic else {}

    def why_not(self, state: Mapping[str, object]) -> str:
        """Return why `load_state_dict` cannot load a state; empty if it can."""
        lacks = [name for name in _MOVES if not isinstance(state.get(name), (int, float))] if state else []
        return f"its loss scale has no {lacks[0]!r}" if lacks else ""

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue from a state, if this scale is dynamic as well. The rule stays the configuration's."""
        for name in _MOVES if state and self.dynamic else ():
            setattr(self, name, state[name])
