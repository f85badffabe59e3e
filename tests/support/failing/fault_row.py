"""What a row of the table in docs/failures.md says: a fault, when it strikes, and what must follow."""

from dataclasses import dataclass, field
from typing import Any

from fault_site import Setup

ROUND = ("inner step", "encode", "announcement", "payload", "vote")
END = ("voted", "decision", "apply", "applied")  # the others may have all votes by then
AGAIN = ("reconnecting", "linking", "half linked")  # after a failed round

AS_BEFORE = "as before the round; all repeat it"
MENDED = "as before the round; all repeat it once the cause is fixed"
ONE_VERDICT = "before the round on all, or after it on all; all continue"
RESTARTED = "as before the round; all restart from the last checkpoint"
ONE_VERDICT_RESTARTED = "before the round on all, or after it on all; all restart from the last checkpoint"
VERDICT_LOST = (
    "after the round on those that had asked the store, before it and in doubt on the others; "
    "all restart from the last checkpoint"
)
RESTARTS = (RESTARTED, ONE_VERDICT_RESTARTED, VERDICT_LOST)
REFUSED = "nothing has started"
SAVED_AGAIN = "as before; earlier checkpoints are intact; all save again"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of fault, and one outcome.

    fault, phases: what the table calls it, and when it strikes.
    what: the deed of `faulty` that does it.
    flow: what is done about it, see `fault_cases.play`.
    who, kind, says: notices it, with an error of which type, which says what; in the table.
    by, text: those ranks that certainly do, and a pattern for the error of whoever does.
    dead_afters: within which, in units of `dead_after`.
    victims: the ranks that it befalls.
    seconds: of a delay.
    """

    fault: str
    phases: tuple[str, ...]
    what: str
    flow: str
    afterwards: str
    who: str = "the others"
    kind: str = "TransportError"
    says: str = ""
    by: tuple[int, ...] = (0, 2)
    text: str = ""
    dead_afters: float = 1.0
    victims: tuple[int, ...] = (1,)
    seconds: float = 0.0
    setup: Setup = field(default_factory=Setup)


@dataclass(frozen=True)
class Case:
    row: Row
    phase: str

    @property
    def name(self) -> str:
        return f"{self.row.fault}, {self.phase}" + ", in flight" * self.row.setup.overlap


def silent(site: str = "1") -> dict[str, Any]:
    says = f"no heartbeat from site {site}"
    noticed = rf"{says} within \S+ s: dead, stopped or cut off"
    # By itself, or because another site that noticed it a moment earlier has hung up.
    return {"says": says, "text": rf".*: ({noticed}; last heard of: |site \w+ has left: .*: {noticed})"}


TWO = Setup(world=4, ranks_per_site=2)
CUT = Setup(networks=True)
STOPPED: dict[str, Any] = {"what": "SIGSTOP", "flow": "resume", "afterwards": AS_BEFORE}
CONTINUED: dict[str, Any] = {**STOPPED, "afterwards": ONE_VERDICT}
KILLED: dict[str, Any] = {"what": "SIGKILL", "flow": "restart", "afterwards": RESTARTED}
KILLED_LATE: dict[str, Any] = {**KILLED, "afterwards": ONE_VERDICT_RESTARTED}
LINK: dict[str, Any] = {"what": "cut", "flow": "link", "afterwards": AS_BEFORE, "setup": CUT}
LINK_MENDED: dict[str, Any] = {**LINK, "afterwards": ONE_VERDICT}
# A site that is cut off says what a rank of a site of two says who waits for it; neither names the other's.
ANY_OF_TWO = r".*(lost|left|no heartbeat from) ?(another )?(rank|site)|.*site \w+ has left"
NO_STORE = "no answer from the sites' store"


def late(seconds: int) -> str:
    return f"no answer from site 1 within {seconds} s, which is alive"
