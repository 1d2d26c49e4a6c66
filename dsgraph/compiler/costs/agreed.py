"""The cost model from calibrations, the same on every rank of a mesh."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.passes import CostModel, MeshAxis
from dsgraph.passes.analysis.hardware import Device, Link, LinkTable, default_links, device_and_tiers, product_of
from dsgraph.passes.ir.collectives import collective_steps
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.mesh import mesh_axes

from .calibration_record import CalibrationRecord, LinkRecord, from_text, to_text
from .host import device_name, host_name
from .store import CalibrationError, load

DEFAULTS = "defaults"


@dataclass(frozen=True)
class KnownCosts:
    """The cost data of a mesh, the same on all its ranks.

    Attributes:
        calibration: Of the first rank's host and device; None when there is none.
        threads: Number of threads on which the first rank computes on a CPU.
        hosts: Rank -> host. Ranks that do not exist have none.
        device_type: Device type of the mesh.
        device: Name of the first rank's device.
    """

    calibration: CalibrationRecord | None
    threads: int
    hosts: Mapping[int, str]
    device_type: str
    device: str

    @staticmethod
    def of(agreement: Agreement, device_type: str) -> KnownCosts:
        """Return the costs that the first rank of an agreement knows. All its ranks call it.

        A calibration that cannot be used is ignored with a warning on the first rank.

        Raises:
            RanksDisagreeError: A rank did not arrive in time.
        """
        leader = agreement.ranks[0]
        mine = {"host": host_name(), "threads": torch.get_num_threads(), "calibration": None, "device": ""}
        if dist.get_rank() == leader:
            mine["calibration"], mine["device"] = _own_calibration(device_type), device_name(device_type)
        texts = agreement.exchange("where they run", json.dumps(mine))
        said = {rank: json.loads(text) for rank, text in texts.items()}
        found = said[leader]["calibration"]
        return KnownCosts(
            calibration=None if found is None else from_text(found),
            threads=said[leader]["threads"],
            hosts=MappingProxyType({rank: each["host"] for rank, each in said.items()}),
            device_type=device_type,
            device=said[leader]["device"],
        )

    def model(self, mesh: DeviceMesh, axes: Sequence[MeshAxis]) -> CostModel:
        """Return the cost model for a mesh: measurements of the first rank's device and groups, else defaults.

        Args:
            mesh: The mesh.
            axes: Those of its axes that a graph uses.
        """
        record = self.calibration
        if record is None:
            return CostModel.default(axes, device_type=self.device_type, device_name=self.device)
        links = {axis.group: self._links(record, mesh, axis) for axis in axes}
        _, tiers = device_and_tiers(self.device_type, name=self.device)
        measured = {each.tier: Link(each.latency_s, each.bytes_per_s) for each in record.tiers}
        known = MappingProxyType({**tiers, **measured})
        return CostModel(self._device(record), tuple(axes), MappingProxyType(links), known)

    def describe(self, mesh: DeviceMesh, axes: Sequence[MeshAxis]) -> str:
        """Return one line that says if costs are measured, where and when, and names the axes whose links are not."""
        record = self.calibration
        if record is None:
            host = next(iter(self.hosts.values()))
            return f"{DEFAULTS}{self._product()}: {host} has no calibration (dsgraph calibrate makes one)"
        line = f"measured on {record.host} ({record.device}), {record.time}"
        unknown = [axis.name for axis in axes if not self._measured(record, mesh, axis)]
        by_default = [f"links of {', '.join(unknown)}"] if unknown else []
        if self.device_type == "cuda" and not record.tiers:
            by_default.append("link to the host")
        return line + (f"; {' and '.join(by_default)} by default" if by_default else "")

    def _product(self) -> str:
        """Return the device whose data sheet is used, as a part of a sentence; empty on a CPU."""
        if self.device_type == "cpu":
            return ""
        product = product_of(self.device)
        return f" for {product}" if product else f" for an A100-class GPU, as {self.device!r} is not known"

    def _device(self, record: CalibrationRecord) -> Device:
        # A CPU's matrix products take as many times less as there are more threads; memory does not.
        scale = self.threads / record.threads if record.threads else 1.0
        rates = {dtype: rate * scale for dtype, rate in sorted(record.flops_per_s.items())}
        usual = rates.get("bfloat16", next(iter(rates.values())))
        others = tuple((dtype, rate) for dtype, rate in rates.items() if rate != usual)
        return Device(usual, record.bytes_per_s, record.kernel_s, others)

    def _links(self, record: CalibrationRecord, mesh: DeviceMesh, axis: MeshAxis) -> LinkTable:
        table = default_links(axis.backend, device_type=self.device_type)
        kinds = dict(table.kinds)
        for measured in self._measured(record, mesh, axis):
            steps = collective_steps(measured.kind, measured.ranks, trees=table.trees)
            if steps:
                kinds[measured.kind] = Link(measured.latency_s / steps, measured.bytes_per_s, measured.delay)
        return LinkTable(table.usual, tuple(sorted(kinds.items())), table.trees)

    def _measured(self, record: CalibrationRecord, mesh: DeviceMesh, axis: MeshAxis) -> list[LinkRecord]:
        """Return the measurements of the groups most like the axis's: same backend, spread alike, nearest in size."""
        is_spread = self._is_spread(mesh, axis)
        alike = [link for link in record.links if link.backend == axis.backend and (link.hosts > 1) == is_spread]
        groups = sorted({link.group for link in alike}, key=lambda group: (abs(math.log(group[1] / axis.size)), group))
        return [link for link in alike if link.group == groups[0]]

    def _is_spread(self, mesh: DeviceMesh, axis: MeshAxis) -> bool:
        """Return whether the first rank's group of an axis spans several hosts."""
        number = [found.group for found in mesh_axes(mesh)].index(axis.group)
        first_along = mesh.mesh.movedim(number, 0).flatten(1)[:, 0] if mesh.ndim > 1 else mesh.mesh
        return len({self.hosts[rank] for rank in first_along.tolist() if rank in self.hosts}) > 1


def known_costs(agreement: Agreement, device_type: str) -> KnownCosts:
    """Return the costs of a type of device that the ranks of an agreement know.

    They exchange them before their first compile.
    """
    return agreement.remember(f"costs of {device_type}", lambda: KnownCosts.of(agreement, device_type))


def _own_calibration(device_type: str) -> str | None:
    """Return this rank's calibration as text; None if there is none that can be used."""
    try:
        record = load(host_name(), device_name(device_type))
    except CalibrationError as error:
        warnings.warn(f"default costs are used, because the calibration {error}", stacklevel=2)
        return None
    return None if record is None else to_text(record)
