"""A caller of a vLLM server's endpoint can't make it read, or send its token to, any store."""

import pytest

from loco.integrations.engines.vllm_source import check_source

TRAINER = "http://trainer:8765/run"


@pytest.mark.parametrize("url", [TRAINER, TRAINER + "/", TRAINER + "/7", TRAINER + "/a-b/c.d/"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_store_below_the_one_that_the_server_was_started_with_is_allowed(url: str, end: str) -> None:
    assert check_source(url, {"LOCO_SYNC_URL": TRAINER + end, "LOCO_SYNC_TOKEN": "secret"}) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere:8765/run",
        "http://trainer:8765",
        "http://trainer:87650/run",
        "https://trainer:8765/run",
        TRAINER + "s",
        TRAINER + "/../other",
        TRAINER + "/%2e%2e/other",
        TRAINER + "/.hidden",
        TRAINER + "//elsewhere",
        TRAINER + "/a\n",
        "/etc",
        "",
    ],
)
def test_any_other_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"must be {TRAINER} or a folder below it"):
        check_source(url, {"LOCO_SYNC_URL": TRAINER})


def test_a_token_is_not_sent_to_a_server_that_a_caller_names() -> None:
    with pytest.raises(ValueError, match=r"LOCO_SYNC_TOKEN is set.*http://elsewhere.*LOCO_SYNC_URL"):
        check_source("http://elsewhere", {"LOCO_SYNC_TOKEN": "secret"})
    assert check_source("/shared/weights", {"LOCO_SYNC_TOKEN": "secret"}) == "/shared/weights"
    assert check_source("http://trainer", {}) == "http://trainer"
