"""The token of a server: a client that has it may read, and write if the server is writable."""

import hmac
import os

TOKEN_VARIABLE = "LOCO_SYNC_TOKEN"


def find_token(token: str | None) -> str:
    """The token that is used; None: of LOCO_SYNC_TOKEN. Empty if there is none.

    Raises:
        ValueError: it can't travel in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("a token must be printable ASCII characters without a space")
    return token


def authorization(token: str) -> dict[str, str]:
    """What a request has in its headers."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_authorized(header: str | None, token: str) -> bool:
    return not token or hmac.compare_digest((header or "").encode(), f"Bearer {token}".encode())
