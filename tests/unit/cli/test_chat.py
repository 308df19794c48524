"""`paceline chat`: how it finds a server, what it sends, what it writes, and its one line for each failure."""

from __future__ import annotations

import builtins
import io
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.cli.arguments import readable
from services.cli.chat.answers import Ending
from services.cli.chat.display import measured
from services.cli.chat.history import ChatHistory
from services.cli.chat.main import parser
from services.cli.http.endpoint import DEFAULT_URL, find_endpoint
from services.cli.main import main
from services.cli.servers import NoAddress, announced
from services.runtime.tls.files import TlsPaths
from tests.support.certificates import make_certificates
from tests.support.ports import free_port
from tests.support.scripted_openai import ScriptedOpenAI, scripted_openai


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("PACELINE_URL", "PACELINE_SERVER", "PACELINE_API_KEY", "PACELINE_TLS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def openai() -> Iterator[ScriptedOpenAI]:
    with scripted_openai() as script:
        yield script


# ── the conversation ─────────────────────────────────────────────────────────────────────────────────────────────────


def contents(conversation: ChatHistory) -> list[str]:
    return [message["content"] for message in conversation.messages()]


def test_each_question_repeats_the_messages_before_it() -> None:
    chat = ChatHistory("be kind")
    chat.ask("one")
    first = chat.messages()
    chat.answer("1")
    chat.ask("two")
    assert chat.messages()[: len(first)] == first, "else the server finds no prefix in its cache"
    assert [message["role"] for message in chat.messages()] == ["system", "user", "assistant", "user"]


def test_a_question_without_an_answer_is_dropped_or_asked_again() -> None:
    chat = ChatHistory()
    chat.ask("refused")
    chat.answer("")
    assert chat.retry() == "refused"
    chat.ask("next")
    assert contents(chat) == ["next"]


def test_retry_removes_only_the_last_answer() -> None:
    chat = ChatHistory()
    assert chat.retry() is None
    for question in ("one", "two"):
        chat.ask(question)
        chat.answer(question.upper())
    assert chat.retry() == "two"
    assert contents(chat) == ["one", "ONE", "two"]
    chat.reset()
    assert (contents(chat), chat.retry()) == ([], None)


# ── what reaches the terminal ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("1\u00a0000\u3000x", "1\u00a0000\u3000x"),
        ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J\rx\x7f", "\\x9b2J\\rx\\x7f"),
        ("\u202egnirts\ud800", "\\u202egnirts\\ud800"),
    ],
)
def test_readable_text_cannot_control_a_terminal(text: str, shown: str) -> None:
    assert readable(text) == shown


def test_the_measures_of_an_answer_are_one_line() -> None:
    ending = Ending("stop", prompt_tokens=40, cached_tokens=32, tokens=11)
    assert measured(ending, [0.25, 0.5, 1.25]) == (
        "11 tokens, 10.0 tokens/s, TTFT 0.25 s, 32 of 40 prompt tokens cached"
    )
    assert measured(Ending("length", tokens=1), [0.5]).startswith("1 tokens, TTFT 0.50 s, cut: ")
    assert measured(Ending("stop"), []) == "an empty answer"


# ── finding the server ───────────────────────────────────────────────────────────────────────────────────────────────


def found(*argv: str) -> tuple[str, str]:
    endpoint = find_endpoint(parser().parse_args(list(argv)))
    return endpoint.url, endpoint.named_by


def test_flags_come_before_the_environment_before_state_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == (DEFAULT_URL, "")
    with announced(8123, "m", "s:1", "c:1", url="http://127.0.0.1:8123"):
        assert found() == ("http://127.0.0.1:8123", "server 8123 (m)")
        monkeypatch.setenv("PACELINE_URL", "https://x.example/v1/")
        assert found() == ("https://x.example", "PACELINE_URL")
        assert found("--server", "8123")[0] == "http://127.0.0.1:8123"
        assert found("--url", "http://y:1/v1") == ("http://y:1", "--url")
        monkeypatch.delenv("PACELINE_URL")
        monkeypatch.setenv("PACELINE_SERVER", "nope")
        with pytest.raises(NoAddress, match="PACELINE_SERVER: there is no server 'nope'"):
            found()


