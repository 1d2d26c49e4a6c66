"""`dsgraph bisect`: the pass, and the node, that changes what a program computes."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from dsgraph.launch.processes import describe_exit
from dsgraph.launch.script import add_arguments, find_script, run_script
from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table
from dsgraph.tools.dumping.units import spelled

_DESCRIPTION = """\
Run a Python script and find the first pass, and the first node, that changes an output, a gradient or a buffer on any
rank. At its first call, each graph that dsgraph compiles is compared with the same graph without passes (codegen
"eager"): first with one pass, then with two, and so on, last with the script's own options. Each version gets copies of
the same inputs, the same random numbers and the same gradients of its outputs; the script continues with the version
without passes. A tensor is wrong if an element differs by more than (rtol + atol) times the largest magnitude in the
tensor; gradients may differ by another rtol times the largest gradient.
Exit code 1: a pass or the code generator changes the results, or the script failed."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    for name in ("rtol", "atol"):
        parser.add_argument(
            f"--{name}", type=_tolerance, metavar="X", help=f"{name} (default: the one of torch.testing for the dtype)"
        )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; it takes a number >= 0")
    return value


def _run(arguments: argparse.Namespace) -> Answer:
    script = find_script(arguments.script, arguments.module)
    with tempfile.TemporaryDirectory(prefix="dsgraph-bisect-") as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps({"rtol": arguments.rtol, "atol": arguments.atol}))
        code = run_script(
            script,
            arguments.rest,
            nproc=arguments.nproc,
            environment={"DSGRAPH_BISECT": name, "DSGRAPH_DUMP": ""},
            quiet=arguments.json,
        )
        results = [json.loads(path.read_text()) for path in folder.glob("rank*/graph*.json")]
    if not results and code == 0:
        raise CommandError("nothing to compare: the script has compiled no graph with backend='dsgraph'")
    return report(results, code)


def report(results: list[dict[str, Any]], code: int) -> Answer:
    """Return the findings of all ranks.

    Args:
        results: What each rank wrote of each graph.
        code: The script's exit code.
    """
    results = sorted(results, key=lambda result: (result["graph"], result["rank"]))
    numbers = sorted({result["graph"] for result in results})
    lines: list[str] = []
    for number in numbers:
        lines += [*_describe_graph([result for result in results if result["graph"] == number]), ""]
    wrong = [result for result in results if result["first"] is not None]
    compared = {result["graph"] for result in results if result["called"]}
    first = wrong[0]["first"] if wrong else None
    if first is not None and wrong[0]["unrepeatable"]:
        lines.append(f"graph {wrong[0]['graph']} gives different results when it runs twice: passes cannot be compared")
    elif first is not None:
        of_graph = [result for result in wrong if result["graph"] == wrong[0]["graph"]]
        failed = any(_step_of(first, result)["state"] == "failed" for result in of_graph)
        does = "fails on" if failed else "changes the results of"
        lines.append(f"{_name(first)} {does} graph {wrong[0]['graph']}")
    elif compared:
        lines.append(f"no pass changes the results of {len(compared)} graph{'s' if len(compared) > 1 else ''}")
    else:
        lines.append("no graph was called, so nothing was compared")
    if any(result.get("blocks") for result in results):
        lines.append('passes of the graph of the step were not compared: partition(blocks="none") makes it one graph')
    if code != 0:
        lines.append(f"the script failed ({describe_exit(code)})")
    found = wrong or code != 0 or not compared
    return Answer(
        "\n".join(lines), {"script_exit_code": code, "first": first, "graphs": results}, code=1 if found else 0
    )


