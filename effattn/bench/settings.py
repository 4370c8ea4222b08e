"""What a YAML file or the command line may set: typed fields, and errors that name what is wrong and what may be."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """Fields that are read strictly, and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Settings from plain values; ``ValueError`` in one line names all that is wrong with them."""
        for name in fields:
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls.model_fields)}"
                raise ValueError(f"study: unknown field {name!r}; {hint}")
        try:
            # Through JSON, where strict types still let a list be a tuple.
            return cls.model_validate_json(json.dumps(fields, default=str))
        except ValidationError as error:
            raise ValueError(_complaints(error)) from None

    def replace(self, **fields: Any) -> Self:
        """These settings with other values for some fields; ``ValueError`` as ``parse``."""
        return self.parse({**self.model_dump(mode="json"), **fields})

    def save(self, path: Path) -> None:
        """Write the settings as YAML."""
        fields = self.model_dump(mode="json")
        path.write_text(yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, width=110), encoding="utf-8")


def read_fields(path: Path) -> dict[str, Any]:
    """The fields that a YAML file holds; ``ValueError`` for a file that is no YAML or holds something else."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"study: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"study: {path} must hold fields such as 'seq_lens: [512, 1024]', got {fields!r}")
    return fields


def _complaints(error: ValidationError) -> str:
    """The first thing wrong with each field, as "study: seq_lens must be greater than 0, got -1"."""
    complaints: dict[str, str] = {}
    for details in error.errors():
        field = str(details["loc"][0]) if details["loc"] else "variants"  # the one that the whole is asked about
        what = details["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
        if details["type"] == "missing":
            what = "is missing"
        elif "got" not in what:
            what += f", got {details['input']!r}"
        complaints.setdefault(field, f"study: {field} {what}")
    return "; ".join(complaints.values())
