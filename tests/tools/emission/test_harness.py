from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsgraph.passes.analysis.hardware import GPUS
from dsgraph.passes.compat import FakeTensorMode
from dsgraph.tools.emission import harness
from dsgraph.tools.emission.harness import check_versions, defined_kernels, fake_device, fake_driver, fake_ranks
from dsgraph.utils.errors import EmissionError


def _state() -> dict[str, Any]:
    """Return all state that the harness could change."""
    import torch._dynamo.device_interface as interfaces
    import triton
    from torch._inductor.codegen import common

    common.init_backend_registration()
    return {
        "cuda": dict(vars(torch.cuda)),
        "version": torch.version.cuda,
        "interfaces": dict(interfaces.get_registered_device_interfaces()),
        "driver": triton.runtime.driver._active,
        "codegen": dict(common.device_codegens),
        "modes": torch._C._len_torch_function_stack(),
        "init": (dist.init_process_group, dist.distributed_c10d.init_process_group),
        "joined": dist.is_initialized(),
    }


@pytest.mark.parametrize("arch", GPUS)
def test_while_it_lasts_the_device_is_there(arch):
    from torch._inductor.runtime.hints import DeviceProperties

    with fake_device(arch), defined_kernels(lambda *_: None):
        assert torch.cuda.is_available()
        properties = DeviceProperties.create(torch.device("cuda", 0))
        assert f"sm_{properties.cc}" == arch
        assert properties.multi_processor_count == GPUS[arch].multiprocessors


@pytest.mark.parametrize(
    "enter",
    [
        lambda: fake_device("sm_90"),
        lambda: fake_driver("sm_80"),
        lambda: defined_kernels(lambda *_: None),
        lambda: fake_ranks(4),
    ],
    ids=["device", "driver", "kernels", "ranks"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(enter, fails):
    before = _state()
    try:
        with enter():
            assert _state() != before
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert _state() == before
    assert not torch.cuda.is_available()
    from torch.utils._triton import has_triton

    assert not has_triton()  # remembered for good, had it been asked for within


def test_functions_that_switch_to_the_device_work_on_fake_tensors_of_it():
    with fake_device("sm_90"), FakeTensorMode():
        x = torch.empty(4, 6, device="cuda:0")
        assert x.copy_(torch.empty(4, 6, device="cuda:0")) is x
        inverted = ~(x > 0)
        assert (inverted.device.type, inverted.dtype) == ("cuda", torch.bool)
        part = x[1:3, ::2]
        assert (part.shape, part.stride(), part.device.type) == ((2, 3), (6, 2), "cuda")
        with pytest.raises(RuntimeError, match="must match the size"):
            x.copy_(torch.empty(5, 6, device="cuda:0"))


def test_ranks_that_do_not_exist():
    with fake_ranks(4):
        torch.distributed.init_process_group("nccl", init_method="tcp://nowhere:1", rank=7, world_size=9)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 4, "fake")
        dist.all_reduce(torch.ones(2))
    assert not dist.is_initialized()


@pytest.mark.parametrize(("versions", "package"), [(("2.12.1", "3.9.0"), "torch"), (("2.13.0+cpu", "3.8.1"), "triton")])
def test_versions_that_were_not_checked_are_refused(versions, package):
    with pytest.raises(
        EmissionError, match=rf"takes internals of {package} that were checked on .* alone, and this is"
    ):
        check_versions(*versions)


def test_the_device_is_refused_on_such_a_version(monkeypatch):
    monkeypatch.setattr(harness, "CHECKED", {"torch": ("1.0.",), "triton": ("3.9.",)})
    before = _state()
    with pytest.raises(EmissionError, match=r"checked on 1\.0\.\* alone"), fake_device("sm_90"):
        pass
    assert _state() == before