def _describe_graph(results: list[dict[str, Any]]) -> list[str]:
    one = results[0]
    kind = "training" if one["training"] else "inference"
    ranks = f" on {one['world']} ranks" if one["world"] > 1 else ""
    blocks = f", of blocks {spelled(one['blocks'])}" if one.get("blocks") else ""
    head = f"graph {one['graph']}: {kind}{ranks}, {one['where'] or 'from an unknown line'}{blocks}"
    if not any(result["called"] for result in results):
        return [head, "  compiled, but no call of it finished"]
    rows = [
        _row([result["steps"][index] for result in results if index < len(result["steps"])])
        for index in range(max(len(result["steps"]) for result in results))
    ]
    lines = [head]
    if rows:
        lines += table(rows, ["", "phase", "largest difference", "allowed", "of"]).splitlines()
    for result in results:
        lines += _describe_first(result)
    return lines


def _row(steps: list[dict[str, Any]]) -> list[str]:
    """Return one pass on all ranks: the worst of them."""
    step = max(steps, key=_badness)
    state = {"ok": "", "off": "OFF ", "failed": "FAILED "}[step["state"]]
    worst = step.get("worst") or {"largest": 0.0, "allowed": 0.0, "what": ""}
    if step["state"] == "failed":
        return [state + step["pass"], step["phase"], "", "", step["problem"]]
    return [state + step["pass"], step["phase"], _number(worst["largest"]), _number(worst["allowed"]), worst["what"]]


def _badness(step: dict[str, Any]) -> tuple[int, float]:
    worst = step.get("worst")
    if worst is None or worst["largest"] is None:
        return ("ok", "off", "failed").index(step["state"]), math.inf
    allowed = worst["allowed"] or math.ulp(0.0)
    return ("ok", "off", "failed").index(step["state"]), worst["largest"] / allowed


def _describe_first(result: dict[str, Any]) -> list[str]:
    """Describe what one rank found about the first failing pass."""
    first = result["first"]
    if first is None or result["unrepeatable"]:
        return []
    step = _step_of(first, result)
    who = f"rank {result['rank']}: " if result["world"] > 1 else ""
    if step["state"] == "failed":
        return [f"{who}{_name(first)} fails: {step['problem']}"]
    if step["state"] == "ok":
        return [f"{who}no difference on this rank"]
    lines = [f"{who}after {_name(first)}, {step['count_off']} of {step['count']} results differ:"]
    lines += [f"  {off['what']} {_difference(off)}" for off in step["off"]]
    if step["count_off"] > len(step["off"]):
        lines.append("  ...")
    if first["node"] is not None:
        lines += _describe_node(first["node"])
    elif first["codegen"] == "eager":
        lines.append("  no single node: all nodes that existed before the pass keep their values")
    else:
        lines.append(f"  all passes are correct, but the code that {first['codegen']} generates is not")
    return lines


def _step_of(first: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return what one rank has recorded about the first failing pass."""
    key = ("pass", "phase", "codegen")
    return next(step for step in result["steps"] if all(step[name] == first[name] for name in key))


def _describe_node(node: dict[str, Any]) -> list[str]:
    where = f" at {node['where']}" if node["where"] else ""
    lines = [f"  first node: {node['node']} = {node['op']}, {node['graph']} graph{where}"]
    if node["code"]:
        lines.append(f"      {node['code']}")
    lines.append(f"    it {_difference(node['difference'])}")
    if node["arguments"] is not None:
        before, after = node["arguments"]
        lines += [f"    arguments before the pass: {before}", f"    arguments after it:        {after}"]
    for made in node["made"]:
        lines.append(f"    made by the pass: {made['node']} = {made['op']}({made['arguments']})")
    return lines


def _difference(found: dict[str, Any]) -> str:
    if found["note"]:
        return str(found["note"])
    if found["largest"] is None:
        return "is finite in one of the two versions and not finite in the other"
    return f"differs by up to {_number(found['largest'])}, allowed {_number(found['allowed'])}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _name(first: dict[str, Any]) -> str:
    if first["phase"] == "codegen":
        return f"code generator {first['codegen']}"
    return f"pass {first['pass']} ({first['phase']} graph)"


COMMAND = Command("bisect", "find the pass and the node that make a result wrong", _DESCRIPTION, _configure, _run, True)
