"""What chips cost: the prices file of the user."""

from __future__ import annotations

import json
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright.errors import InputError
from shardwright.hardware_profiles.slices import parse_slice

_EXAMPLE = 'Write currency = "USD" and a table [chip_hour] of lines such as v5e = 1.20'

Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Prices(BaseModel):
    """Prices of chips.

    Attributes:
      currency: in which they are, such as "USD".
      chip_hour: price of one chip for an hour, by generation ("v5e") or for single slices that
        have a price of their own ("v5e:16x16", still for one chip).
      as_of: the day they are from.
      source: where they are from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: Annotated[str, Field(min_length=1)] = "USD"
    chip_hour: Annotated[dict[str, Price], Field(min_length=1)]
    as_of: date | None = None
    source: str = ""

    def per_hour(self, topology: str, chips: int | None = None) -> float | None:
        """Price of a whole slice for an hour; None where its generation has none.

        Args:
          topology: a slice; "2*v5e:16x16" has the price of its chips.
          chips: how many it has; needed where its generation is not a bundled one.
        """
        single = topology.partition("*")[2] or topology
        generation = single.partition(":")[0]
        per_chip = self.chip_hour.get(single, self.chip_hour.get(generation))
        if per_chip is None:
            return None
        return per_chip * (parse_slice(topology).chips if chips is None else chips)


def load_prices(path: str | Path) -> Prices:
    """Reads a prices file, TOML or JSON.

    Raises:
      InputError: it cannot be read, or a key or value in it is wrong; says which.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return Prices.model_validate(raw)
    except OSError as error:
        raise InputError(
            f"the prices cannot be read ({error.strerror})", where=str(path), do=_EXAMPLE
        ) from None
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise InputError("; ".join(faults[:5]), where=str(path), do=_EXAMPLE) from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InputError(f"this is not {kind} ({error})", where=str(path), do=_EXAMPLE) from None
