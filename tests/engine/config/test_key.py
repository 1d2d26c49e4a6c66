from __future__ import annotations

from dataclasses import replace

import pytest

from dsgraph.compiler.options import PARTITION_ARGUMENTS, BackendOptions
from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.key import COMPILED, MODEL_DEVICE, Entry, Needs, entries_of, key, section_of, spellings_of
from dsgraph.engine.config.section import Section

ENTRIES = {path: (field, entry) for path, field, entry in entries_of(EngineConfig)}


def test_every_key_has_an_entry():
    for section in {EngineConfig, *_sections(EngineConfig)}:
        for name, field in section.model_fields.items():
            assert section_of(field) or isinstance(field.json_schema_extra, Entry), f"{section.__name__}.{name}"


def _sections(within: type) -> set[type]:
    found = {section for field in within.model_fields.values() if (section := section_of(field))}
    return found.union(*map(_sections, found))


def test_entries_name_what_exists():
    for path, (_, entry) in ENTRIES.items():
        assert entry.option in ("", *BackendOptions.model_fields), path
        assert entry.argument in ("", *PARTITION_ARGUMENTS), path
        for needs in entry.needs:
            other = f"{path.rpartition('.')[0]}{needs.key}" if needs.key.startswith(".") else needs.key
            assert other in ENTRIES or other == MODEL_DEVICE, path
            assert not needs.unless or needs.unless in ENTRIES, path


def test_a_section_comes_before_its_keys():
    paths = list(ENTRIES)
    assert paths.index("sparse_attention") < paths.index("sparse_attention.mode")


def test_a_backend_option_needs_a_compiled_model():
    strict = replace(COMPILED, note="")

    class Own(Section):
        plain: int = key(1, "does something", option="memory_limit")
        other: int = key(1, "does something", option="memory_limit", needs=(strict,))
        engine: int = key(1, "does something", ge=1)

    found = {path: entry.needs for path, _, entry in entries_of(Own)}
    assert found == {"plain": (COMPILED,), "other": (strict,), "engine": ()}
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Own(engine=0)


def test_a_key_has_the_spellings_of_its_alias():
    path = "zero_optimization.param_persistence_threshold"
    documented, plain = spellings_of(path, ENTRIES[path][0])
    assert (documented, plain) == ("zero_optimization.stage3_param_persistence_threshold", path)
    assert spellings_of("gradient_clipping", ENTRIES["gradient_clipping"][0]) == ["gradient_clipping"]


def test_values_are_written_as_in_the_file():
    assert Needs("device", ("cpu", None, True, 1.0), "").values_text == '"cpu" or null or true or 1.0'
