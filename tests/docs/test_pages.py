"""What the pages name exists: files, flags, variables, commands, names of kvd; and what they quote is what runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import click
import pytest

from kvd.config import all_settings
from kvd_cli.program import cli
from tests.docs.sources_harness import ROOT, texts

PAGES = sorted((ROOT / "docs").glob("*.md"))
NOTES = sorted((ROOT / "docs" / "notes").glob("*.md"))
WITH_README = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, ROOT / "deploy" / "README.md"]
OF_OTHERS = {"--name-only", "--now", "--upgrade", "--launcher", "--create", "--nproc-per-node"}
"""Flags of the other programs that a page shows."""
FILES_AND_GROUPS = (
    "compressors",
    "toml",
    "key",
    "env",
    "target",
    "conf",
    "sysusers.conf",
    "tmpfiles.conf",
    "commands",
    "optimizers",
    "stores",
)
"""What follows `kvd.` in the names of files, and of groups of entry points."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+(?![a-z<])")
TOOL = re.compile(r"python -m ((?:benchmarks|tests)(?:\.\w+)+)([^`\n#]*)")
"""A program of a checkout, and its arguments."""
INSTALLS_KVD = re.compile(r"(?:pip|pipx|uv|conda)(?: [\w-]+)* (?:install|add|run)(?: [\w-]+)* ['\"]?kvd\b")
"""Neither `kvd` nor `kvd-ps` of a registry is ours."""

every_page = pytest.mark.parametrize("page", WITH_README, ids=lambda page: str(page.relative_to(ROOT)))
every_page_for_users = pytest.mark.parametrize(  # that of figures has the benchmarks' flags and names as well
    "page",
    [page for page in WITH_README if page.name != "performance.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_of(page: Path) -> str:
    """What stands in backticks, and in blocks of code."""
    text = text_of(page)
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))])


def commands(command: click.Command, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command of `kvd`, by its words."""
    found = {path: command}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found |= commands(inner, (*path, name))
    return found


COMMANDS = commands(cli)
FLAGS = {flag for command in COMMANDS.values() for option in command.params for flag in option.opts}
TOOLS = [ROOT / "tests" / "faults" / "ledger.py", ROOT / "tests" / "simulation" / "compare.py"]
PROGRAMS = [*(ROOT / "examples").glob("*.py"), *TOOLS]
FLAGS |= {flag for path in PROGRAMS for flag in re.findall(r"\"(--[a-z-]+)\"", text_of(path))}
FLAGS |= {setting.flag for setting in all_settings()} | {"--help"} | OF_OTHERS


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(page)):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@every_page
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text_of(page)):
        other = text_of(page.parent / target if target else page)
        headings = {
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in re.findall(r"^#+ (.+)$", other, re.M)
        }
        assert heading in headings


@every_page
def test_paths_of_files_exist(page: Path) -> None:
    for path in re.findall(r"`((?:docs|examples|deploy|tests)/[\w./-]*\w)`", text_of(page)):
        assert (ROOT / path).exists(), path


@every_page_for_users
def test_flags_exist(page: Path) -> None:
    assert set(FLAG.findall(TOOL.sub("", code_of(page)))) <= FLAGS


@pytest.mark.parametrize("page", [*WITH_README, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_tools_of_developers_and_their_flags_exist(page: Path) -> None:
    for name, rest in TOOL.findall(text_of(page)):
        file = ROOT / f"{name.replace('.', '/')}.py"
        assert file.exists() or (file.with_suffix("") / "__main__.py").exists(), name
        texts_of_module = [text_of(path) for path in (file, ROOT / "benchmarks" / "arguments.py") if path.exists()]
        known = set(re.findall(r"\"(--[a-z-]+)\"", "\n".join(texts_of_module)))
        assert set(FLAG.findall(rest)) <= known, name


@every_page
def test_variables_exist(page: Path) -> None:
    known = {setting.env for setting in all_settings()} | {
        name for setting in all_settings() for name in setting.fallback
    }
    named = set(re.findall(r"\b(?:KVD|DMLC)_[A-Z_]*[A-Z]\b", text_of(page)))
    assert {name for name in named - known if name not in texts()} <= {"KVD_WORKER_COMMAND"}


@every_page_for_users
def test_commands_exist(page: Path) -> None:
    for line in re.findall(r"(?:^|`)kvd ([a-z][a-z-]*(?: [a-z-]+)?)", code_of(page), re.MULTILINE):
        words = tuple(line.split())
        assert words in COMMANDS or words[:1] in COMMANDS, f"kvd {line}"


@every_page
def test_names_of_kvd_exist(page: Path) -> None:
    for name in re.findall(r"(?<![\w./-])kvd\.(\w+(?:\.\w+)*)", code_of(page)):
        assert name.removesuffix(".example") in FILES_AND_GROUPS or exists(f"kvd.{name}"), f"kvd.{name}"


def exists(name: str) -> bool:
    """Whether it is a module, or something in one."""
    try:
        importlib.import_module(name)
    except ImportError:
        parent, _, last = name.rpartition(".")
        return bool(parent) and exists(parent) and hasattr(found(parent), last)
    return True


def found(name: str) -> Any:
    """The module or the thing with this name, which exists."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parent, _, last = name.rpartition(".")
        return getattr(found(parent), last)


@pytest.mark.parametrize("page", [*WITH_README, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_a_package_of_strangers(page: Path) -> None:
    assert not INSTALLS_KVD.search(text_of(page))


def test_no_message_installs_a_package_of_strangers() -> None:
    assert not [text for text in texts() if INSTALLS_KVD.search(text)]


@every_page
def test_programs_are_valid_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_the_index_lists_every_page_and_example() -> None:
    index = text_of(ROOT / "docs" / "index.md")
    for page in PAGES:
        assert page.name == "index.md" or f"]({page.name})" in index, page.name
    for example in (ROOT / "examples").glob("*.py"):
        assert f"`{example.name}`" in index, example.name
    assert "](docs/index.md)" in text_of(ROOT / "README.md")


def test_long_pages_have_a_table_of_contents() -> None:
    """A page of more than 250 lines links to its sections at its top, the one on the architecture excepted."""
    assert all(len(text_of(note).splitlines()) <= 200 for note in NOTES)
    for page in PAGES:
        text = text_of(page)
        if len(text.splitlines()) > 250 and page.name != "architecture.md":
            top, _, rest = text.partition("\n## ")
            sections = len(re.findall(r"^## ", "\n## " + rest, re.MULTILINE))
            assert len(re.findall(r"^- \[[^]]+\]\(#", top, re.MULTILINE)) >= sections - 1, page.name


def test_the_checkpoint_page_quotes_the_example() -> None:
    example = text_of(ROOT / "examples" / "checkpoint.py")
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(ROOT / "docs" / "checkpoints.md"), re.MULTILINE | re.DOTALL)
    quoted = [block for block in blocks if block.startswith("def ")]
    assert len(quoted) == 2
    for block in quoted:
        assert block in example