def test_a_state_file_of_an_earlier_version_has_a_port_alone(tmp_path: Path) -> None:
    with announced(8123, "m", "s:1", "c:1", url="http://127.0.0.1:8123") as announcement:
        path = tmp_path / "paceline" / "servers" / "8123.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in values.items() if name not in ("url", "http_cert")}))
        assert found()[0] == "http://127.0.0.1:8123"
        announcement.write()


def test_the_certificate_of_this_machines_server_is_trusted_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = make_certificates(tmp_path / "certs"), make_certificates(tmp_path / "other")
    paths = TlsPaths.of(folder, "gateway")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(paths.cert, paths.key)
    with scripted_openai(tls) as script:
        port = int(script.url.rpartition(":")[2])
        with announced(port, "m", "s:1", "c:1", str(folder), script.url, str(paths.cert)):
            script.streams({"content": "found"})
            assert main(["chat", "hi"]) == 0
        script.streams({"content": "named"})
        assert main(["chat", "--url", script.url, "--tls-dir", str(folder), "hi"]) == 0
        assert capsys.readouterr() == ("found\nnamed\n", "")
        for flags in ([], ["--tls-dir", str(other)]):
            line = failure(capsys, 1, "--url", script.url, *flags, "hi")
            assert line.startswith(f"{script.url}: no TLS connection, see --tls-dir: ")
    line = failure(capsys, 2, "--url", script.url, "--tls-dir", str(tmp_path / "none"), "hi")
    assert line == f"--tls-dir {tmp_path / 'none'}: ca.pem: No such file or directory"


@pytest.mark.parametrize("url", ["ftp://x", "x:8000", "http://", "http://x:99999", "http://x:p"])
def test_an_invalid_url_gets_one_error_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "hi"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("paceline chat: --url: an HTTP address like http://127.0.0.1:8000 is needed")
    assert line.count("\n") == 1


# ── one question ─────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(openai: ScriptedOpenAI, *argv: str) -> int:
    return main(["chat", "--url", openai.url, *argv])


def test_one_question_prints_the_answer_and_nothing_else(
    openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.streams({"reasoning_content": "hm"}, {"content": "a\x1b[2J\u2028"}, {"content": "b"})
    assert ask(openai, "--system", "s", "--max-tokens", "5", "--temperature", "0", "what", "is it?") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("a\x1b[2J\u2028b\n", ""), "a file gets the model's text unchanged, and no reasoning"
    [body] = openai.asked
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 5, 0.0)
    assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "what is it?"}]


def test_the_question_may_come_from_standard_input(
    openai: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.streams({"content": "4"})
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert ask(openai) == 0
    assert openai.asked[0]["messages"] == [{"role": "user", "content": "two\nlines"}]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert ask(openai) == 2
    assert capsys.readouterr().err == (
        "paceline chat: there is no question: give it as an argument or on standard input\n"
    )


def test_an_api_key_is_sent_and_an_invalid_key_is_refused(
    openai: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "k1")
    openai.streams({"content": "x"})
    assert ask(openai, "hi") == 0
    assert openai.keys == ["Bearer k1"]
    assert ask(openai, "--api-key", "k\n2", "hi") == 2


def failure(capsys: pytest.CaptureFixture[str], status: int, *argv: str) -> str:
    assert main(["chat", *argv]) == status
    line = capsys.readouterr().err
    assert line.startswith("paceline chat: ")
    assert line.count("\n") == 1
    return line.removeprefix("paceline chat: ").rstrip()


def test_without_a_server_the_line_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("services.cli.http.endpoint.DEFAULT_URL", url)
    line = failure(capsys, 1, "hi")
    assert line.startswith(f"no server answers at {url} (")
    assert line.endswith("; no `paceline up` runs here: start one with `paceline up`, or name a server with --url")
    assert failure(capsys, 1, "--url", url, "hi").endswith("; the address is that of --url")


@pytest.mark.parametrize(
    ("status", "said", "line"),
    [
        (400, "the context is full", "the context is full"),
        (401, "no key", "no key; set PACELINE_API_KEY, or give --api-key"),
        (429, "later\n\x1b[2J", "later \\x1b[2J"),
    ],
)
def test_a_refusal_gets_one_error_line(
    openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str], status: int, said: str, line: str
) -> None:
    openai.refuses(status, said)
    assert failure(capsys, 1, "--url", openai.url, "hi") == line


