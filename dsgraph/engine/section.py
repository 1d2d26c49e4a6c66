"""What every section of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, frozen=True)
