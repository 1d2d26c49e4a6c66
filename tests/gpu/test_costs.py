"""The figures of a GPU in the cost model: those of its data sheet, and those that `dsgraph calibrate` measures."""

from __future__ import annotations

import pytest
import torch

from dsgraph.compiler.costs.host import device_name
from dsgraph.passes.analysis.hardware import PRODUCTS, product_of
from dsgraph.tools.calibration.device import measure_device

pytestmark = [pytest.mark.gpu, pytest.mark.cuda, pytest.mark.alone]


def test_data_sheets_are_near_measurements(device, record):
    measured, name = measure_device("cuda", together=lambda: None), device_name("cuda")
    record(device=name, measured=measured)
    assert measured.host is not None and measured.host.bytes_per_s > 1e9
    known = product_of(name)
    if known is None:
        pytest.skip(f"{name} is not in the table of GPUs")
    sheet = PRODUCTS[known].device
    rates = {dtype: sheet.rate(getattr(torch, dtype)) for dtype in measured.flops_per_s}
    assert measured.flops_per_s == pytest.approx(rates, rel=0.5)
    assert measured.bytes_per_s == pytest.approx(sheet.bytes_per_s, rel=0.5)