def test_a_server_of_another_kind_gets_one_error_line(
    openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.answers.append((404, b"<html>"))
    assert "answered 404: it may be no OpenAI server" in failure(capsys, 1, "--url", openai.url, "hi")
    openai.answers.append((200, b"data: {not json\n\n"))
    assert "an event that is no JSON" in failure(capsys, 1, "--url", openai.url, "hi")


def test_an_answer_that_ends_early_is_an_error(openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    openai.streams({"content": "half"}, reason=None)
    assert main(["chat", "--url", openai.url, "hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "half\n"
    assert err == "paceline chat: the server ended the answer in the middle; ask again\n"
    openai.streams_events({"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "the worker is gone"}})
    assert main(["chat", "--url", openai.url, "hi"]) == 1
    assert capsys.readouterr() == ("a\n", "paceline chat: the worker is gone\n")


def test_a_cut_answer_says_so(openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    openai.streams({"content": "a"}, reason="length")
    assert ask(openai, "hi") == 0
    assert capsys.readouterr().err == "paceline chat: the answer is cut: the limit of tokens is reached\n"


def test_a_question_that_is_not_utf_8_gets_one_error_line(
    openai: ScriptedOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure(capsys, 1, "--url", openai.url, os.fsdecode(b"\xff")) == "the question is not UTF-8"


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Typed:
    """A person at a terminal. `lines`: what the person types, in order. For an exception class, input() raises it. At
    the end, the person types Ctrl-D."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
        self._lines: list[Any] = [*lines, EOFError]
        monkeypatch.setattr(builtins, "input", self._input)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)

    def _input(self, _: str) -> str:
        line = self._lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich writes as if to a terminal with 200 columns."""
    console = lambda: Console(force_terminal=True, width=200, highlight=False, markup=False)  # noqa: E731
    monkeypatch.setattr("services.cli.chat.main.console", console)


@pytest.mark.usefixtures("terminal")
def test_the_loop_keeps_the_history_and_goes_on_after_a_refusal(
    openai: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.streams({"reasoning_content": "hm\x1b[2J"}, {"content": "one\x1b[2J"})
    openai.refuses(400, "the context is full")
    openai.streams({"content": "two"})
    openai.streams({"content": "three"})
    questions = ("/retry", "first", "second", "/retry", KeyboardInterrupt)
    Typed(monkeypatch, *questions, "/nope\x1b", "/system s", "/reset", "third")
    assert ask(openai) == 0
    out = capsys.readouterr().out
    assert [len(body["messages"]) for body in openai.asked] == [1, 3, 3, 2]
    assert openai.asked[1] == openai.asked[2], "a refused question is asked again by /retry"
    assert openai.asked[3]["messages"][0] == {"role": "system", "content": "s"}
    assert "\x1b[2J" not in out
    assert "\x1b[2mhm\\x1b[2J\x1b[0m\none\\x1b[2J\n" in out, "reasoning is dim, and apart from the answer"
    for line in (
        "there is no question yet",
        "the context is full; /reset starts a new conversation",
        "there is no command /nope\\x1b (see /help)",
        "Ctrl-D or /exit ends the chat",
        "1 tokens, TTFT ",
    ):
        assert line in out


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_stops_the_answer_and_keeps_its_beginning(
    openai: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.streams({"content": "be"}, {"content": "STOP"}, {"content": "gone"})
    openai.streams({"content": "next"})
    Typed(monkeypatch, "first", "second", "/exit")
    write = "services.cli.chat.display.Display._write"
    from services.cli.chat.display import Display

    original = Display._write

    def interrupted(self: Display, text: str, begins: bool) -> None:
        if text == "STOP":
            raise KeyboardInterrupt
        original(self, text, begins)

    monkeypatch.setattr(write, interrupted)
    assert ask(openai) == 0
    assert [message["content"] for message in openai.asked[1]["messages"]] == ["first", "be", "second"]
    out = capsys.readouterr().out
    assert "stopped" in out
    assert "gone" not in out
