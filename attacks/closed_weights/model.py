"""Complete the server's permuted model with the vocabulary it rebuilt, so that it can run candidates (appendix I.3).

In the users' order of coordinates the permuted weights are an ordinary decoder; only the names of the tokens are
missing. So the attacks on open weights run on it unchanged, and find symbols in place of tokens.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import InputError
from hiddenlab.models.load import load_config, load_module, resolve_model
from hiddenlab.models.reading import quiet_transformers


def with_table(checkpoint: Path, table: Float[Tensor, "v d"], folder: Path) -> Path:
    """Write the server's model again, with a token embedding, and return the folder.

    Args:
        checkpoint: the permuted model as a transformers checkpoint, its token embedding empty. table: the embedding, in
            the users' order of coordinates (``rebuild_tied``). folder: where the whole model goes.

    Raises:
        InputError: no such model, or a table of another shape.
    """
    ref = resolve_model(str(checkpoint))
    model = load_module(
        ref, load_config(ref), head=True, dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )
    own = model.get_input_embeddings().weight  # type: ignore[operator]
    if own.shape != table.shape:
        raise InputError(
            f"the model's embedding is {tuple(own.shape)}, not {tuple(table.shape)} as the table"
        )
    own.data.copy_(table)
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
    return folder
