"""The base of all settings classes, and the types that their keys share."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what PyTorch's generators take
# a folder is called so: it cannot leave its own, nor hide in it, and a temporary name made from it is short enough
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"
NAME = "at most 200 letters, digits and _ . -, starting with a letter or digit"  # the same in words
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


def _axis_value(value: Any) -> Any:
    if type(value) not in (str, int, float) or not re.fullmatch(NAME_PATTERN, str(value)):
        raise ValueError(f"must be a name ({NAME}) or a number >= 0")
    return value


AxisValue = Annotated[Any, AfterValidator(_axis_value)]  # str, int or float; `${each.AXIS}` keeps its type
# For a choice of which one is "off": YAML reads the bare word as false.
OFF = BeforeValidator(lambda value: "off" if value is False else value)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
