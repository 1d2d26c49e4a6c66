"""A key of the configuration is named in its entry, in texts, and as an attribute where it takes effect."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from dsgraph.engine.config import key
from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.key import entries_of, section_of, spellings_of

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "dsgraph/compiler/options.py": "backend options, some of which have the name of the key that sets them",
    "dsgraph/engine/activation_checkpointing.py": "arguments of DeepSpeed's `configure` under the names of keys",
    "dsgraph/checkpoint/deepspeed_files.py": "what DeepSpeed's checkpoints hold",
    "dsgraph/engine/integrations/accelerator.py": "accelerate's own arguments, written under the keys that mean them",
    "dsgraph/engine/integrations/trainer.py": "the loop of a `Trainer` counts micro-batches and clips, not the engine",
    "dsgraph/engine/optimizers/offloading.py": "the plan of an offload, written into the keys of its section",
    "dsgraph/engine/optimizers/optimizer_section.py": "a note on a key tells its default from what the user wrote",
    "dsgraph/engine/optimizers/step_moment.py": "a note names the key for which a step waits",
    "dsgraph/utils/nearest.py": "names of other libraries, for hints; a key needs none",
}
"""Files with a text that equals the name of a key, and why it is no second list of keys."""
COMMON = {
    "loss_scale": "a scalar of logs and checkpoints",
    "memory_limit": "an argument of several functions",
    "host_memory_limit": "an argument of `plan_offload`",
    "sequence_parallel": "an option of the backend, and a style in the plans of transformers",
}
"""Names that mean other things elsewhere, as do plain words such as `stage`."""


def _entry_files() -> set[Path]:
    """The files of the sections, which hold the entries."""
    sections, left = {EngineConfig}, [EngineConfig]
    while left:
        found = {section_of(field) for field in left.pop().model_fields.values()} - {None}
        left += found - sections
        sections |= found
    return {Path(inspect.getfile(each)).resolve() for each in (*sections, key)}


def _names() -> set[str]:
    """Paths of keys, and the last parts that are no plain words."""
    spellings = [text for path, field, _ in entries_of(EngineConfig) for text in spellings_of(path, field)]
    return {
        name for text in spellings for name in (text, text.rpartition(".")[2]) if set(name) & {".", "_"}
    } - COMMON.keys()


def _repeated(source: str, names: set[str]) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }


def test_a_key_of_the_configuration_is_in_one_table():
    names, entries, found = _names(), _entry_files(), set()
    for path in sorted((ROOT / "dsgraph").rglob("*.py")):
        if path.resolve() in entries or path.resolve().parts[len(ROOT.parts)] != "dsgraph":
            continue
        here, repeated = str(path.relative_to(ROOT)), _repeated(path.read_text(), names)
        if repeated:
            found.add(here)
            assert here in ALLOWED, f"{here} names the keys {sorted(repeated)}: say it in their entries (`Entry`)"
    assert found == set(ALLOWED), "files that name no key any more: remove them from ALLOWED"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            '_SUPPORTED = ("gradient_clipping", "zero_optimization.stage")',
            {"gradient_clipping", "zero_optimization.stage"},
        ),
        ('if key == "steps_per_print": pass', {"steps_per_print"}),
        ('found = config.gradient_clipping; text = "gradient_clipping is 1"', set()),
        ('stage = options["stage"]', set()),
    ],
)
def test_a_second_table_is_found(source, expected):
    assert _repeated(source, _names()) == expected
