"""Files that are replaced atomically, where something else than a file stands in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.node.storage.atomic_file import write_atomically


def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not an ordinary file") as caught:
        write_atomically(pipe, lambda file: file.write(b"content"))
    assert caught.value.filename == str(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_folder_that_is_missing_is_said_of_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "no" / "file"
    with pytest.raises(FileNotFoundError, match="No such file") as caught:
        write_atomically(path, lambda file: file.write(b"content"))
    assert caught.value.filename == str(path)
