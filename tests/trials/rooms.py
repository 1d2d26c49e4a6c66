"""All trials: importing their files lists them."""

from tests.trials import frameworks, modules, optimizers, reading, saving, surgery, training
from tests.trials.trial import TRIALS

__all__ = ["TRIALS", "frameworks", "modules", "optimizers", "reading", "saving", "surgery", "training"]
