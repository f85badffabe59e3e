"""Which store a vLLM server takes weights from: a caller of its endpoint names one."""

import re
from collections.abc import Mapping

URL_VARIABLE, TOKEN_VARIABLE = "LOCO_SYNC_URL", "LOCO_SYNC_TOKEN"


def check_source(url: str, environment: Mapping[str, str]) -> str:
    """`url`, if it is the store that LOCO_SYNC_URL names, or a folder below it.

    Without LOCO_SYNC_URL it may be any store, except that the token in LOCO_SYNC_TOKEN is not sent to a
    server that a caller has named.

    Raises:
        ValueError: it is not allowed.
    """
    allowed = environment.get(URL_VARIABLE, "").rstrip("/")
    if allowed:
        below = url.removeprefix(allowed)
        if not (url.startswith(allowed) and re.fullmatch(r"(/\w[\w.-]*)*/?", below, re.ASCII)):
            raise ValueError(
                f"init_info.url must be {allowed} or a folder below it, because the vLLM server was started "
                f"with {URL_VARIABLE}={allowed}, got {url}"
            )
    elif environment.get(TOKEN_VARIABLE) and "://" in url:
        raise ValueError(
            f"{TOKEN_VARIABLE} is set, and would be sent to the server that init_info.url names ({url}): "
            f"start the vLLM server with {URL_VARIABLE} as well, set to the URL that the token is for"
        )
    return url
