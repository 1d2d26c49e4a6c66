"""The base class of all sections of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from dsgraph.utils.files import absolute

PathText = Annotated[str, AfterValidator(lambda path: absolute(path) if path else path)]
"""A path that is resolved when the file is read; an empty one stays empty."""


class Section(BaseModel):
    """A section of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, frozen=True)
