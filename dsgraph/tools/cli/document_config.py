"""Writes `docs/reference/config.md`: `python -m dsgraph.tools.cli.document_config docs/reference/config.md`."""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.key import COMPILED, MODEL_DEVICE, Entry, Needs, name_of, section_of, spellings_of
from dsgraph.engine.config.other_keys import NOT_YET, WITHOUT_EFFECT

_HEAD = """\
# The engine's configuration

`python -m dsgraph.tools.cli.document_config docs/reference/config.md` writes this page from the classes that read
the file.

`dsgraph.initialize(config=...)` takes the path of a JSON file, or a dict. Names, nesting and defaults are DeepSpeed's;
the section `dsgraph` is an addition. Two of the three batch sizes determine the third: `train_batch_size` =
`train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x ranks. `dsgraph config FILE` prints the effect of a
file.

The last column of a table lists what a key sets and needs:

- the option of the backend ([options.md](options.md)) or the argument of `dsgraph.partition` that it sets; other keys
  take effect in the engine
- other keys that it needs: without them the engine raises an error, or prints that the key has no effect
- the value of `"auto"` with `DsgraphTrainer`; elsewhere it is the default, except for what `DsgraphAccelerator` fills
- "`stages`": it is supported with pipeline stages ([`parallel.pp`](#parallel) above 1), which refuse other keys
"""


def main() -> None:
    """Write the page to the path given."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dsgraph.tools.cli.document_config PATH")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD, _table(EngineConfig)]
    parts += _sections(EngineConfig, "")
    parts += ["## DeepSpeed keys that have no effect\n", "The engine accepts them, and prints the reason once.\n"]
    parts.append(_rows(("key", "why"), [(f"`{key}`", reason) for key, reason in WITHOUT_EFFECT.items()]))
    parts += ["## DeepSpeed keys that raise an error\n", "Their feature is not supported yet.\n"]
    parts.append(_rows(("key", "what it is"), [(f"`{key}`", what) for key, what in NOT_YET.items()]))
    return "\n".join(parts)


def _sections(within: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in within.model_fields.items():
        section = section_of(field)
        if section is not None:
            yield from (f"## `{path}{name}`\n", f"{inspect.cleandoc(section.__doc__ or '')}\n")
            if _conditions(field):
                yield f"The section sets and needs: {_conditions(field)}.\n"
            if section.model_fields:
                yield _table(section)
            yield from _sections(section, f"{path}{name}.")


def _table(section: type[BaseModel]) -> str:
    rows = [
        (f"`{spellings_of(name, field)[0]}`", _kind(field.annotation), _default(field), field.description or "")
        + (_conditions(field),)
        for name, field in section.model_fields.items()
        if section_of(field) is None
    ]
    return _rows(("key", "type", "default", "", "sets and needs"), rows)


def _conditions(field: FieldInfo) -> str:
    """Return what the entry of a field says about its effect, in the words of the page's first section."""
    entry = field.json_schema_extra
    if not isinstance(entry, Entry):
        return ""
    parts = [f"option `{entry.option}`"] if entry.option else []
    parts += [f"argument `{entry.argument}`"] if entry.argument else []
    parts += [_needs(needs) for needs in entry.needs if needs is not COMPILED]
    if isinstance(entry.auto, Mapping):
        parts += [f'`{name}` "auto": {name_of(auto)}' for name, auto in entry.auto.items()]
    elif entry.auto is not None:
        parts.append(f'"auto": {name_of(entry.auto)}')
    return "; ".join([*parts, *["`stages`"] * entry.stages])


def _needs(needs: Needs) -> str:
    own = "" if needs.only is None else f"{json.dumps(needs.only)} "
    other = needs.key.removeprefix(".")
    return f"{own}needs {other if other == MODEL_DEVICE else f'`{other}`'} {needs.values_text}".rstrip()


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        kind, *others = get_args(annotation)
        takes_more = any(isinstance(other, BeforeValidator) for other in others)
        return "object" if takes_more else _kind(kind)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return names.get(annotation) or ("list" if get_origin(annotation) is tuple else "object")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    words = {True: "`true`", False: "`false`", None: ""}
    return words[value] if isinstance(value, bool | None) else f"`{value!r}`".replace("'", '"')


def _rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell != "---" else cell for cell in row) + "|\n" for row in cells)


if __name__ == "__main__":
    main()
