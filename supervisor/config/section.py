"""What all sections of the configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of the configuration: unknown keys refused, no silent conversion, never changed once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)
