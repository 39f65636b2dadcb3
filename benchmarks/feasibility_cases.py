"""Small programs that fill a chip's memory by one size, for the benchmark of feasibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from small_programs import (
    Made,
    convolutions,
    encoder,
    mixture,
    scanned,
    unrolled,
    vocabulary,
    wide,
)


@dataclass(frozen=True)
class Case:
    """A program that grows with a size, on a slice.

    Attributes:
      make: the program of a size.
      step: of which sizes are multiples.
      begin: a size to begin the search for the limit with.
    """

    name: str
    topology: str
    make: Callable[[int], Made]
    step: int
    begin: int


CASES = (
    Case("dense, scanned", "v5e:1x1", lambda n: scanned(n, remat=False), 512, 16896),
    Case("dense, scanned, remat", "v6e:4x4", lambda n: scanned(n, remat=True), 8192, 8192000),
    Case("dense, unrolled", "v6e:2x2", unrolled, 2048, 2621440),
    Case("state of Adam", "tpu7x:2x2x1", wide, 1024, 3932160),
    Case("encoder", "v4:2x2x1", encoder, 16, 784),
    Case("vocabulary", "v5e:2x4", vocabulary, 16, 624),
    Case("mixture of experts", "v5p:2x2x1", mixture, 16, 8064),
    Case("convolutions", "v5e:2x2", convolutions, 16, 17408),
)
