"""What can go wrong in a round, by name. A wrong argument is a ValueError, as in torch."""


class LocoError(RuntimeError):
    """Base of all errors of a round. Unless it says otherwise the state is what it was before the round."""


class AgreementError(LocoError):
    """The sites were built with different parameters or settings."""


class ReplicaError(LocoError):
    """The sites (or the ranks of one site) no longer hold the same bits, or are in different rounds."""


class NonFiniteError(LocoError):
    """An update holds an infinity or a NaN; nothing was sent."""


class WireError(LocoError):
    """A message does not follow the wire format, or is not of this run."""


class TransportError(LocoError):
    """The network failed, or a peer did not answer in time."""


class PeerError(LocoError):
    """Another rank failed in the round, for a reason that only its own error knows."""
