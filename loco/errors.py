"""What can go wrong in a round, by name. A wrong argument is a ValueError, as in torch."""


def first_line(error: BaseException) -> str:
    """What torch says, without its stack and its advice."""
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0]


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


class AuthenticationError(LocoError):
    """A message is not from who it says, or was changed on its way."""


class TransportError(LocoError):
    """The network failed, or a peer did not answer in time.

    Attributes:
        lasting: a repeat at once would not mend it: a rank is dead, or has been waited for as long as was
            allowed. Otherwise links were lost between ranks that live, as far as is known.
    """

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting


def no_store(phase: str, error: RuntimeError) -> TransportError:
    """For who asked the process group's store, and had this instead of an answer."""
    text = f"{phase}: the sites' store does not answer ({first_line(error)})"
    return TransportError(text, lasting=True)


class PeerError(LocoError):
    """Another rank failed in the round, for a reason that only its own error knows."""


class CheckpointError(LocoError):
    """A checkpoint could not be written, or none that all ranks hold can be read, or it is another site's.
    The training's state is what it was, and so are the checkpoints that were there."""
