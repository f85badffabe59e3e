"""`python -m loco sync serve`, as it is run."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faulty_store import WHOLE
from selection import COMMANDS
from test_server import until

from experiments.processes.orphans import through
from loco.commands.sync import main
from loco.sync.storage.folder_store import FolderStore
from loco.sync.storage.http_store import HttpStore


@contextmanager
def started(folder: Path, *options: str, token: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server and its URL."""
    command = through([sys.executable, "-m", "loco", "sync", "serve", str(folder), "--port", "0", *options])
    variables = os.environ | {"LOCO_SYNC_TOKEN": token}
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.kill()


@pytest.mark.check(COMMANDS)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_serves_until_it_is_told_to_end_and_ends_quietly(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    (tmp_path / "a").write_bytes(b"contents")
    with started(tmp_path, "--writable", token="right") as (process, url):
        store = HttpStore(url, "right")
        assert store.read("a", WHOLE) == b"contents"
        store.write("b", b"")
        with pytest.raises(PermissionError, match="asks for a token"):
            HttpStore(url, "").read("a", WHOLE)
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == status


@pytest.mark.check(COMMANDS)
def test_with_a_certificate_it_speaks_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes a certificate")
    certificate, key, data = str(tmp_path / "certificate"), str(tmp_path / "key"), os.urandom(3_000_000)
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "served").mkdir()
    tls = ("--writable", "--certfile", certificate, "--keyfile", key)
    with started(tmp_path / "served", *tls, token="right") as (process, url):
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            HttpStore(url, "right").names("")
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        plain = HttpStore(url.replace("https", "http"), "right")
        with ThreadPoolExecutor() as pool:
            store = HttpStore(url, "right")
            change = pool.submit(store.wait, "versions", [], 60.0)
            with pytest.raises(ConnectionError):
                plain.names("")
            store.write("versions/1", data)
            assert change.result() == ["1"]
        assert store.read("versions/1", WHOLE) == data
        with pytest.raises(PermissionError, match="asks for a token"):
            HttpStore(url, "wrong").write("versions/2", data)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == ("", "")


@pytest.mark.check(COMMANDS)
def test_a_server_that_is_killed_while_it_is_written_to_leaves_no_half_file(tmp_path: Path) -> None:
    with started(tmp_path, "--writable") as (process, url):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(
                b"PUT /versions/1 HTTP/1.1\r\nContent-Length: 4000000\r\n\r\n" + bytes(3_000_000)
            )
            until(lambda: any(path.stat().st_size for path in tmp_path.glob("versions/.partial-*")))
            process.kill()
            process.wait()
    assert FolderStore(tmp_path).names("versions") == []
    FolderStore(tmp_path).create("versions/1", b"whole")


def test_what_can_not_be_served_is_a_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCO_SYNC_TOKEN", raising=False)
    folder = str(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, sentence in {
            (folder + "/missing",): "There is no such folder",
            (folder, "--port", port): f"127.0.0.1:{port}: Address already in use",
            (folder, "--port", "65536"): "port must be 0 to 65535, got 65536",
            (folder, "--host", "nowhere.invalid"): "nowhere.invalid:8765: ",
            (folder, "--upstream", "http://"): "the URL of a server must be",
            (folder, "--upstream", "nothing://x"): "must be a path or begin with one of file://",
            (folder, "--upstream", "http://x", "--writable"): "a relay can't be writable",
            (folder, "--writable", "--host", "0.0.0.0"): "needs a token",
            (folder, "--certfile", folder + "/missing"): "/missing: No such file or directory",
            (folder, "--certfile", __file__): "has no certificate as PEM",
            (folder, "--keyfile", __file__): "a keyfile needs the certfile",
        }.items():
            assert main(["serve", *arguments]) == 2
            printed, said = capsys.readouterr()
            assert printed == ""
            assert said.startswith("python -m loco sync: ")
            assert sentence in said
            assert said.count("\n") == 1


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: python -m loco sync" in capsys.readouterr().err
