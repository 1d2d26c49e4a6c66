from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from dsgraph.compat.torch_version import PRIVATE_APIS, check_torch_version


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0a0+git123", "2.15.1+cu130"])
def test_a_supported_version_is_not_searched(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch_version(version, needed=["torch._none:of_these"])


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1"])
def test_an_older_version_is_one_clear_sentence(version):
    with pytest.raises(
        ImportError,
        match=rf'dsgraph needs torch 2.11 or newer, but torch {version} is installed: pip install "torch>=2.11"',
    ):
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0+cpu"])
def test_a_newer_version_is_one_warning_that_names_the_tested_ones(version):
    with pytest.warns(UserWarning, match=r"dsgraph was tested with torch 2.11 to 2.15") as caught:
        check_torch_version(version)
    (message,) = [
        str(item.message) for item in caught if "dsgraph" in str(item.message)
    ]  # importing Inductor warns, too
    assert f"torch {version} is newer" in message


@pytest.mark.parametrize(
    "missing", ["torch._dynamo.no_such_module:function", "torch._guards:NoSuchClass", "torch._guards:TracingContext.no"]
)
def test_a_newer_version_that_lacks_a_private_api_is_an_error_that_names_it(missing):
    with pytest.raises(ImportError, match=rf"torch 2.11 to 2.15 .* 2.16.0, which has no {missing.replace(':', '.')}: "):
        check_torch_version("2.16.0", needed=[*PRIVATE_APIS, missing])


def test_the_version_is_checked_before_anything_else_of_torch_is_used():
    program = """
import torch
torch.__version__ = "2.99.0"
del torch._guards.TracingContext.try_get
import dsgraph.api
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: dsgraph was tested with torch 2.11 to 2.15"), done.stderr
    assert "torch._guards.TracingContext.try_get" in last
