"""The range of torch releases that dsgraph supports."""

from __future__ import annotations

import torch

MINIMUM_TORCH = (2, 11)

UNSUPPORTED_TORCH = (2, 14)


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch that dsgraph was not checked on.

    Raises:
        ImportError: `version` is outside the supported range.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not MINIMUM_TORCH <= found < UNSUPPORTED_TORCH:
        low, high = (".".join(map(str, bound)) for bound in (MINIMUM_TORCH, UNSUPPORTED_TORCH))
        raise ImportError(
            f'dsgraph needs torch >={low},<{high} and found {version}: pip install "torch>={low},<{high}"'
        )
