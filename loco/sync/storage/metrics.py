"""What a server has done, in the text that Prometheus reads."""

import threading
from collections import Counter

PATH, CONTENT_TYPE = "metrics", "text/plain; version=0.0.4; charset=utf-8"

_KINDS = {
    "requests_total": ("counter", "requests that were answered, by method and status"),
    "sent_bytes_total": ("counter", "bytes of bodies that clients were sent"),
    "received_bytes_total": ("counter", "bytes of bodies that clients sent"),
    "connections": ("gauge", "connections now"),
}


class Metrics:
    """Numbers that the threads of all connections count in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {name: Counter[str]() for name in _KINDS}

    def add(self, name: str, amount: int = 1, labels: str = "") -> None:
        with self._lock:
            self._counts[name][labels] += amount

    def text(self) -> bytes:
        lines = []
        with self._lock:
            for name, (kind, what) in _KINDS.items():
                lines += [f"# HELP loco_sync_{name} {what}", f"# TYPE loco_sync_{name} {kind}"]
                counts = self._counts[name] or {"": 0}
                lines += [f"loco_sync_{name}{labels} {counts[labels]}" for labels in sorted(counts)]
        return "".join(f"{line}\n" for line in lines).encode()
