"""Write tables of measurements into the pages that show them.

    python -m benchmarks.tables README.md docs/benchmarks/zero.md

The numbers come from the files under `benchmarks/results/`. A page marks the position of a table with the two lines
`<!-- table: NAME -->` and `<!-- end -->`. The text between them is replaced; the rest of the page is unchanged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.report import Row, ratio

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

Columns = Mapping[str, tuple[str, str]]  # column header -> key in the row, format of the value

_MARKED = re.compile(r"(<!-- table: (?P<name>.+?) -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)

_SYSTEMS: Columns = {
    "system": ("system", ""),
    "ranks": ("world", ""),
    "step, s": ("step_s", ".2f"),
    "peak memory per rank, MB": ("peak_mb", ".0f"),
    "first step, s": ("first_step_s", ".1f"),
    "sent per step, MB": ("wire_mb", ".0f"),
    "loss": ("loss", ".6f"),
}
_LINKS: Columns = {
    "system": ("system", ""),
    "step, s": ("step_s", ".2f"),
    "bound, s": ("bound_s", ".2f"),
    "step / bound": ("step/bound", ".2f"),
    "peak memory per rank, MB": ("peak_mb", ".0f"),
    "sent per step, MB": ("wire_mb", ".0f"),
    "left the host, MB": ("link_mb", ".0f"),
}
_SCALING: Columns = {
    "layers": ("layers", ""),
    "ranks": ("ranks", ","),
    "compile, s": ("compile_s", ".1f"),
    "passes, s": ("passes_s", ".2f"),
    "share": ("share", ".1%"),
    "nodes, forward": ("forward_nodes", ","),
    "nodes, backward": ("backward_nodes", ","),
    "collectives": ("collectives", ","),
    "largest bucket, MB": ("bucket_mb", ".2f"),
}
_KERNELS: Columns = {
    "model": ("model", ""),
    "substituted": ("substituted", ""),
    "present": ("present", ""),
    "fp32": ("fp32", ".1e"),
    "bf16": ("bf16_ulp", ".2f"),
    "step over plain": ("step_over_plain", ".3f"),
}
_LOSS: Columns = {
    "what": ("model", ""),
    "plain, s": ("plain_s", ".1f"),
    "kernel, s": ("kernel_s", ".1f"),
    "plain, MB": ("plain_mb", ",.0f"),
    "kernel, MB": ("kernel_mb", ",.0f"),
}
_COMPILES: Columns = {
    "what": ("what", ""),
    "compile, s": ("compile_s", ".1f"),
    "dumping, s": ("dump_s", ".1f"),
    "verifying, s": ("verify_s", ".2f"),
    "dump, MB": ("dump_mb", ".0f"),
}
_COMMANDS: Columns = {"command": ("what", ""), "seconds": ("seconds", ".2f")}

_SAME_LOSSES: Columns = {
    "what": ("what", ""),
    "dtype": ("dtype", ""),
    "first loss": ("first", ".4f"),
    "DeepSpeed's last": ("deepspeed", ".4f"),
    "dsgraph's last": ("dsgraph", ".4f"),
    "difference, six steps": ("early", ".1e"),
    "difference, 50 steps": ("largest", ".1e"),
}

_ENGINE: Columns = {
    "system": ("system", ""),
    "step, s": ("step_s", ".3f"),
    "over": ("over", ".3f"),
    "loss": ("loss", ".4f"),
}

_FIRST_STEP: Columns = {
    "layers": ("layers", ""),
    "system": ("system", ""),
    "first step, s": ("first_step_s", ".1f"),
    "step, s": ("step_s", ".3f"),
    "peak memory per rank, MB": ("peak_mb", ".0f"),
}
_DEEP: Columns = {**_FIRST_STEP, "second start, s": ("warm_s", ".1f")}
_FAMILIES: Columns = {
    "family": ("family", ""),
    "system": ("system", ""),
    "first step, s": ("first_step_s", ".1f"),
    "step, s": ("step_s", ".3f"),
    "loss": ("loss", ".5f"),
}


_ACTIVATIONS: Columns = {
    "model": ("model", ""),
    "codegen": ("codegen", ""),
    "system": ("system", ""),
    "limit, MB": ("limit_mb", ".1f"),
    "peak, MB": ("peak_mb", ".1f"),
    "simulated, MB": ("predicted_mb", ".1f"),
    "step, s": ("step_s", ".3f"),
    "planning, s": ("plan_s", ".1f"),
    "over torch's": ("over", ".2f"),
}

_LIMITS: Columns = {
    "case": ("case", ""),
    "saved without a limit, MB": ("saved_mb", ".0f"),
    "limit, MB": ("limit_mb", ".1f"),
    "peak, MB": ("peak_mb", ".1f"),
    "step, s": ("step_s", ".2f"),
    "step without a limit, s": ("free_s", ".2f"),
    "moved to disk and back, MB": ("moved_mb", ".0f"),
    "plain I/O, s": ("disk_s", ".2f"),
    "planning, s": ("plan_s", ".1f"),
}

_LIMITS_KEPT: Columns = {
    "model": ("model", ""),
    "codegen": ("codegen", ""),
    "peak without a limit, MB": ("free_mb", ".2f"),
    "limit, MB": ("limit_mb", ".2f"),
    "peak, MB": ("measured_mb", ".2f"),
    "peak / limit": ("share", ".3f"),
    "warning in the report": ("said", ""),
}
_AGREEMENT: Columns = {
    "stage": ("stage", ""),
    "step with comparisons, s": ("with_s", ".3f"),
    "step without, s": ("without_s", ".3f"),
    "with / without": ("ratio", ".3f"),
    "comparisons, s": ("own_s", ".4f"),
    "1 + comparisons / without": ("own_ratio", ".3f"),
}

_SPLITS: Columns = {
    "case": ("case", ""),
    "balance": ("balance", ".3f"),
    "capturing, s": ("capture_s", ".1f"),
    "splitting, s": ("split_s", ".3f"),
}
_OFFLOAD: Columns = {
    "training": ("case", ""),
    "model states, MB": ("states_mb", ",.0f"),
    "memory growth, MB": ("grown_mb", ",.0f"),
    "parameters ready, s": ("ready_s", ".1f"),
    "first step, s": ("first_s", ".1f"),
    "step, s": ("step_s", ".1f"),
    "bound, s": ("bound_s", ".1f"),
    "read and written per step, MB": ("moved_mb", ",.0f"),
    "loss": ("loss", ".6f"),
}
_OFFLOAD_PEERS: Columns = {
    "system": ("system", ""),
    "offloaded to": ("tier", ""),
    "model states, MB": ("states_mb", ",.0f"),
    "memory growth, MB": ("grown_mb", ",.0f"),
    "step, s": ("step_s", ".2f"),
    "loss": ("loss", ".6f"),
    "error": ("error", ""),
}
_COMPRESSED: Columns = {
    "training": ("system", ""),
    "first two steps, s": ("compile_s", ".0f"),
    "step, first tenth, s": ("early_s", ".3f"),
    "step, last tenth, s": ("late_s", ".3f"),
    "step, all, s": ("mean_s", ".3f"),
    "held-out loss": ("loss", ".4f"),
}
_ONE_BIT_LINKS: Columns = {
    "link": ("rate", ""),
    "system": ("system", ""),
    "step, s": ("step_s", ".2f"),
    "sent per step, MB": ("link_mb", ".2f"),
    "peak, MB": ("peak_mb", ".0f"),
}
_ONE_BIT_LOSSES: Columns = {
    "system": ("system", ""),
    "held-out loss": ("held_out", ".4f"),
    "step at 100 Mbit/s, s": ("step_s", ".3f"),
}
_OFFLOAD_MODEL: Columns = {
    "training": ("case", ""),
    "memory predicted, MB": ("predicted_mb", ".1f"),
    "memory measured, MB": ("counted_mb", ".1f"),
    "process growth, MB": ("grown_mb", ".1f"),
    "disk predicted, MB": ("predicted_disk_mb", ".1f"),
    "measured on disk, MB": ("disk_mb", ".1f"),
    "loss": ("loss", ".6f"),
}
_BILLION: Columns = {
    "model states, MB": ("states_mb", ",.0f"),
    "process peak, MB": ("peak_mb", ",.0f"),
    "initialized after, s": ("ready_s", ".1f"),
    "first step done after, s": ("first_s", ".0f"),
}
_QUANTISATION: Columns = {
    "weights": ("weights", ""),
    "held-out loss": ("loss", ".4f"),
    "over float32": ("over", ".4f"),
    "change of outputs": ("error", ".2%"),
    "steps at the final bits": ("at_last", ""),
}
_INFERENCE: Columns = {
    "system": ("system", ""),
    "batch": ("rows", ""),
    "prompt tokens": ("prompt", ""),
    "tokens/s": ("tokens_s", ".0f"),
    "step, ms": ("token_ms", ".1f"),
    "prefill, ms": ("prompt_ms", ".0f"),
    "first token, s": ("first_s", ".1f"),
    "step / reading the weights": ("bound", ".2f"),
    "held-out loss": ("loss", ".4f"),
}
_PIPELINES: Columns = {
    "system": ("case", ""),
    "link": ("rate", ""),
    "step, s": ("step_s", ".2f"),
    "first step, s": ("first_step_s", ".1f"),
    "left the host, MB": ("link_mb", ".0f"),
    "loss": ("loss", ".6f"),
}

_GPU_KERNELS: Columns = {
    "kernel": ("kernel", ""),
    "width": ("width", ","),
    "dsgraph, ms": ("ours_ms", ".3f"),
    "Inductor, ms": ("inductor_ms", ".3f"),
    "over Inductor": ("over_fastest", ".2f"),
    "share of a copy's bandwidth": ("copy_share", ".2f"),
}
_GPU_DECODING: Columns = {"what": ("what", ""), "device, ms": ("ms", ".3f"), "host, ms": ("host_ms", ".3f")}

_SPARSE: Columns = {
    "system": ("system", ""),
    "tokens": ("length", ","),
    "density": ("density", ".1%"),
    "forward, s": ("forward_s", ".2f"),
    "backward, s": ("backward_s", ".2f"),
    "speed-up": ("speed-up", ".1f"),
    "share of ideal": ("of ideal", ".2f"),
    "memory, MB": ("peak_mb", ",.0f"),
}

_PEERS = ("fsdp2", "fsdp2-compile", "fsdp2-split", "deepspeed-3", "fsdp2-split-compile")
_HEADLINES = {  # row of the README's table: file, beginning of the check's name, systems compared, value
    "step time": ("zero-cpu", "dsgraph-3 step time", _PEERS, "step_s"),
    "peak memory of a rank": ("zero-cpu", "dsgraph-3 peak memory", _PEERS, "peak_mb"),
    "step time over a link of 1 Gbit/s": ("links-cpu", "1gbit: dsgraph-3 step time over the fastest", _PEERS, "step_s"),
    "the same, with at most the memory of DeepSpeed": ("links-cpu", "1gbit: dsgraph-3-spare step", _PEERS, "step_s"),
    "time to compile": ("zero-cpu", "dsgraph-3 compile time", ("single-compile",), "first_step_s"),
}
_PEER_NAMES = {
    "fsdp2": "FSDP2",
    "fsdp2-compile": "FSDP2, compiled",
    "fsdp2-split": "FSDP2, embedding and head as groups",
    "fsdp2-split-compile": "FSDP2, embedding and head as groups, compiled",
    "deepspeed-3": "DeepSpeed, stage 3",
    "single-compile": "`torch.compile`, one process",
}

# Page under docs/benchmarks/ -> its question; label, file and beginning of the name of its best and its worst check.
_QUESTIONS: Mapping[str, tuple[str, tuple[str, str, str], tuple[str, str, str]]] = {
    "zero": (
        "How fast is a ZeRO step, and how much memory does it take?",
        ("stage 3, compile time over torch.compile's", "zero-cpu", "dsgraph-3 compile time"),
        ("stage 3, peak memory over the smallest peer", "zero-cpu", "dsgraph-3 peak memory"),
    ),
    "engine": (
        "Does the engine compute what DeepSpeed computes?",
        ("float32, largest difference of 50 losses", "losses-cpu", "fp32"),
        ("bfloat16, largest difference of 50 losses", "losses-cpu", "bf16"),
    ),
    "first-step": (
        "How long does the first step take?",
        ("first step less a step, 24 layers over 4", "first-step-cpu", "blocks: first step less a step, 24 layers"),
        ("24 layers, first step over that of FSDP2 by blocks", "first-step-cpu", "first step, 24 layers, over FSDP2's"),
    ),
    "memory": (
        "What does a memory limit cost?",
        (
            "GPT, step time at equal memory over torch's budget of 0.2",
            "activations-cpu",
            "gpt, eager: step at the memory of torch's budget 0.2",
        ),
        ("activations on disk, step time over computing or the disk", "limits-cpu", "disk: step over"),
    ),
    "links": (
        "How fast is a step over a slow network?",
        (
            "1 Gbit/s, stage 3 with spare memory, step time over the fastest peer",
            "links-cpu",
            "1gbit: dsgraph-3-spare step time",
        ),
        ("1 Gbit/s, stage 2 with four micro-batches, step time over DDP", "links-cpu", "1gbit: dsgraph-2-x4 step time"),
    ),
    "parallel": (
        "What does a pipeline gain over a slow network?",
        ("100 Mbit/s, step time over DDP", "parallel-cpu", "100mbit: step of pipeline-x4 over"),
        ("balance of four stages of a Llama", "parallel-cpu", "llama, 12 layers, 4 stages: balance"),
    ),
    "offload": (
        "What does it cost to train from disk?",
        ("step time over the bound", "offload-cpu", "disk: step over"),
        (
            "two ranks, largest parameter difference from one process",
            "offload-model-cpu",
            "2 ranks against one process: largest",
        ),
    ),
    "inference": (
        "How fast are inference engines?",
        (
            "tokens per second over compiled transformers",
            "inference-cpu",
            "decode: tokens/s over transformers compiled",
        ),
        (
            "INT8, decoding speed of two ranks over one process",
            "inference-cpu",
            "int8, decode: speed of 2 ranks over 1 process, 2 threads",
        ),
    ),
    "quantization": (
        "What do quantized weights cost in accuracy?",
        ("8 bits to nearest, held-out loss over float32", "quantisation-cpu", "held-out loss: 8 bits, to nearest"),
        ("training from 16 to 8 bits, held-out loss over float32", "quantisation-cpu", "held-out loss: MoQ 16 to 8"),
    ),
    "sparse": (
        "How fast is sparse attention?",
        ("16,384 tokens, speed over dense attention", "sparse-cpu", "bslongformer: times faster"),
        ("16,384 tokens, memory over dense attention", "sparse-cpu", "fixed: memory"),
    ),
    "one-bit": (
        "What do 1-bit optimizers gain?",
        ("100 Mbit/s, 1-bit Adam, step time over DDP", "compressed-cpu", "100mbit: step over DDP"),
        ("time of a compression over a copy", "compressed-cpu", "compressing on one rank"),
    ),
    "layer-dropping": (
        "What does layer dropping gain?",
        ("time per sample at low theta, over all layers", "compressed-cpu", "layer dropping: time per sample, theta"),
        ("time per sample over all steps, over all layers", "compressed-cpu", "layer dropping: time per sample, all"),
    ),
    "kernels": (
        "What do the kernels gain?",
        ("loss of a large vocabulary, memory over plain torch", "kernels-cpu", "linear_cross_entropy: bytes"),
        ("bfloat16, additional error in roundings (Qwen3)", "kernels-cpu", "bfloat16 error"),
    ),
    "gpus": (
        "How fast are the kernels on an H200?",
        ("softmax_dropout, time over Inductor", "gpu-h200", "softmax_dropout at 4096: time"),
        ("linear_cross_entropy, time over Inductor", "gpu-h200", "linear_cross_entropy at 4096: time"),
    ),
    "scaling": (
        "How does compile time grow with layers and ranks?",
        ("96 layers, share of communication passes", "scaling-cpu", "communication passes over compile time"),
        ("largest bucket over its bound", "scaling-cpu", "largest bucket"),
    ),
    "checks": (
        "What do dumps, the verifier and comparisons of ranks cost?",
        ("share of the verifier in the compile time", "dumps-cpu", "time spent verifying"),
        (
            "step time with comparisons over without",
            "agreement-cpu",
            "step time with comparisons over without, stage 3, pairs",
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the given pages and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description="Write the tables of measurements into pages."
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="default: all that have tables")
    for page in parser.parse_args(arguments).pages:
        text = page.read_text()
        page.write_text(filled(text, page))
    return 0


def filled(text: str, page: Path) -> str:
    """Return the text of a page with up-to-date tables.

    Raises:
        ValueError: The page names an unknown table, or a table has no end mark.
    """
    begun, found = text.count("<!-- table: "), list(_MARKED.finditer(text))
    if begun != len(found) or any("<!-- table: " in mark[0][len(mark[1]) :] for mark in found):
        raise ValueError(f"{page}: a line <!-- table: ... --> has no <!-- end --> after it")
    for mark in found:
        if mark["name"] not in TABLES:
            raise ValueError(f"{page}: no table is called {mark['name']!r}; there are {', '.join(TABLES)}")
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark['name']]()}\n\n{mark[3]}", text)


def _rows(file: str, columns: Columns, *, having: str = "") -> Callable[[], str]:
    """Return a writer of the rows of a file that contain the key `having`, with the machine and the date."""

    def write() -> str:
        rows = [row for row in _read(file)["rows"] if not having or row.get(having) is not None]
        cells = [[_cell(row.get(name), form) for name, form in columns.values()] for row in rows]
        return f"{_measured_on(file)}\n\n{_table(cells, list(columns))}"

    return write


def _ratios(file: str, ours: Sequence[str], peers: Sequence[str]) -> Callable[[], str]:
    """Return a writer of the ratios of step time, peak memory and bytes sent, of our systems over their peers."""

    def write() -> str:
        by_name = {row["system"]: row for row in _read(file)["rows"]}
        cells = []
        for name, peer in itertools.product(ours, peers):
            row, other = by_name.get(name, {}), by_name.get(peer, {})
            ratios = [ratio(row.get(figure), [other.get(figure)]) for figure in ("step_s", "peak_mb", "wire_mb")]
            cells.append([name, peer, *(_cell(value, ".2f") for value in ratios)])
        return _table(cells, ["system", "over", "step time", "peak memory per rank", "sent per step"])

    return write


def _figures(file: str, *, about: str = "", without: str | None = None) -> Callable[[], str]:
    """Return a writer of the targets of a file. For a target that several models share, the worst model is shown.

    Args:
        file: Name of the file without its suffix.
        about: Only targets whose names begin with this text.
        without: Omit targets whose names begin with this text.
    """

    def write() -> str:
        checks = [(name, check) for name, check in _checks(file) if name.startswith(about)]
        cells = [
            [name, _cell(check["value"], ".4g"), _target(check), _verdict(check)]
            for name, check in checks
            if without is None or not name.startswith(without)
        ]
        return _table(cells, ["metric", "measured", "target", "result"])

    return write


def _summary() -> str:
    """Return one row per question: its page, its best result and its worst one."""
    cells = []
    for page, (question, best, worst) in _QUESTIONS.items():
        cells.append([f"[{question}]({page}.md)", _one_line(*best), _one_line(*worst)])
    return _table(cells, ["question", "best result", "worst result"])


def _one_line(label: str, file: str, begins: str) -> str:
    check = next(check for name, check in _checks(file) if name.startswith(begins))
    return f"{label}: {_cell(check['value'], '.4g')} (target {_target(check)}, {_verdict(check)})"


def _target(check: Row) -> str:
    return f"{'≤' if check['better'] == 'lower' else '≥'} {check['limit']:.4g}"


def _headlines() -> str:
    """Return the README's table: ratios to the best of the peers, with its name and the date of the measurement."""
    cells = []
    for what, (file, begins, peers, value) in _HEADLINES.items():
        check = next(check for name, check in _checks(file) if name.startswith(begins))
        data = _read(file)
        best = min((row for row in data["rows"] if row["system"] in peers), key=lambda row: row[value])
        cells.append([what, _cell(check["value"], ".2f"), _PEER_NAMES[best["system"]], data["machine"]["date"]])
    return _table(cells, ["dsgraph, stage 3", "ratio", "to the best peer", "measured"])


