from __future__ import annotations

import pytest

from dsgraph.compat.torch_version import check_torch_version


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0a0+git123"])
def test_supported(version):
    check_torch_version(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0+cpu", "1.13.1"])
def test_unsupported_is_one_clear_sentence(version):
    with pytest.raises(
        ImportError, match=rf"dsgraph needs torch >=2.11,<2.14 and found {version.replace('+', '.')}: pip install"
    ):
        check_torch_version(version)
