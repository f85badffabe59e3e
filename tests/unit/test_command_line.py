"""`python -m loco`: what there is, and how it ends."""

import subprocess
import sys

import pytest

from loco import __main__ as command
from loco.commands.ended import ended


def test_it_lists_its_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "loco"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m loco COMMAND")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["doctor", "meet", "sync"]


@pytest.mark.parametrize("name", ["doctor", "meet", "sync"])
def test_each_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m loco {name}")


def test_another_command_is_told_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["met"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m loco: there is no command 'met'\nusage: ")


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["meet", "here"]) == 2
    assert capsys.readouterr().err.startswith("python -m loco meet: an address is host:port, such as ")


def test_how_a_command_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    def wrong() -> int:
        with open("/nowhere/at all") as file:
            return len(file.read())

    assert ended("it", lambda: 0) == 0
    assert ended("it", interrupted) == 130
    assert ended("it", wrong) == 2
    assert capsys.readouterr().err == "it: /nowhere/at all: No such file or directory\n"
