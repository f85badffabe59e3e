"""One site gives another θ and m, over the links between them, and the other proves that it holds them."""

import json
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ..errors import TransportError, WireError
from ..net.transport import Transport, as_bytes
from .state import digest_of

MOST_HEAD_BYTES = 1 << 20  # of a few numbers, and a name and a number for every site
CHUNK = 1 << 20  # elements of one message: 4 MiB


@dataclass(frozen=True, kw_only=True)
class Head:
    """What θ and m are of.

    round: rounds done.
    digests: of θ and of m.
    took_part: the last round that each site took part in, by name.
    """

    round: int
    digests: list[str]
    took_part: dict[str, int] = field(default_factory=dict)


def give(link: Transport, peer: int, head: Head, tensors: list[Tensor]) -> None:
    """
    Raises:
        TransportError: the peer is gone.
    """
    phase = f"giving round {head.round} to site {peer}"
    link.send_blob(json.dumps(asdict(head)).encode(), [peer], phase=phase)
    for tensor in tensors:
        for part in tensor.split(CHUNK):
            link.swap({peer: as_bytes(part.to(link.device))}, {}, phase=phase)


def take_head(link: Transport, peer: int) -> Head:
    """
    Raises:
        TransportError: the peer is gone.
        WireError: what it sent is no head.
    """
    phase = f"taking θ from site {peer}"
    blob = link.receive_blob(peer, phase=phase, most=MOST_HEAD_BYTES)
    try:
        head = Head(**json.loads(blob))
        whole = type(head.round) is int and head.round >= 0
        whole = whole and isinstance(head.digests, list) and isinstance(head.took_part, dict)
        whole = whole and all(isinstance(digest, str) for digest in head.digests)
        whole = whole and all(type(last) is int for last in head.took_part.values())
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{phase}: it does not say what it gives ({error})") from error
    if not whole:
        raise WireError(f"{phase}: it does not say what it gives ({blob[:80]!r})")
    return head


def take(link: Transport, peer: int, head: Head, tensors: list[Tensor]) -> None:
    """Overwrite the tensors with what the peer gives. If it raises they hold a part of it.

    Raises:
        TransportError: the peer is gone, or what came is not what it gave.
    """
    phase = f"taking round {head.round} from site {peer}"
    for tensor in tensors:
        for part in tensor.split(CHUNK):
            staged = torch.empty_like(part, device=link.device)
            link.swap({}, {peer: as_bytes(staged)}, phase=phase)
            part.copy_(staged)
    digests = [digest_of(tensor) for tensor in tensors]
    if digests != head.digests:
        raise TransportError(f"{phase}: what came has the digests {digests}, not {head.digests}")
