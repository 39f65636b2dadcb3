"""Which kind of program bytes are, and the program in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.planner.program import Program

ProgramKind = Literal["exported", "stablehlo-text", "stablehlo-bytecode"]
BYTECODE_MAGIC = b"ML\xefR"


def program_kind(head: bytes) -> ProgramKind:
    """What bytes that begin like this can only be, if they are a program at all.

    Args:
      head: the first bytes; some thousand are plenty, for the flatbuffer of a jax.export artifact
        has zeros among its first eight.
    """
    if head[:4] == BYTECODE_MAGIC:
        return "stablehlo-bytecode"
    return "exported" if b"\0" in head else "stablehlo-text"


def read_program(data: bytes, where: str = "program") -> Program:
    """Reads a jax.export artifact or StableHLO; which it is follows from its bytes.

    Raises:
      InputError: it is neither, or a program that cannot be planned.
    """
    from shardwright.planner.program import Program

    if not data.strip():
        raise InputError("the program is empty", where=where, do="Write the program again")
    if data.lstrip()[:1] == b"{" and b'"schema_version"' in data:
        raise InputError(
            "this is a plan, not a program",
            where=where,
            do=f"Give the program that was planned; `shardwright show {where}` shows the plan",
        )
    try:
        if program_kind(data) == "exported":
            return Program.from_exported(data)
        return Program.from_stablehlo(data)
    except InputError as error:
        raise InputError(error.what, where=where, do=error.do) from None
    except RecursionError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        # What a damaged module holds, such as names that are no UTF-8, shows anywhere.
        reason = str(error).splitlines()[0][:200] if str(error) else ""
        raise InputError(
            f"the program is damaged ({type(error).__name__}: {reason})",
            where=where,
            do="Write it again",
        ) from error
