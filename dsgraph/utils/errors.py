"""The error classes of dsgraph. Each message names the thing, what was found and what to do."""


class PartitionError(ValueError):
    """A model, mesh or argument that `partition` or `materialize` does not support.

    Fix: the message names the module, parameter or argument; docs/reference/limits.md lists what is supported.
    """


class OptionError(ValueError):
    """An unknown option of the backend, or a wrong value of a known one.

    Fix: correct the option that the message names; docs/reference/options.md lists all options.
    """


class KernelError(ValueError):
    """A user's kernel that cannot be used.

    Fix: change the reference, `match` or `triton` function as the message says; see docs/guides/write-a-kernel.md.
    """


class RanksDisagreeError(RuntimeError):
    """Ranks are about to run different collectives, which would hang or mix up their data.

    Fix: let all ranks run the same model on the path that the message names, or look for the error of a rank that
    ended.
    """


class StrictError(RuntimeError):
    """A problem that is only a warning or a line of the report unless `strict=True`.

    Fix: change the line, op or option that the message names, or set `strict=False`.
    """


class LaunchError(Exception):
    """A script that cannot be run, or ranks that failed, died or hang.

    Fix: correct the argument or host that the message names; if ranks failed, fix the first traceback.
    """


class LayoutError(ValueError):
    """Impossible numbers of a model or of a layout.

    Fix: change the number that the message names; `dsgraph plan --search` lists the layouts that are possible.
    """


class EmissionError(RuntimeError):
    """Kernels could not be generated for a device that this machine does not have.

    Fix: install a version or package that the message names, or compile on the device itself.
    """


class PositionsError(ValueError):
    """A model whose table of positions cannot be extended.

    Fix: use a length that the message allows, and call `extend_positions` before `partition`.
    """


class AccumulationError(RuntimeError):
    """Local gradients were about to be lost or used before they were reduced.

    Fix: run the last micro-batch outside `accumulate` first, or drop the step with `dsgraph.discard(model)`.
    """


class GradientError(RuntimeError):
    """A gradient, or a number computed from gradients, that the given tensors do not determine.

    Fix: pass the parameters, or call the function, that the message names.
    """


class ConfigError(ValueError):
    """A configuration of the engine that is not supported.

    Fix: change or remove the key that the message names; docs/reference/config.md lists all keys.
    """


class OffloadError(RuntimeError):
    """Tensors that cannot be stored outside the device's memory, or were lost there.

    Fix: free space or choose another folder as the message says; after a lost file, load a checkpoint.
    """


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read.

    Fix: correct the folder, tag or model that the message names; if files are damaged, load an earlier checkpoint.
    """


class LossScaleError(RuntimeError):
    """Gradients overflow in float16 however small the loss scale is.

    Fix: lower the learning rate, look for NaN in the loss, or train in bfloat16.
    """


class EngineError(RuntimeError):
    """Calls of the engine in an order that makes no step.

    Fix: call forward, `backward` and `step` in turn, or the method that the message names.
    """


class InferenceError(ValueError):
    """A model, argument or call that inference does not support.

    Fix: change the argument that the message names; docs/reference/limits.md lists the supported models.
    """


def on_one_line(error: BaseException, *, unnamed: type[BaseException] | tuple[type[BaseException], ...] = ()) -> str:
    """Return an error on one line: its class, unless it is one of `unnamed`, and its message."""
    said = " ".join(str(error).split())
    return said if isinstance(error, unnamed) else f"{type(error).__name__}: {said}"
