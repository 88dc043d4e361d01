"""Clients that exist are answered, or told clearly which field is not offered."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import (
    CLIENTS,
    EXTRA,
    KEY,
    PATIENCE,
    PYTHON,
    SHAPES,
    WEBUI,
    Outcome,
    Shape,
    raw,
    served,
    table,
    verdict,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served") / "model") as found:
        yield found


@pytest.mark.parametrize("shape", [*SHAPES, *EXTRA, *WEBUI], ids=lambda shape: shape.name)
def test_every_shape_is_answered_or_refused_by_name(url: str, shape: Shape) -> None:
    expected = raw(url, shape)
    for name, ask in CLIENTS.items():
        if ask is not raw and shape not in WEBUI:
            assert verdict(shape, ask(url, shape), expected) in ("answered", "400"), name
    assert verdict(shape, expected, expected) == ("answered" if shape.field is None else "400")


def test_the_table_shows_what_is_wrong() -> None:
    said = Shape("said", {"temperature": 0})
    assert verdict(said, Outcome(["a"]), Outcome(["a"])) == "answered"
    assert verdict(said, Outcome(["b"]), Outcome(["a"])).startswith("WRONG")
    assert verdict(said, Outcome(error="x"), Outcome(["a"])) == "WRONG: x"
    refused = Shape("refused", {}, field="echo")
    assert verdict(refused, Outcome(["a"]), Outcome()) == "WRONG: answered"
    assert verdict(refused, Outcome(error="echo is not offered"), Outcome()) == "400"
    assert verdict(refused, Outcome(error="something else"), Outcome()).startswith("WRONG")


def test_openais_client_reads_models_and_errors(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
        (listed,) = client.models.list()
        assert client.models.retrieve(listed.id) == listed
        with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
            client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            client.embeddings.create(model=listed.id, input="x")
        with pytest.raises(openai.AuthenticationError, match="wants its API key"):
            client.with_options(api_key="wrong").models.list()


@pytest.mark.skipif(PYTHON is None, reason="set LITELLM_PYTHON to an interpreter that has LiteLLM")
def test_litellm_is_answered(url: str) -> None:
    rows = table(url, PYTHON)
    assert {row["LiteLLM"] for row in rows.values() if "LiteLLM" in row} == {"answered", "400"}


def test_the_manual_shows_this_table() -> None:
    page = (Path(__file__).parents[1] / "docs/how-to/serve.md").read_text()
    for shape in (*SHAPES, *EXTRA, *WEBUI):
        cell = "answered" if shape.field is None else "400"
        assert f"| {shape.name} | {cell} |" in page
