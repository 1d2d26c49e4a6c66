"""The report of an inference engine about its graphs and its speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from .quantization.quantize import Quantization


@dataclass
class Counts:
    """Counts of one kind of graph: "encode", "prompt", "decode" or "forward"; "uncompiled" for calls without a graph.

    Attributes:
        compiles: Graphs that were compiled.
        calls: Calls of these graphs.
        tokens: Tokens computed by calls without a compile, over all rows of the batch, without padding.
        seconds: Time of these calls.
    """

    compiles: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of calls without a compile; 0 if there was none."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class InferenceReport:
    """The calls, memory and quantization of an engine.

    Attributes:
        prompt: Prompts of `generate`.
        decode: Tokens after the prompt, of `generate`.
        forward: Calls of the engine itself.
        encode: Sequences that `generate` encodes, of models with encoder and decoder.
        uncompiled: Forwards that ran uncompiled in the model itself, such as the second one of
            `guidance_scale`.
        buckets: Lengths to which prompts and encoder inputs are padded.
        cache_bytes: Bytes of keys and values, by rows of the batch; overlapping calls have a cache each.
        quantization: Quantization of the weights, with the error of each layer; None without quantization.
        whole_weights: The weights of a quantized model that are not quantized: name -> bytes, largest first.
        turned_weights: Number of `Conv1D` layers whose weight is stored by columns, for skinny matmuls on a CPU.
    """

    prompt: Counts
    decode: Counts
    forward: Counts
    encode: Counts
    uncompiled: Counts
    buckets: tuple[int, ...]
    cache_bytes: dict[int, int] = field(default_factory=dict)
    quantization: Quantization | None = None
    whole_weights: dict[str, int] = field(default_factory=dict)
    turned_weights: int = 0

    def __str__(self) -> str:
        kinds = (("encode", self.encode), ("prompt", self.prompt), ("decode", self.decode), ("forward", self.forward))
        lines = [
            f"{name}: {c.compiles} compiled, {c.calls} calls, {c.tokens_per_second:.1f} tokens/s"
            for name, c in kinds
            if c.calls or name != "encode"
        ]
        if self.uncompiled.calls:
            lines.append(
                f"uncompiled: {self.uncompiled.calls} calls of the model itself, "
                f"{self.uncompiled.tokens_per_second:.1f} tokens/s: they bring arguments that no graph takes"
            )
        lines.append(f"prompts are padded to {', '.join(map(str, self.buckets))} tokens")
        lines += [f"cache of {rows} rows: {size / 1e6:.1f} MB" for rows, size in sorted(self.cache_bytes.items())]
        if self.turned_weights:
            lines.append(f"{self.turned_weights} weights of Conv1D lie in memory by columns")
        if self.quantization is not None:
            how = self.quantization
            name, error = max(how.errors.items(), key=lambda item: item[1])
            lines.append(
                f"{len(how.errors)} layers of {how.bits} bits, {how.bytes_before / 1e6:.1f} MB now "
                f"{how.bytes_after / 1e6:.1f} MB; largest relative error {error:.4f}, of {name}"
            )
            lines += _whole(self.whole_weights)
        if self.quantization is not None and self.quantization.output_errors:
            lines.append(_calibrated(self.quantization))
        return "\n".join(lines)


def _whole(weights: dict[str, int]) -> list[str]:
    if not weights:
        return []
    largest = next(iter(weights))
    return [
        f"{len(weights)} weights are not rounded, {sum(weights.values()) / 1e6:.1f} MB; the largest is {largest}, "
        f"{weights[largest] / 1e6:.1f} MB"
    ]


def _calibrated(how: Quantization) -> str:
    name, error = max(how.output_errors.items(), key=lambda item: item[1])
    nearest = how.output_errors_to_nearest[name]
    missed = len(how.errors) - len(how.output_errors)
    rest = f"; {missed} layers that no batch reached are rounded to nearest" if missed else ""
    return f"calibrated: largest error of outputs {error:.4f}, of {name}; to nearest it were {nearest:.4f}{rest}"
