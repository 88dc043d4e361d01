"""The pages: links lead somewhere, commands parse, examples are the plugin's, what is made from the code is current."""

import ast
import re
import runpy
import shlex
import time
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
OTHERS = (
    "cat",
    "cd",
    "cp",
    "curl",
    "echo",
    "git",
    "grep",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "rm",
    "sleep",
    "source",
    "wait",
)
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
        module = words[1] == "-m" and (words[2] == "pytest" or find_spec(words[2]))
        assert words[1] == "-c" or words[1].endswith(".py") or module, words
    else:
        assert words[0] in OTHERS or words[0].endswith("=$"), words


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


# ---- outputs

PAGE = """
```sh
echo one
```

<!-- not refreshed: a test wants it so -->
```text
two
```

```sh
echo three; echo "recorded in $PWD" >&2
```

```text
shown
```

A paragraph.

```text
no output
```

```python
# made.py
print("made in 4.5 s")
```

<!-- not run: it would fail -->
```sh
false
```

```text
five
```

```sh
python \\
    made.py
```

```text
made in 12.25 s
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with commands and outputs, the only one of a repository of its own."""
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(docs_check, "ROOT", tmp_path)
    monkeypatch.setattr(docs_check, "pages", lambda: [path])
    return path


def test_an_output_is_the_text_directly_behind_its_commands(page: Path) -> None:
    paired = [
        (block.text.strip(), block.reason, output and (output.text, output.reason))
        for block, output in docs_check.with_outputs(page)
        if block.language == "sh"
    ]
    assert paired == [
        ("echo one", None, ("two\n", "a test wants it so")),
        ('echo three; echo "recorded in $PWD" >&2', None, ("shown\n", None)),
        ("false", "it would fail", ("five\n", None)),
        ("python \\\n    made.py", None, ("made in 12.25 s\n", None)),
    ]


def test_tables_are_left_out_where_a_page_says_so(page: Path) -> None:
    table = "  costs\n┏━━━┓\n┃ a ┃\n┡━━━┩\n│ 1 │\n└───┘\n"
    (page.parent / "tables.txt").write_text(f"VALID\n{table}{table}{table}the end\n", encoding="utf-8")
    for mark, tables in (
        ("", 3 * table),
        ("<!-- without tables -->\n", "…\n"),
        ("<!-- without tables but the first -->\n", f"{table}…\n"),
    ):
        text = f"```sh\ncat {page.parent}/tables.txt\n```\n\n{mark}```text\n"
        page.write_text(text + "```\n", encoding="utf-8")
        assert docs_check.main(["--refresh"]) == 0
        assert page.read_text(encoding="utf-8") == f"{text}VALID\n{tables}the end\n```\n"


def test_an_output_that_differs_is_reported(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_check.main([]) == 1
    said = capsys.readouterr().out
    assert "page.md:11  the output differs" not in said  # of the block that is marked
    assert re.search(r"the output differs.*-shown\n  \+three\n  \+recorded in ~/lab\n", said, re.S)
    assert said.endswith("3 commands executed on 1 pages, 0 blocks failed, 1 outputs differ\n")
    assert page.read_text(encoding="utf-8") == PAGE


def test_refresh_writes_what_the_commands_print_and_nothing_else(page: Path) -> None:
    assert docs_check.main(["--refresh", "page.md"]) == 0
    expected = PAGE.replace("shown\n", "three\nrecorded in ~/lab\n").replace("12.25", "4.5")
    assert page.read_text(encoding="utf-8") == expected
    assert docs_check.main([str(page)]) == 0


def test_a_page_that_there_is_not_is_an_error(page: Path) -> None:
    with pytest.raises(SystemExit, match=r"no page other\.md"):
        docs_check.main(["other.md"])


def test_times_and_widths_may_change_but_words_may_not() -> None:
    shown = docs_check.stable(
        "│ setup, seconds │   39.3 │\n└──────┘\nin runs/20261128-131713-attack-86ce3d20\n"
    )
    assert shown == docs_check.stable(
        "│ setup, seconds │ 6 │\n└───┘\nin runs/20251201-010203-attack-00000000\n"
    )
    assert docs_check.stable("4 of 10 rejected") != docs_check.stable("4 of 10 accepted")


def test_progress_and_colours_are_not_shown(tmp_path: Path) -> None:
    printed = (
        "loading the model: 1/1 in 4.3 s\nprompts: 3/9, running, 2.1 a second, 61 s, about 9 s left\n"
        "Loading weights:  33%|███▎      | 89/272 [00:00<00:00, 787.63it/s]\n"
        "no probe for layer 1 of builtin yet: a first one takes about 6 s\n"
        f"\x1b[32mexact\x1b[0m: 3/9 of {tmp_path}/a  \n\n"
    )
    assert docs_check.cleaned(printed, tmp_path) == "exact: 3/9 of ~/lab/a\n"


@pytest.mark.parametrize(("code", "problem"), [(2, None), (1, "failed"), (0, "failed")])
def test_a_command_ends_as_its_comment_says(
    code: int, problem: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"hiddenlab() {{ return {code}; }}\nhiddenlab attack  # exit 2: the layer is wrong\n"
    said, _ = docs_check.run(Block(ROOT / "README.md", 1, "sh", text, None), tmp_path)
    assert (said and said.split()[0]) == problem


def test_what_a_block_starts_in_the_background_ends_with_it(tmp_path: Path) -> None:
    block = Block(ROOT / "README.md", 1, "sh", "sleep 600 & echo $!\n", None)
    problem, printed = docs_check.run(block, tmp_path)
    assert problem is None
    stat = Path(f"/proc/{int(printed)}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("text", "number"), [("a\n# b\n\nc \\\n d\n", 2), ("# a\n", 0)])
def test_commands_are_counted(text: str, number: int) -> None:
    assert docs_check.count_commands(Block(ROOT / "README.md", 1, "sh", text, None)) == number


def test_pages_in_folders_are_run_too_but_no_findings_and_no_log() -> None:
    found = {str(page.relative_to(ROOT)) for page in docs_check.pages()}
    assert {"README.md", "docs/tutorials/i-audit-a-provider.md", "docs/start.md"} <= found
    assert "docs/findings.md" not in found and not any(name.startswith("docs/log/") for name in found)
