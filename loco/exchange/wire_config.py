"""How the user wants entries to travel. Only the dense codes that round values change a result."""

from dataclasses import dataclass

from ..wire.codecs import DENSE, SPARSE
from .tuning import EXCHANGES


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """
    Attributes:
        codec: a sparse or a dense code's name, or "auto".
        exchange: one of EXCHANGES.
    """

    codec: str
    exchange: str

    @staticmethod
    def of_entries(codec: str, exchange: str, *, gate: str) -> "WireConfig":
        """What PULSELoCo can be told."""
        _check("wire", codec, ("auto", *SPARSE))
        _check("exchange", exchange, EXCHANGES)
        why = "exchange='dense'" if exchange == "dense" else "gate='open'" if gate == "open" else ""
        if why and (codec != "auto" or exchange not in ("auto", "dense")):
            raise ValueError(
                f"{why} sends every element as FP32: leave wire at 'auto' (got {codec!r}) and exchange at "
                f"'auto' or 'dense' (got {exchange!r})"
            )
        return WireConfig(codec=codec, exchange=exchange)

    @staticmethod
    def of_all(codec: str) -> "WireConfig":
        """What DiLoCo can be told."""
        _check("wire", codec, tuple(DENSE))
        return WireConfig(codec=codec, exchange="dense")

    def agreement(self) -> dict[str, str]:
        """What all sites must have chosen alike."""
        return {"exchange": self.exchange} | ({"wire": self.codec} if self.codec in DENSE else {})


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