def _checks(file: str) -> Iterator[tuple[str, Row]]:
    """Yield the checks of a file by name. Of checks that models share (`MODEL: check`), only the worst is yielded."""
    data = _read(file)
    models = {row["model"]: None for row in data["rows"] if "model" in row}
    worst: dict[str, Row] = {}
    for check in data["checks"]:
        model, _, what = check["name"].partition(": ")
        name = what if model in models else check["name"]
        if name not in worst or _badness(check) > _badness(worst[name]):
            worst[name] = {**check, "of": model}
    for name, check in worst.items():
        yield (name if check["name"] == name else f"{name} (worst of {len(models) - 1}: {check['of']})"), check


def _badness(check: Row) -> float:
    if check["value"] is None:
        return math.inf
    return float(check["value"]) if check["better"] == "lower" else -float(check["value"])


def _verdict(check: Row) -> str:
    return "not measured" if check["value"] is None else "reached" if check["ok"] else "missed"


def _cell(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(cells: Sequence[Sequence[str]], heads: Sequence[str]) -> str:
    sides = ["right" if all(map(_is_number, column)) else "left" for column in zip(*cells, strict=True)]
    text = tabulate(cells, headers=heads, tablefmt="pipe", disable_numparse=True, colalign=sides)
    return re.sub(r" {2,}", " ", re.sub(r"-{3,}", "--", text))


def _is_number(cell: str) -> bool:
    return not cell or re.fullmatch(r"[-+.,\d]+(e[-+]\d+)?%?", cell) is not None


def _measured_on(file: str) -> str:
    machine, path = _read(file)["machine"], RESULTS / f"{file}.json"
    deepspeed = f"DeepSpeed {machine['deepspeed']}, " if machine.get("deepspeed") else ""
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, torch {machine['torch']}, "
        f"{deepspeed}{machine['date'][:10]}: `{path.relative_to(ROOT)}`."
    )


