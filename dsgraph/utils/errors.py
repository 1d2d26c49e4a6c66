"""Errors of the product. Each message names the thing, what was found and what to do."""


class PartitionError(ValueError):
    """A model, mesh or argument that `partition` or `materialize` cannot take."""


class OptionError(ValueError):
    """An unknown option of the backend, or a wrong value of a known one."""


class KernelError(ValueError):
    """A kernel of the user's that is none."""


class RanksDisagreeError(RuntimeError):
    """Ranks are about to run different collectives, which would hang or mix up their data."""


class StrictError(RuntimeError):
    """Something that is a warning unless `strict=True`."""


class LaunchError(Exception):
    """A script that cannot be run, or ranks that raised, died or hang."""


class LayoutError(ValueError):
    """Numbers of a model, or a division of its ranks, that cannot be."""


class EmissionError(RuntimeError):
    """Kernels could not be generated for a device that is not there."""


class PositionsError(ValueError):
    """A model whose table of positions cannot be made longer."""


class AccumulationError(RuntimeError):
    """Local gradients were about to be lost or used before they were reduced."""


class ConfigError(ValueError):
    """A configuration of the engine that cannot be run."""


class OffloadError(RuntimeError):
    """Something that was to lie outside memory cannot be stored there, or is lost."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


class LossScaleError(RuntimeError):
    """Gradients overflow in float16 however small the loss is scaled."""


class EngineError(RuntimeError):
    """Calls of the engine in an order that makes no step."""


class InferenceError(ValueError):
    """A model, argument or call that inference cannot take."""


def on_one_line(error: BaseException, *, unnamed: type[BaseException] | tuple[type[BaseException], ...] = ()) -> str:
    """An error on one line: its class, unless it is one of `unnamed`, and what it says."""
    said = " ".join(str(error).split())
    return said if isinstance(error, unnamed) else f"{type(error).__name__}: {said}"
