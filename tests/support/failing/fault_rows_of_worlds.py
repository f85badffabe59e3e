"""The rows of the fault table that are about sites with worlds of their own: `loco.Sites`."""

from typing import Any

from fault_row import ANY_OF_TWO, CONTINUED, END, KILLED, KILLED_LATE, ROUND, STOPPED, VERDICT_LOST, Row
from fault_site import Setup

# The store of the sites is in one of their ranks, and may be lost with it.
OF_WORLDS: dict[str, Any] = {
    "text": rf"{ANY_OF_TWO}|.*(the sites' store does not answer|no answer from the sites' store)",
    "dead_afters": 3,
    "setup": Setup(world=4, ranks_per_site=2, worlds=True),
}

ROWS_OF_WORLDS = (
    Row(
        fault="loco.Sites: a rank of a site of two stopped",
        phases=ROUND,
        **STOPPED,
        **OF_WORLDS,
        says="no heartbeat from …",
        victims=(3,),
        by=(0, 1, 2),
    ),
    Row(
        fault="loco.Sites: that rank stopped, and continued",
        phases=END,
        **CONTINUED,
        **OF_WORLDS,
        says="no heartbeat from …",
        victims=(3,),
        by=(0, 1, 2),
    ),
    Row(
        fault="loco.Sites: a rank of a site of two killed",
        phases=ROUND,
        **KILLED,
        **OF_WORLDS,
        says="lost …",
        victims=(2,),
        by=(0, 1, 3),
    ),
    Row(
        fault="loco.Sites: that rank killed at the end of a round",
        phases=END,
        **KILLED_LATE,
        **OF_WORLDS,
        says="lost …",
        victims=(2,),
        by=(0, 1, 3),
    ),
    Row(
        fault="loco.Sites: a whole site killed",
        phases=("inner step", "payload"),
        **{**KILLED, "what": "site killed"},
        **OF_WORLDS,
        says="lost site b",
        victims=(2, 3),
        by=(0, 1),
    ),
    Row(
        fault="loco.Sites: a whole site killed at the end of a round",
        phases=("voted", "apply"),
        **{**KILLED_LATE, "what": "site killed"},
        **OF_WORLDS,
        says="lost site b",
        victims=(2, 3),
        by=(0, 1),
    ),
    Row(
        fault="loco.Sites: the rank that hosts the store killed",
        phases=("inner step", "payload"),
        **KILLED,
        **OF_WORLDS,
        says="the sites' store does not answer",
        victims=(0,),
        by=(1, 2, 3),
    ),
    Row(
        fault="loco.Sites: the store's rank killed at the end of a round",
        phases=("voted", "apply"),
        **{**KILLED_LATE, "afterwards": VERDICT_LOST},
        **OF_WORLDS,
        says="the sites' store does not answer",
        victims=(0,),
        by=(1, 2, 3),
    ),
)
