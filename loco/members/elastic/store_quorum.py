"""The quorum, by the store at which the sites meet."""

from ..meeting import Meeting
from .quorum import Claim, Member


class StoreQuorum:
    """A site's place in the store, which does what torchft's lighthouse does otherwise (see `Lighthouse`).

    Args:
        meeting: of this site with the others.
        id: this process's, and nobody else's.
    """

    def __init__(self, meeting: Meeting, id: str) -> None:
        self._meeting = meeting
        self._id = id

    def ask(self, claim: Claim) -> tuple[str, list[Member]]:
        """A quorum's name and its members, this site among them.

        Raises:
            AgreementError, TransportError: as `Meeting.ask`.
        """
        name, quorum = self._meeting.ask({"id": self._id, "of": claim.to_json()})
        return name, [
            Member(
                id=one.claim["id"],
                name=one.site,
                store=self._meeting.at,
                claim=Claim(**one.claim["of"]),
                where=one.where,
            )
            for one in quorum
        ]

    def close(self) -> None:
        """The others do not wait for this site any more."""
        self._meeting.close()
