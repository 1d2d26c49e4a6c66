"""CompressReductions: momentum is sent as signs while the backward computes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import (
    EXCHANGES,
    GATHERS,
    Ranks,
    average_chunk,
    chunk_rows,
    put_together,
    rows_of,
    take_in_gradient,
)
from dsgraph.inductor_ext.collectives.algorithms import Exchange, Gather
from dsgraph.inductor_ext.collectives.compressed_reduction import Compressed
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import (
    bound_arguments,
    cast,
    come_from,
    emit,
    fake_value,
    find_calls,
    replace_and_erase,
    sort_topologically,
)
from dsgraph.passes.ir.recording import Recording

aten = torch.ops.aten


@dataclass(frozen=True)
class CompressReductions(GraphPass):
    """Lower every `reduce_compressed` to momentum, signs, an exchange with the owners of chunks, and a gather.

    before:  new = reduce_compressed(grad, [8], m, e, f, c, group="0", splits_rows=False); g = getitem(new, 0)
    after:   x = m * c[0] + grad * c[1] + e                                 e, f: errors to compensate
             sent = pack_signs(view(x, [2, 4]), 8)                          4 numbers a chunk, a bit each, and a scale
             received = wait_tensor(exchange_by_messages(sent, 2, "0"))
             y = sum(unpack_signs(received, 4), [0]) / 2 + f
             all = wait_tensor(gather_by_messages(pack_signs(y, 4), 2, "0"))
             g = view(unpack_signs(all, 4), [8])

    Messages of neighbours are sent together, in one exchange and one gather a bucket: side by side, each with scales of
    its own, so that buckets change no number. The exchange starts when the bucket's last gradient is ready, the gather
    when that of the next bucket is, and it is waited for at the end: both run while the backward computes. Gradients of
    one parameter that were reduced separately (it is read in several checkpoint regions) are added first, because its
    momentum accepts one. On one rank nothing is sent. Left alone: nothing.

    Attributes:
        bucket_bytes: Gradients of a bucket have at most this size, before they are compressed. Bytes.
    """

    bucket_bytes: int = 25 * 2**20

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"compressed-reductions"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        markers = _one_each(find_calls(gm, torch.ops.dsgraph.reduce_compressed.default))
        if not markers:
            return PassResult()
        (end,) = gm.graph.find_nodes(op="output")
        buckets = self._fill(markers, ctx)
        for bucket in buckets:
            bucket.send()
        for number, bucket in enumerate(buckets):
            bucket.average(buckets[number + 1].last if number + 1 < len(buckets) else end)
        for bucket in buckets:
            bucket.finish(end)
        sort_topologically(gm.graph)
        given, sent = sum(map(_bytes, markers)), sum(bucket.sent_bytes for bucket in buckets)
        for marker in markers:
            gm.graph.erase_node(marker)
        done = f"{len(markers)} gradients of {given:,} bytes are sent as {sent:,} bytes in {len(buckets)} buckets"
        return PassResult(changed=len(markers), done=(done,))

    def _fill(self, markers: list[Node], ctx: PassContext) -> list[_Bucket]:
        """Return buckets in the order in which they are full."""
        filled: dict[str, list[_Bucket]] = defaultdict(list)
        for marker in markers:
            group = bound_arguments(marker)["group"]
            buckets = filled[group]
            if not buckets or sum(map(_bytes, buckets[-1].markers)) + _bytes(marker) > self.bucket_bytes:
                buckets.append(_Bucket.over(group, marker, ctx))
            buckets[-1].markers.append(marker)
        return sorted((bucket for buckets in filled.values() for bucket in buckets), key=lambda each: each.last)


def _one_each(markers: list[Node]) -> list[Node]:
    """Return one marker for each momentum, with the sum of all its gradients, at the place of the last one."""
    same: dict[Node, list[Node]] = defaultdict(list)
    for marker in markers:
        same[bound_arguments(marker)["momentum"]].append(marker)
    for *others, last in same.values():
        total: Node = bound_arguments(last)["grad"]
        for other in others:
            grad = bound_arguments(other)["grad"]
            dtype = torch.promote_types(fake_value(total).dtype, fake_value(grad).dtype)
            total = emit(last, aten.add.Tensor, cast(last, total, dtype), cast(last, grad, dtype))
            _give_nothing(other)
        last.args = (total, *last.args[1:])
    return sorted(of[-1] for of in same.values())


def _give_nothing(marker: Node) -> None:
    """Remove a marker whose gradient another one includes: autograd adds the results of both."""
    for result in list(marker.users):
        value = fake_value(result)
        how = {"dtype": value.dtype, "device": value.device}
        replace_and_erase(result, emit(marker, aten.full.default, list(value.shape), 0, **how))
    marker.graph.erase_node(marker)


def _bytes(marker: Node) -> int:
    grad = fake_value(bound_arguments(marker)["grad"])
    return int(grad.numel()) * grad.element_size()


@dataclass
class _Bucket:
    """Gradients that are sent together, with the state between the phases.

    Attributes:
        ranks: The ranks of the reduction.
        by_messages: True if gloo's messages are used.
        recording: Writes the phases.
        markers: One a parameter, in program order.
        sent: For each, the tensor that this rank sends.
        averaged: For each, the tensor that the owner of a chunk sends.
        travels: Ends the running collective.
    """

    ranks: Ranks
    by_messages: bool
    recording: Recording
    markers: list[Node] = field(default_factory=list)
    sent: list[Compressed] = field(default_factory=list)
    averaged: list[Compressed] = field(default_factory=list)
    travels: Callable[[], Tensor] = field(init=False)

    @staticmethod
    def over(group: str, first: Node, ctx: PassContext) -> _Bucket:
        """Return an empty bucket, which `first` will join."""
        axis = ctx.axis(group) if group else None
        is_on_host = fake_value(bound_arguments(first)["momentum"]).device.type == "cpu"
        by_messages = axis is not None and axis.backend == "gloo" and is_on_host
        return _Bucket(Ranks(group, 1 if axis is None else axis.size), by_messages, Recording(first))

    @property
    def last(self) -> Node:
        """The node of its last gradient."""
        return self.markers[-1]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends: a chunk to each other owner, and its own chunk to all."""
        return 2 * (self.ranks.size - 1) * sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Bytes of each gradient's chunk."""
        return [int(each.packed.shape[1]) for each in self.sent]

    def send(self) -> None:
        """Compress each gradient when it is ready, and start the exchange after the last."""
        for marker in self.markers:
            self.recording.place = marker
            inputs = [bound_arguments(marker)[name] for name in ("grad", "momentum", "worker_error", "coefficients")]
            made = self.recording.run(partial(take_in_gradient, ranks=self.ranks.size), *inputs)
            self.sent.append(made)
        start = EXCHANGES["exchange_by_messages" if self.by_messages else "all_to_all_single"]
        self._start(start, self.sent)

    def average(self, place: Node) -> None:
        """Average the received values at the owner of a chunk, and start the gather."""
        for marker, received in zip(self.markers, self._arrived(place), strict=True):
            n, error = self._chunk(marker), bound_arguments(marker)["owner_error"]
            made = self.recording.run(lambda own, rows=received, n=n: average_chunk(rows, own, n), error)
            self.averaged.append(made)
        self._start(GATHERS["gather_by_messages" if self.by_messages else "all_gather_into_tensor"], self.averaged)

    def finish(self, place: Node) -> None:
        """Assemble the averaged momenta. Readers of the markers' results read them, and the errors."""
        for number, (marker, gathered) in enumerate(zip(self.markers, self._arrived(place), strict=True)):
            call, n = bound_arguments(marker), self._chunk(marker)
            shape, splits = fake_value(call["momentum"]).shape, call["splits_rows"]
            full = self.recording.run(lambda rows=gathered, n=n, shape=shape: put_together(rows, shape, n))
            own = full
            if splits:
                rows = call["shard_shape"]
                own = self.recording.run(lambda full=full, rows=rows: rows_of(full, rows, self.ranks))
            results = (own, full, self.sent[number].error, self.averaged[number].error)
            for result in list(marker.users):
                index = result.args[1]
                assert result.target is operator.getitem and isinstance(index, int)
                replace_and_erase(result, self.recording.node(results[index]))
        for node in self.recording.made:
            come_from(node, self.last)

    def _chunk(self, marker: Node) -> int:
        return chunk_rows(int(fake_value(bound_arguments(marker)["momentum"]).numel()), self.ranks.size)

    def _start(self, start: Exchange | Gather, compressed: list[Compressed]) -> None:
        """Start a collective of messages that are side by side."""

        def begin() -> Callable[[], Tensor]:
            messages = [each.packed for each in compressed]
            together = messages[0] if len(messages) == 1 else torch.cat(messages, 1)
            return start(together, self.ranks).finish if self.ranks.size > 1 else lambda: together

        self.travels = self.recording.run(begin)

    def _arrived(self, place: Node) -> list[Tensor]:
        """Wait for it before `place`; return the messages of each gradient."""
        self.recording.place = place
        together = self.recording.run(self.travels)
        if len(self._sizes) == 1:
            return [together]
        ends = list(accumulate(self._sizes))
        return [
            self.recording.run(lambda start=end - size, end=end: together[:, start:end])
            for size, end in zip(self._sizes, ends, strict=True)
        ]
