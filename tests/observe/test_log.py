"""The log: both formats, and that nothing which is logged can break it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.observe.log import MAX_ITEMS, MAX_TEXT, JsonFormatter, TextFormatter, Throttle, configure, event, level_of

log = logging.getLogger("kvd.test")


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def record(message: object, /, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvd.test", logging.INFO, __file__, 1, message, args, None)
    made.kvd = fields
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_a_json_line() -> None:
    stream = io.StringIO()
    configure("auto", "info", "server 1", stream)
    event(log, logging.INFO, "joined 100%", rank=1, address="tcp://a:1", waited_s=0.5, keys=["w", ("b", None)])
    log.debug("not written")
    (line,) = json_lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "info",
        "node": "server 1",
        "logger": "kvd.test",
        "message": "joined 100%",
        "rank": 1,
        "address": "tcp://a:1",
        "waited_s": 0.5,
        "keys": ["w", ["b", None]],
    }


def test_the_time_is_utc() -> None:
    assert json.loads(JsonFormatter("x").format(record("m")))["ts"] == "2023-11-14T22:13:20.250Z"


def log_error(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("failed")


def test_an_exception_is_fields_of_one_line() -> None:
    stream = io.StringIO()
    configure("json", "info", "server 1", stream)
    log_error("two\nlines")
    (line,) = json_lines(stream)
    assert line["exception"] == "ValueError: two\nlines"
    assert line["traceback"].startswith("Traceback")
    assert stream.getvalue().count("\n") == 1


def test_fields_do_not_hide_what_every_line_has() -> None:
    line = json.loads(JsonFormatter("x").format(record("m", message="mine", level=3)))
    assert (line["message"], line["message_"], line["level"], line["level_"]) == ("m", "mine", "info", 3)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 << 80, str(1 << 80)),
        (b"\xff", r"b'\xff'"),
        ("\ud800\n", "\ud800\n"),
        (Broken(), "<Broken without text>"),
        ({1: {2: {3: {4: {5: 6}}}}}, {"1": {"2": {"3": {"4": "{5: 6}"}}}}),
        ({Broken(): 1}, {"<Broken without text>": 1}),
        (list(range(1000)), list(range(MAX_ITEMS))),
        ("x" * 100_000, "x" * MAX_TEXT),
        pytest.param(10**5000, "<int without text>", id="a number that Python refuses to print"),
    ],
)
def test_odd_values(value: object, written: object) -> None:
    line = JsonFormatter("x").format(record("m", value=value))
    assert json.loads(line)["value"] == written
    assert line.isascii()
    TextFormatter("x", colour=True).format(record("m", value=value))


def test_a_list_that_contains_itself() -> None:
    loop: list[object] = []
    loop.append(loop)
    json.loads(JsonFormatter("x").format(record("m", value=loop)))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.text(), st.dictionaries(st.text(), json_like, max_size=4))
def test_any_text_and_fields_are_one_line(message: str, fields: dict[str, object]) -> None:
    made = record(message)
    made.kvd = fields
    line = JsonFormatter("server 1").format(made)
    assert "\n" not in line
    assert json.loads(line)["message"] == message
    text = TextFormatter("server 1", colour=False).format(made)
    assert text.isprintable()
    assert len(text.splitlines()) == 1


def test_arguments_that_do_not_fit() -> None:
    assert json.loads(JsonFormatter("x").format(record("%d %d", "one")))["message"] == "%d %d ('one',)"
    assert "without text" in JsonFormatter("x").format(record(Broken()))
    made = record("m")
    made.kvd = "not a mapping"
    assert json.loads(JsonFormatter("x").format(made))["message"] == "m"


def test_an_exception_without_text() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for formatter in (JsonFormatter("x"), TextFormatter("x", colour=False)):
        made = record("m")
        made.exc_info = (Silent, Silent(), None)
        assert "Silent" in formatter.format(made)


def test_an_exception_that_breaks_its_own_traceback() -> None:
    class Hostile(Exception):
        @property
        def __cause__(self) -> BaseException:  # type: ignore[override]
            raise RuntimeError

    for formatter in (JsonFormatter("x"), TextFormatter("x", colour=False)):
        made = record("m")
        made.exc_info = (Hostile, Hostile("text"), None)
        assert "text" in formatter.format(made)


# --- text ------------------------------------------------------------------------------------------------------------


def test_a_text_line() -> None:
    stream = Terminal()
    configure("auto", "info", "worker 0", stream, colour=False)
    event(log, logging.INFO, "joined", rank=1, why="by name", empty="", equation="a=b")
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d worker 0  joined rank=1 why="by name" empty="" equation="a=b"\n', stream.getvalue()
    )


def test_warnings_and_errors_name_their_level_without_colour() -> None:
    stream = io.StringIO()
    configure("text", "warning", "worker 0", stream)
    log.info("not written")
    log.warning("slow")
    log.error("gone")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("worker 0  warning: slow")
    assert second.endswith("worker 0  error: gone")


def test_colour_follows_the_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for variable, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", variable)
        stream = Terminal()
        configure("text", "info", "worker 0", stream)
        event(log, logging.ERROR, "gone", node="server 1")
        assert ("\x1b[31m" in stream.getvalue()) is coloured


def test_a_peer_cannot_speak_to_the_terminal() -> None:
    line = TextFormatter("x", colour=False).format(record("\x1b[2Jhi\r\nforged", **{"k\n": "\x07"}))
    assert line.endswith(r"x  \x1b[2Jhi\r\nforged k\n=\x07")


def test_a_traceback_is_indented() -> None:
    stream = io.StringIO()
    configure("text", "info", "x", stream)
    log_error("bad \x1b")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("error: failed")
    assert all(line.startswith("    ") for line in rest)
    assert rest[-1] == r"    ValueError: bad \x1b"


# --- the stream ------------------------------------------------------------------------------------------------------


def test_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("json", "info", "server", first)
    configure("json", "info", "server 1", second)
    log.info("once")
    assert first.getvalue() == ""
    assert json_lines(second)[0]["node"] == "server 1"


def test_stderr_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info", "server 1")
    log.info("here")
    assert json.loads(capsys.readouterr().err)["message"] == "here"


def test_a_stream_with_a_narrow_encoding() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    configure("text", "info", "x", stream)
    log.info("≥ 1")
    assert raw.getvalue().endswith(b"\\u2265 1\n")


def test_a_closed_stream_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure("text", "info", "x", stream)
    stream.close()
    log.info("into the void")
    assert capsys.readouterr().err == ""


def test_unknown_formats_and_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="expected auto, text or json"):
        configure("xml", "info", "x", io.StringIO())
    with pytest.raises(ValueError, match="LOUD"):
        configure("text", "loud", "x", io.StringIO())


# --- the throttle ----------------------------------------------------------------------------------------------------


def test_one_warning_per_interval_and_kind() -> None:
    throttle = Throttle(10.0)
    assert throttle.allow(0.0, "a")
    assert throttle.swallowed("a") == 0
    assert [throttle.allow(t, "a") for t in (1.0, 9.9)] == [False, False]
    assert throttle.allow(5.0, "b")
    assert throttle.allow(10.0, "a")
    assert throttle.swallowed("a") == 2
    assert throttle.swallowed("b") == throttle.swallowed("never seen") == 0
    assert throttle.allow(20.0, "a")
    assert throttle.swallowed("a") == 0
    assert throttle.total_swallowed == 2


def test_many_kinds_of_warnings_do_not_fill_the_memory() -> None:
    throttle = Throttle(10.0, max_keys=2)
    assert all(throttle.allow(0.0, str(kind)) for kind in range(100))
    assert len(throttle._kinds) == 2
    assert not throttle.allow(0.0, "99")
    assert throttle.allow(0.0, "0")


@pytest.mark.parametrize("format_name", ["text", "json"])
@pytest.mark.parametrize("node", ["scheduler", "server 1"])
def test_the_level_of_a_line_that_was_written(format_name: str, node: str) -> None:
    stream = io.StringIO()
    configure(format_name, "debug", node, stream, colour=False)
    levels = [logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL]
    for level in levels:
        event(log, level, "it says  warning: x", rank=1)
    assert [level_of(line.encode()) for line in stream.getvalue().splitlines()] == levels


@pytest.mark.parametrize(
    "line", [b"", b"Traceback (most recent call last):", b"    at 12:00:00 a  b", b'{"ts":1}', b'{"ts":']
)
def test_other_lines_have_no_level(line: bytes) -> None:
    assert level_of(line) is None
