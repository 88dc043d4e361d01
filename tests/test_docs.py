"""The pages: links lead somewhere, commands parse, examples are the plugin's, what is made from the code is current."""

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import hiddenlab
from hiddenlab.eval.gpu import __main__ as gpu
from hiddenlab.eval.gpu import pack
from hiddenlab.registry import BUILTINS
from tests import docs_check, reference
from tests.docs_check import ROOT, Block
from tests.test_report import read_command

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BUILT = {ROOT / "docs" / "results" / "report.html"}  # by make report
SHELL_BLOCKS = [block for page in docs_check.pages() for block in docs_check.commands(page)]
COMMANDS = dict(reference.commands())
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Of torchrun, of twine, and of llama-embedding.
OTHERS_OPTIONS = {"--nproc-per-node", "--strict", "--pooling", "--embd-normalize", "--embd-output-format"}
LANGUAGES = {*docs_check.SHELL, "python", "toml", "json", "text", ""}


def prose(page: Path) -> str:
    """A page without its fenced blocks and inline code."""
    text = docs_check.FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", lambda match: "" if "](" in match[0] else match[0], text)


@cache
def anchors(page: Path) -> set[str]:
    """What a link may name in a page, as GitHub makes it of headings."""
    heads = re.findall(r"^#+ (.*)$", docs_check.FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(page: Path, text: str) -> list[str]:
    """The links of a text that lead nowhere from a page."""
    found = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if path in BUILT:
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, prose(page)) == []


def test_a_broken_link_is_noticed() -> None:
    text = "[a](docs/nothing.md) [b](docs/start.md#nothing) [c](docs/how-to/attack.md#options) [d](https://x.org)"
    assert broken(ROOT / "README.md", text) == ["docs/nothing.md", "docs/start.md#nothing"]


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_of_the_manual_stands_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    for page in docs_check.pages():
        if docs in page.parents and page.name != "README.md" and page.parent.name != "reference":
            assert f"]({page.relative_to(docs).as_posix()})" in index, page
    for notebook in docs.glob("*.ipynb"):
        assert f"]({notebook.name})" in index, notebook.name


def test_every_entry_of_the_log_stands_in_its_index_newest_first() -> None:
    log = ROOT / "docs" / "log"
    entries = sorted(path.name for path in log.glob("[0-9]*.md"))
    assert [int(name[:3]) for name in entries] == list(range(1, len(entries) + 1))
    index = re.findall(r"^- \[\d{3}\]\((\S+)\)", (log / "README.md").read_text(encoding="utf-8"), re.M)
    assert index == entries[::-1]


def test_pages_made_from_the_code_are_up_to_date() -> None:
    """If this fails, run ``make reference``."""
    made = reference.pages()
    folder = ROOT / "docs" / "reference"
    assert {f"reference/{path.name}" for path in folder.iterdir() if path.name not in reference.BY_HAND} == {
        n for n in made if "/" in n
    }
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: run 'make reference'"


def test_the_site_says_of_every_public_name_what_the_code_says() -> None:
    """docs/conf.py finds the names by the form of the page's headings."""
    pytest.importorskip("sphinx", reason="the site is not built here")
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    source = [(ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")]
    conf["add_api"](None, "reference/api", source)
    for name in hiddenlab.__all__:
        assert re.search(rf"^\.\. auto(class|function|module):: hiddenlab\.{name}$", source[0], re.M), name


def test_every_source_file_says_what_it_is() -> None:
    for room in reference.ROOMS:
        for path in reference.sources(room):
            assert reference.first_line(path), path


def test_the_examples_are_the_plugin_that_a_test_installs() -> None:
    plugin = ROOT / "tests" / "plugin"
    pages = [ROOT / "docs" / "how-to" / name for name in ("own-defense.md", "own-attack.md", "plugin.md")]
    shown = {block.text for page in pages for block in docs_check.blocks(page)}
    for name in ("rounding.py", "nearest.py"):
        source = (plugin / "hiddenlab_example" / name).read_text(encoding="utf-8")
        assert f"# hiddenlab_example/{name}\n{source}" in shown, name
    assert (plugin / "pyproject.toml").read_text(encoding="utf-8") in shown


def test_the_path_of_one_attack_names_functions_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## The path of one attack")[2].partition("\n## ")[0]
    hops = re.findall(r"`([\w/]+\.py):([\w.]+)`", section)
    assert len(re.findall(r"^\d+\. ", section, re.M)) <= 12 and len(hops) >= 12
    for name, function in hops:
        scope: Any = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for part in function.split("."):
            scope = next((node for node in scope.body if getattr(node, "name", None) == part), None)
            assert scope is not None, f"{name}:{function}"


# ---- commands


def called(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block, as the shell would part them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|()"):
                words.append(word)
            elif words:
                yield words[: words.index(">")] if ">" in words else words
                words = []


def check(words: list[str]) -> None:
    """Parse a command of ours without running it; one of others has to be known here."""
    if words[0] == "hiddenlab":
        name = " ".join(words[:3]) if " ".join(words[:3]) in COMMANDS else " ".join(words[:2])
        assert name in COMMANDS, f"there is no command {' '.join(words[:3])}"
        COMMANDS[name].make_context(name, words[len(name.split()) :])
        if name == "hiddenlab eval" and words[2] != "all":
            read_command(words)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), words
    elif words[0].partition("=")[0] == "PYTHONPATH":
        check(words[1:])
    elif words[0].endswith(("python", "python3")):
        assert words[1] == "-c" or (words[1] == "-m" and (words[2] == "pytest" or find_spec(words[2]))), words
    else:
        assert words[0] in ("git", "cd", "echo", "curl", "source") or words[0].endswith("=$"), words


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_a_command_of_the_pages_parses(block: Block) -> None:
    for words in called(block):
        check(words)


def test_a_command_that_there_is_not_is_noticed() -> None:
    for wrong in (
        "hiddenlab atack x",
        "hiddenlab attack --serach greedy",
        "hiddenlab eval table-0",
        "make nothing",
    ):
        block = Block(ROOT / "README.md", 1, "sh", f"hiddenlab list attacks  # right\n{wrong}\n", None)
        with pytest.raises(Exception):  # noqa: B017
            for words in called(block):
                check(words)


def inline(page: Path) -> list[str]:
    """The inline code of a page."""
    text = docs_check.FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`\n]+)`", text)


@cache
def options() -> set[str]:
    """Every option of every command, and of the two programs for graphics cards."""
    found = {*OTHERS_OPTIONS, "--help", "--version"}
    programs = []
    for main in (gpu.main, pack.main):
        program = typer.Typer(add_completion=False)
        program.command()(main)
        programs.append(typer.main.get_command(program))
    for command in [*COMMANDS.values(), *programs]:
        found |= {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
    return found


@pytest.mark.parametrize("page", docs_check.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_an_option_that_the_text_names_exists(page: Path) -> None:
    named = {option for code in inline(page) for option in OPTION.findall(code)}
    assert sorted(named - options()) == []


@pytest.mark.parametrize(
    ("kind", "name"), [("attacks", "choose-an-attack.md"), ("defenses", "choose-a-defense.md")]
)
def test_the_manual_explains_every_attack_and_defense(kind: str, name: str) -> None:
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8"), re.M)
    explained = {re.split(r"[:\s]", name)[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert explained == set(BUILTINS[kind])


def test_commands_in_the_text_of_the_readme_parse() -> None:
    found = [
        shlex.split(code) for code in inline(ROOT / "README.md") if code.startswith(("hiddenlab ", "make "))
    ]
    assert len(found) >= 5
    for words in found:
        check(words)


def test_fenced_blocks_say_what_they_hold() -> None:
    """A block without a language would never be run."""
    for page in docs_check.pages():
        for block in docs_check.blocks(page):
            assert block.language in LANGUAGES, str(block)
            assert block.language or not re.search(r"^(hiddenlab|make|python\S*) ", block.text, re.M), str(
                block
            )
