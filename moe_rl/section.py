"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
