"""A server takes new weights by HTTP while it answers."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import plain_engine
import pytest
from tokenizers import Tokenizer, models
from trained import publish
from transformers import PreTrainedTokenizerFast
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm_server import LONG, OPTIONS, Server, running

VERSIONS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    publish("llama", folder, VERSIONS)
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(250)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder / "1")
    with running(folder, folder / "1", *OPTIONS) as found:
        found.call("/init_weight_transfer_engine", {"init_info": {"url": str(folder / "url")}})
        yield found


def fresh(server: Server, version: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    plain_engine.keep_weights_plain(monkeypatch)
    engine = plain_engine.build(server.folder / str(version))
    return engine.apply_model(compute_tensor_digests)[0]


def test_a_request_goes_on_while_the_weights_change(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(server.answer())
    answer = server.answer()
    during = [next(answer)]
    server.update(2)
    during += answer
    assert len(during) == len(before) == LONG
    assert during[0] == before[0]
    assert during != before
    assert server.checksums() == fresh(server, 2, monkeypatch)
    assert server.call("/weight_info", method="GET") == {"weight_version": "2"}


def test_paused_requests_are_kept_and_answered_by_the_new_weights(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.call("/pause?mode=keep")
    with ThreadPoolExecutor(1) as client:
        kept = client.submit(lambda: list(server.answer()))
        server.update(3)
        time.sleep(0.5)
        assert not kept.done()
        server.call("/resume")
        answered = kept.result()
    server.call("/reset_prefix_cache")
    assert answered == list(server.answer())
    assert server.checksums() == fresh(server, 3, monkeypatch)


def test_an_update_that_fails_leaves_a_server_that_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, answered = server.checksums(), list(server.answer())
    with pytest.raises(HTTPError, match="500"):
        server.update(99)
    assert server.checksums() == before
    assert list(server.answer()) == answered
    server.update(None)
    assert server.checksums() == fresh(server, VERSIONS, monkeypatch)
