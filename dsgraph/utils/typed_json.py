"""JSON that keeps types: tuples, numeric keys, tensors, NaN.

Values that JSON supports are written unchanged. All others are objects with the key "!", which names the kind:

    (1, 2)      {"!": "tuple", "items": [1, 2]}
    {4: 1}      {"!": "dict", "items": [[4, 1]]}

Reading runs no code from a file: it supports the kinds of this module, and refuses all others by name.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointError

_KIND = "!"
_PLAIN = (type(None), bool, int, str)
_ORDERED: dict[type, str] = {
    **{list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size", deque: "deque"}
}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
_NUMBERS = "biufc"  # kinds of numpy dtypes that are stored as raw bytes


def encode(value: Any, where: str) -> Any:
    """Return a value in a form that `json.dumps` accepts.

    Args:
        value: `None`, numbers, text, bytes, paths, tensors, numpy arrays and scalars, and containers of these: `dict`,
            `OrderedDict`, `Counter`, `list`, `tuple`, `set`, `frozenset`, `deque`.
        where: Name of the value for messages, such as "client_state".

    Raises:
        CheckpointError: The value, or something in it, is of another type, or contains itself; the message says where.
    """
    return _encode(value, where, ())


def _encode(value: Any, where: str, within: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is float and math.isfinite(value)):
        return value
    if id(value) in within:
        raise CheckpointError(f"{where} contains itself, which a checkpoint cannot store")
    inner = (*within, id(value))
    if kind in _ORDERED:
        items = [_encode(item, f"{where}[{number}]", inner) for number, item in enumerate(value)]
        more = {"most": value.maxlen} if kind is deque else {}
        return items if kind is list else {_KIND: _ORDERED[kind], "items": items, **more}
    if kind in _MAPPINGS:
        pairs = [
            [_encode(k, f"a key of {where}", inner), _encode(v, f"{where}[{k!r}]", inner)] for k, v in value.items()
        ]
        is_plain = kind is dict and _KIND not in value and all(type(key) is str for key in value)
        return dict(pairs) if is_plain else {_KIND: _MAPPINGS[kind], "items": pairs}
    return _encode_leaf(value, where)


def _encode_leaf(value: Any, where: str) -> dict[str, Any]:
    kind = type(value)
    if kind is float:
        return {_KIND: "float", "value": repr(value)}
    if kind is complex:
        return {_KIND: "complex", "value": [repr(value.real), repr(value.imag)]}
    if kind in (bytes, bytearray):
        return {_KIND: kind.__name__, "value": _text(value)}
    if isinstance(value, PurePath) and kind is type(Path()):
        return {_KIND: "path", "value": str(value)}
    if kind is torch.dtype:
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_KIND: "device", "value": str(value)}
    if kind is Tensor:
        return _encode_tensor(value, where)
    is_array = kind is np.ndarray or isinstance(value, np.generic)
    if is_array and value.dtype.kind in _NUMBERS:
        array = np.ascontiguousarray(value)
        content = {"dtype": array.dtype.str, "shape": list(np.shape(value)), "value": _text(array.tobytes())}
        return {_KIND: "array" if kind is np.ndarray else "scalar", **content}
    raise CheckpointError(
        f"{where} is a {kind.__qualname__}, which a checkpoint cannot store: it stores numbers, text, bytes, paths, "
        "tensors, arrays, and dicts, lists, tuples and sets of them"
    )


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"{where} is a tensor that is sparse, quantized or on the meta device: store a dense tensor with values"
        )
    if value.requires_grad:
        raise CheckpointError(f"{where} is a tensor that requires a gradient: store its .detach()")
    plain = value.cpu().contiguous().resolve_conj().resolve_neg()
    content = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return {_KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "value": _text(content)}


def decode(value: Any) -> Any:
    """Return the value that `encode` encoded. Tensors are loaded into host memory.

    Raises:
        CheckpointError: The value is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(item) for key, item in value.items()}
    kind = value[_KIND]
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise CheckpointError(
            f"it contains a value of the kind {kind!r}, which this version of dsgraph does not support"
        )
    try:
        return _DECODERS[kind](value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a value of the kind {kind!r} in it is damaged: {error}") from error


def _items(make: Callable[[Iterable[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda value: make([decode(item) for item in value["items"]])


def _pairs(make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda value: make({decode(key): decode(item) for key, item in value["items"]})


def _decode_tensor(value: dict[str, Any]) -> Tensor:
    dtype = _dtype(value["dtype"])
    content = bytearray(_bytes(value["value"]))
    flat = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(value["shape"])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return found


def _decode_array(value: dict[str, Any]) -> Any:
    array = np.frombuffer(bytearray(_bytes(value["value"])), dtype=np.dtype(value["dtype"]))
    return array.reshape(value["shape"])


def _text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tuple": _items(tuple),
    "set": _items(set),
    "frozenset": _items(frozenset),
    "size": _items(torch.Size),
    "deque": lambda value: deque([decode(item) for item in value["items"]], value["most"]),
    "dict": _pairs(dict),
    "ordered_dict": _pairs(OrderedDict),
    "counter": _pairs(Counter),
    "float": lambda value: float(value["value"]),
    "complex": lambda value: complex(*map(float, value["value"])),
    "bytes": lambda value: _bytes(value["value"]),
    "bytearray": lambda value: bytearray(_bytes(value["value"])),
    "path": lambda value: Path(value["value"]),
    "dtype": lambda value: _dtype(value["value"]),
    "device": lambda value: torch.device(value["value"]),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda value: _decode_array(value)[()],
}
