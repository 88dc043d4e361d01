"""Ask a server through LiteLLM, in an interpreter that has it; ``tests.clients`` runs this as a program of its own."""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Read shapes of requests from standard input, and print what LiteLLM got for each as one line of JSON."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
    import litellm

    url, model = sys.argv[1:]
    litellm.suppress_debug_info = True
    found = []
    for asked in json.load(sys.stdin):
        ask: Any = litellm.completion if asked["chat"] else litellm.text_completion
        try:
            answer = ask(
                model=f"openai/{model}", api_base=f"{url}/v1", api_key=os.environ["OPENAI_API_KEY"], num_retries=0,
                allowed_openai_params=list(asked["fields"]), **asked["fields"],
            )  # fmt: skip
            found.append({"texts": texts(answer, asked), "error": None})
        except litellm.BadRequestError as error:
            found.append({"texts": [], "error": str(error)})
    print(json.dumps(found))


def texts(answer: Any, asked: dict[str, Any]) -> list[str]:
    """Return the text of each choice, the pieces of a stream joined."""
    if not asked["fields"].get("stream"):
        return [one.message.content if asked["chat"] else one.text for one in answer.choices]
    joined: dict[int, str] = {}
    for chunk in answer:
        for choice in chunk.choices:
            piece = choice.delta.content if asked["chat"] else choice.text
            joined[choice.index] = joined.get(choice.index, "") + (piece or "")
    return [joined[index] for index in sorted(joined)]


if __name__ == "__main__":
    main()
