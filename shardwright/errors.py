"""Errors that a user can act on."""


class ShardwrightError(Exception):
    """Something the user gave cannot be planned.

    Every message says three things: what was wrong, where, and what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what = what
        self.where = where
        self.do = do
        parts = [f"{where}: {what}" if where else what]
        if do:
            parts.append(do[0].upper() + do[1:])
        super().__init__(". ".join(part.rstrip(".") for part in parts) + ".")


class InputError(ShardwrightError):
    """An input is malformed: an unknown slice, a function that does not trace, a foreign file."""


class DoesNotFitError(ShardwrightError):
    """No sharding keeps the program within the memory of the slice.

    Attributes:
      least_bytes: the least memory of one device that a sharding was found to need; None where
        it is not known.
      limit_bytes: bytes of one device that may be used; None where they are not known.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        do: str = "",
        least_bytes: float | None = None,
        limit_bytes: float | None = None,
    ) -> None:
        super().__init__(what, where=where, do=do)
        self.least_bytes = least_bytes
        self.limit_bytes = limit_bytes


class ServiceError(ShardwrightError):
    """A planning service cannot be reached, refuses a request, or failed at a job.

    Attributes:
      kind: "unreachable", "foreign" (something else answers), "unauthorized", "busy", "cancelled",
        "other-program", or what a job failed of, such as "out-of-memory", "time-limit", "crashed"
        and "internal".
    """

    def __init__(self, what: str, *, where: str = "", do: str = "", kind: str = "internal") -> None:
        super().__init__(what, where=where, do=do)
        self.kind = kind
