"""Values as text: what each kind accepts and refuses, exactly, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.config import Config, load, named_setting
from kvd.errors import ConfigError

Refusal = Callable[..., ConfigError]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 1 << 16),
        ("512KiB", 512 << 10),
        ("512 kib", 512 << 10),
        ("1MiB", 1 << 20),
        ("8M", 8 << 20),
        ("8MB", 8 << 20),
        ("0.5M", 1 << 19),
        ("4096B", 4096),
        ("1G", 1 << 30),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert named_setting("memory_limit_bytes").parse(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("300ms", 0.3),
        ("2s", 2.0),
        ("1m", 60.0),
        ("1.5 h", 5400.0),
        ("20", 20.0),
        ("0.25", 0.25),
        (3, 3.0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert named_setting("worker_timeout_s").parse(text) == seconds


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("no", False), ("0", False)])
def test_booleans(text: str, value: bool) -> None:
    assert load(environ={"KVD_INSECURE": text}).config.insecure is value


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("memory_limit_bytes", "1.3KiB"),
        ("memory_limit_bytes", "0.3B"),
        ("memory_limit_bytes", "-1"),
        ("memory_limit_bytes", "1e6"),
        ("memory_limit_bytes", "9" * 30),
        ("memory_limit_bytes", 1.5),
        ("memory_limit_bytes", "٣"),
        ("slice_bytes", "4095"),
        ("slice_bytes", "17MiB"),
        ("num_workers", "two"),
        ("num_workers", "1_000"),
        ("num_workers", "-1"),
        ("num_workers", True),
        ("num_shards", "0"),
        ("rounds_ahead", 0),
        ("staleness", "-1"),
        ("replicas", 3),
        ("heartbeat_interval_s", "0"),
        ("quorum", -1),
        ("quorum", 1.5),
        ("quorum_grace_s", 0),
        ("quorum_grace_s", "inf"),
        ("heartbeat_interval_s", "nan"),
        ("heartbeat_interval_s", float("nan")),
        ("heartbeat_interval_s", float("inf")),
        ("heartbeat_interval_s", "1e999"),
        ("heartbeat_interval_s", "1 day"),
        ("heartbeat_interval_s", True),
        ("heartbeat_interval_s", b"1"),
        ("insecure", "maybe"),
        ("insecure", 1),
        ("shared_memory", "on"),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("role", "joint"),
        ("on_worker_loss", "ignore"),
        ("scheduler", 9191),
        ("state_dir", "a\0b"),
    ],
)
def test_a_bad_value_is_named_with_its_origin_and_what_is_accepted(name: str, raw: object, refusal: Refusal) -> None:
    error = refusal({name: raw})
    assert error.setting == name
    assert str(error) == f"{name} = {raw!r} (from flag): expected {named_setting(name).accepted()}"
    with pytest.raises(ConfigError, match="from keyword"):
        Config(**{name: raw})  # type: ignore[arg-type]
    if isinstance(raw, str) and "\0" not in raw:
        assert f"from KVD_{name.upper()}" in str(refusal(environ={f"KVD_{name.upper()}": raw}))


def test_config_takes_text_and_holds_numbers() -> None:
    config = Config(slice_bytes="64KiB", heartbeat_interval_s="250ms", state_dir=Path(__file__))  # type: ignore[arg-type]
    assert (config.slice_bytes, config.heartbeat_interval_s, config.state_dir) == (65536, 0.25, __file__)


# --- large numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        ("9007199254740993", 2**53 + 1),  # the first whole number that no float holds
        (" +9007199254740993 ", 2**53 + 1),
        ("999999999999999999", 10**18 - 1),
        ("000000000000000007", 7),
        (2**53 + 1, 2**53 + 1),
        (10**18 - 1, 10**18 - 1),
        (10**18, 10**18),
        ("9223372036854775807", 2**63 - 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_large_whole_numbers_are_read_exactly(raw: str | int, number: int) -> None:
    for name in ("staleness", "num_workers"):
        assert named_setting(name).parse(raw) == number
    assert load(environ={"KVD_STALENESS": str(raw)}).config.staleness == number
    assert load({"staleness": raw}, environ={}).config.staleness == number


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993.0", 2**53 + 1),
        ("123456789123456789 B", 123456789123456789),
        ("123456789123456789", 123456789123456789),
        ("8796093022209KiB", 8796093022209 << 10),
        ("8796093022209.0009765625KiB", (8796093022209 << 10) + 1),
        ("888888 TiB", 888888 << 40),
        (123456789123456789, 123456789123456789),
        (2**63 - 1, 2**63 - 1),
        ("1073741824GiB", 2**60),
    ],
)
def test_large_sizes_are_read_exactly(raw: str | int, size: int) -> None:
    assert named_setting("memory_limit_bytes").parse(raw) == size
    assert load(environ={"KVD_MEMORY_LIMIT_BYTES": str(raw)}).config.memory_limit_bytes == size


def test_large_numbers_of_a_file_are_read_exactly(tmp_path: Path) -> None:
    (tmp_path / "kvd.toml").write_text('staleness = 9007199254740993\nmemory_limit_bytes = "123456789123456789 B"\n')
    config = load(environ={}).config
    assert (config.staleness, config.memory_limit_bytes) == (2**53 + 1, 123456789123456789)


@pytest.mark.parametrize("name", ["staleness", "rounds_ahead", "memory_limit_bytes"])
@pytest.mark.parametrize("number", [2**63, 10**19, 2**64 + 1])
def test_a_number_of_more_than_64_bits_is_refused(name: str, number: int, refusal: Refusal) -> None:
    for given in (str(number), f"-{number}", number, -number):
        error = refusal({name: given})
        assert error.setting == name
        assert str(error).startswith(f"{name} = ")
        assert "fits 64 bits" in str(error)
    assert f"{name} = '{number}' (from KVD_{name.upper()})" in str(
        refusal(environ={f"KVD_{name.upper()}": str(number)})
    )


@pytest.mark.parametrize(
    "size", ["8388608TiB", "10" * 9 + "KiB", "1" * 20 + "B", "1." + "0" * 20 + "KiB", "1" * 5000 + "TiB"]
)
def test_a_size_that_comes_to_more_than_64_bits_is_refused(size: str, refusal: Refusal) -> None:
    text = str(refusal({"memory_limit_bytes": size}))
    assert text.startswith(f"memory_limit_bytes = '{size[:199]}")
    assert "(from flag): expected a whole number of bytes that fits 64 bits" in text


@pytest.mark.parametrize("name", ["staleness", "memory_limit_bytes", "num_shards", "heartbeat_interval_s"])
def test_numbers_too_long_for_python_to_print_are_refused(name: str, refusal: Refusal) -> None:
    """Python raises a ValueError when it prints an integer of more than 4300 digits, and when it reads one."""
    for given in ("9" * 5000, 10**5000, -(10**5000)):
        error = refusal({name: given})
        assert error.setting == name
        assert f": expected {named_setting(name).accepted()}" in str(error)
        assert len(str(error)) < 500


def test_an_error_shortens_a_long_value(refusal: Refusal) -> None:
    text = str(refusal({"staleness": "9" * 5000}))
    assert f"staleness = '{'9' * 199}… (from flag)" in text
    assert "staleness = an integer of 16610 bits (from flag)" in str(refusal({"staleness": 10**5000}))


def test_an_integer_too_long_for_the_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "kvd.toml").write_text("staleness = " + "9" * 5000 + "\n")
    assert "cannot read the settings file kvd.toml as TOML: Exceeds the limit" in str(refusal())
