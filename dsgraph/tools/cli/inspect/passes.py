"""`dsgraph passes`: the list of passes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table
from dsgraph.utils.nearest import nearest

if TYPE_CHECKING:
    from dsgraph.passes import GraphPass

_DESCRIPTION = """\
List every pass of dsgraph in the order in which passes run: its phase, whether the default pipeline contains it, its
contract (what it requires and provides), and its options. With a name, describe one pass: its contract, its options
with their defaults, and an example graph before and after."""

_CONTRACT = ("requires", "provides", "conflicts")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="name of a pass: insert_zero_collectives or InsertZeroCollectives"
    )
    parser.add_argument(
        "--pipeline",
        metavar="MODULE:OBJECT",
        help="also list the passes of this pipeline, list of passes, pass, or function that returns one",
    )


def _run(arguments: argparse.Namespace) -> Answer:
    from dsgraph.passes import Phase

    described = [*_own_passes(), *(_users_passes(arguments.pipeline) if arguments.pipeline else [])]
    known = {item["name"]: item for item in sorted(described, key=lambda item: Phase(item["phase"]))}
    if arguments.name is None:
        return Answer(_table(list(known.values())), list(known.values()))
    for item in known.values():
        if arguments.name in (item["name"], item["class"]):
            return Answer(_page(item), item)
    names = [*known, *(item["class"] for item in known.values())]
    raise CommandError(f"unknown pass {arguments.name!r}{nearest(arguments.name, names)}; known: {', '.join(known)}")


def _own_passes() -> list[dict[str, Any]]:
    """Describe each built-in pass: those of the default pipeline in its order, then the others."""
    from dsgraph.compiler.build_pipeline import built_in_passes, default_pipeline

    default = default_pipeline()
    used = {type(item) for item in default}
    others = [item for item in built_in_passes() if item not in used]
    return [
        *(describe(type(item), item, origin="default") for item in default),
        *(describe(item, None, origin="optional") for item in others),
    ]


def _users_passes(text: str) -> list[dict[str, Any]]:
    """Return the passes that `module:object` names."""
    from dsgraph.compiler.build_pipeline import default_pipeline
    from dsgraph.passes import GraphPass, PassError, Pipeline

    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise CommandError(f"--pipeline is {text!r}; it takes MODULE:OBJECT, such as mymodel.passes:PIPELINE")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
        if not isinstance(found, (GraphPass, Pipeline)) and callable(found):
            found = found()
        if isinstance(found, GraphPass):
            found = [found]
        pipeline = Pipeline(_only_passes(found))
    except (PassError, CommandError) as error:
        raise CommandError(f"--pipeline {text}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does
        raise CommandError(f"--pipeline {text}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
    default = set(default_pipeline())
    return [describe(type(item), item, origin=text) for item in pipeline if item not in default]


def _only_passes(found: object) -> Iterable[GraphPass]:
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise CommandError(f"it is {found!r}, and should be a pipeline, a list of passes or a pass")
    return found


def describe(kind: type[GraphPass], instance: GraphPass | None, *, origin: str) -> dict[str, Any]:
    """Return all there is to know of a pass.

    Args:
        kind: Its class.
        instance: Itself, where there is one: a pass made of a function has its contract in the instance.
        origin: "default", "optional", or where the user keeps it.
    """
    source: Any = instance if instance is not None else kind
    function = getattr(instance, "function", None)
    options = [] if function is not None else [_option(item, instance) for item in dataclasses.fields(kind)]
    return {
        "name": instance.name if instance is not None else kind.name.fget(kind.__new__(kind)),  # type: ignore[attr-defined]
        "class": kind.__name__ if function is None else function.__qualname__,
        "module": kind.__module__ if function is None else function.__module__,
        "origin": origin,
        "phase": source.phase.value,
        "graph": source.graph,
        **{name: sorted(getattr(source, name)) for name in _CONTRACT},
        "flags": {name: getattr(source, name) for name in _flags(kind)},
        "options": options,
        "documentation": inspect.cleandoc((function or kind).__doc__ or ""),
    }


def _flags(kind: type) -> list[str]:
    """Return the names of the boolean properties of a pass (`keeps_gathers`, ...), those of `GraphPass` first."""
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        names.update(dict.fromkeys(name for name, value in vars(base).items() if isinstance(value, bool)))
    own = {item.name for item in dataclasses.fields(kind)} if kind.__name__ != "FunctionPass" else set()
    return [name for name in names if not name.startswith("_") and name not in own]


def _option(item: dataclasses.Field[Any], instance: GraphPass | None) -> dict[str, Any]:
    if item.default is not dataclasses.MISSING:
        default = repr(item.default)
    elif item.default_factory is not dataclasses.MISSING:
        default = repr(item.default_factory())
    else:
        default = None  # must be given
    value = repr(getattr(instance, item.name)) if instance is not None else default
    kind = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
    return {"name": item.name, "type": kind, "default": default, "value": value}


def _table(items: list[dict[str, Any]]) -> str:
    rows = [
        [
            item["name"],
            item["phase"],
            item["origin"],
            "\n".join(
                [
                    *(f"{name} {', '.join(item[name])}" for name in _CONTRACT if item[name]),
                    *(name for name, value in item["flags"].items() if value),
                ]
            ),
            "\n".join(_spell(option) for option in item["options"]),
        ]
        for item in items
    ]
    return table(rows, ["pass", "phase", "in", "contract", "options"])


def _page(item: dict[str, Any]) -> str:
    facts = [
        ["phase", item["phase"]],
        ["graph", item["graph"]],
        ["from", f"{item['module']}.{item['class']}, {item['origin']}"],
        *([name, ", ".join(item[name]) or "nothing"] for name in _CONTRACT),
        *([name, "yes" if value else "no"] for name, value in item["flags"].items()),
        ["options", ", ".join(_spell(option) for option in item["options"]) or "none"],
    ]
    return f"{item['name']}\n\n{table(facts)}\n\n{item['documentation']}"


def _spell(option: dict[str, Any]) -> str:
    text = f"{option['name']}: {option['type']}"
    if option["default"] is not None:
        text += f" = {option['default']}"
    return text if option["value"] == option["default"] else f"{text} (here {option['value']})"


COMMAND = Command("passes", "list the passes, or describe one", _DESCRIPTION, _configure, _run)