def _gpu_tests() -> str:
    """Return a table of the tests of each file of tests/gpu that passed, failed and were skipped."""
    outcomes: dict[str, list[str]] = {}
    for test in _read("gpu-tests-h200")["tests"]:
        outcomes.setdefault(Path(test["test"].partition("::")[0]).name, []).append(test["outcome"])
    cells = [[f"`{name}`", *map(str, _passed_failed_skipped(found))] for name, found in sorted(outcomes.items())]
    return f"{_measured_on('gpu-tests-h200')}\n\n{_table(cells, ['tests/gpu', 'passed', 'failed', 'skipped'])}"


def _passed_failed_skipped(outcomes: list[str]) -> tuple[int, int, int]:
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    return passed, len(outcomes) - passed - skipped, skipped


def _read(file: str) -> Row:
    found: Row = json.loads((RESULTS / f"{file}.json").read_text())
    return found


TABLES: dict[str, Callable[[], str]] = {
    "summary": _summary,
    "gpu: kernels": _rows("gpu-h200", _GPU_KERNELS, having="kernel"),
    "gpu: decoding": _rows("gpu-h200", _GPU_DECODING, having="host_ms"),
    "gpu: tests": _gpu_tests,
    "results": _headlines,
    "zero": _rows("zero-cpu", _SYSTEMS),
    "zero: ratios": _ratios("zero-cpu", ["dsgraph-3"], _PEERS),
    "zero: figures": _figures("zero-cpu"),
    "losses": _rows("losses-cpu", _SAME_LOSSES),
    "losses: figures": _figures("losses-cpu"),
    "engine": _rows("engine-cpu", _ENGINE, having="system"),
    "engine: figures": _figures("engine-cpu"),
    "first step": _rows("first-step-cpu", _FIRST_STEP),
    "first step: figures": _figures("first-step-cpu"),
    "first step: deep": _rows("first-step-deep-cpu", _DEEP),
    "first step: deep figures": _figures("first-step-deep-cpu"),
    "families": _rows("families-cpu", _FAMILIES),
    "families: figures": _figures("families-cpu"),
    "links: blocks": _rows("links-blocks-cpu", _LINKS),
    "activations": _rows("activations-cpu", _ACTIVATIONS),
    "activations: figures": _figures("activations-cpu"),
    "limits": _rows("limits-cpu", _LIMITS),
    "limits: figures": _figures("limits-cpu"),
    "limits kept": _rows("limits-kept-cpu", _LIMITS_KEPT),
    "limits kept: figures": _figures("limits-kept-cpu"),
    "agreement": _rows("agreement-cpu", _AGREEMENT),
    "agreement: figures": _figures("agreement-cpu"),
    "inference": _rows("inference-cpu", _INFERENCE),
    "inference: figures": _figures("inference-cpu"),
    "quantisation": _rows("quantisation-cpu", _QUANTISATION),
    "quantisation: figures": _figures("quantisation-cpu"),
    "layer dropping": _rows("compressed-cpu", _COMPRESSED, having="early_s"),
    "one bit: links": _rows("compressed-cpu", _ONE_BIT_LINKS, having="link_mb"),
    "one bit: losses": _rows("compressed-cpu", _ONE_BIT_LOSSES, having="held_out"),
    "one bit: figures": _figures("compressed-cpu", without="layer dropping"),
    "layer dropping: figures": _figures("compressed-cpu", about="layer dropping"),
    "offload": _rows("offload-cpu", _OFFLOAD, having="first_s"),
    "offload: peers": _rows("offload-cpu", _OFFLOAD_PEERS, having="system"),
    "offload: figures": _figures("offload-cpu"),
    "offload: model": _rows("offload-model-cpu", _OFFLOAD_MODEL),
    "offload: model figures": _figures("offload-model-cpu"),
    "offload: billion": _rows("offload-billion-cpu", _BILLION),
    "parallel: splits": _rows("parallel-cpu", _SPLITS, having="balance"),
    "parallel": _rows("parallel-cpu", _PIPELINES, having="step_s"),
    "parallel: figures": _figures("parallel-cpu"),
    "links": _rows("links-cpu", _LINKS),
    "links: ratios": _ratios("links-cpu", ["dsgraph-3", "dsgraph-3-spare"], _PEERS[:-1]),
    "links: figures": _figures("links-cpu"),
    "links without a limit": _rows("links-unlimited-cpu", _LINKS),
    "links without a limit: figures": _figures("links-unlimited-cpu"),
    "links held": _rows("links-held-cpu", _LINKS),
    "scaling": _rows("scaling-cpu", _SCALING),
    "scaling: figures": _figures("scaling-cpu"),
    "sparse": _rows("sparse-cpu", _SPARSE, having="speed-up"),
    "sparse: losses": _rows("sparse-cpu", {"system": ("system", ""), "held-out loss": ("loss", ".4f")}, having="loss"),
    "sparse: figures": _figures("sparse-cpu"),
    "kernels": _rows("kernels-cpu", _KERNELS, having="present"),
    "kernels: loss": _rows("kernels-cpu", _LOSS, having="plain_mb"),
    "kernels: figures": _figures("kernels-cpu"),
    "dumps": _rows("dumps-cpu", _COMPILES, having="compile_s"),
    "dumps: commands": _rows("dumps-cpu", _COMMANDS, having="seconds"),
    "dumps: figures": _figures("dumps-cpu"),
}
"""The tables that a page can contain, by the name in the mark."""


if __name__ == "__main__":
    sys.exit(main())
