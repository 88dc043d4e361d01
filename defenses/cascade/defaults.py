"""Read what a model's generation_config.json says of its answers: which tokens end them, how others are chosen.

transformers' ``generate`` applies these settings to every answer, also to a greedy one. An answer over nodes is the
plain model's only if they are applied here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hiddenlab.defenses.cascade.sampling import RULES, Sampling
from hiddenlab.errors import InputError
from hiddenlab.models.load import ModelRef, load_config
from hiddenlab.models.reading import quiet_transformers, reading_model

DRAWN = ("temperature", "top_p", "top_k", "min_p")
# Settings that change an answer and are not offered here, with the values that change nothing.
OTHERS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "guidance_scale": (1, 1.0), "penalty_alpha": (0,), "dola_layers": (), "top_h": (),
    "typical_p": (1, 1.0), "epsilon_cutoff": (0, 0.0), "eta_cutoff": (0, 0.0), "watermarking_config": (),
    "exponential_decay_length_penalty": (), "forced_bos_token_id": (), "forced_eos_token_id": (), "stop_strings": (),
    "token_healing": (False,), "constraints": (), "force_words_ids": (),
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What a model's files say of its answers.

    Attributes:
        stop: ids that end an answer.
        drawn: temperature, top_p, top_k and min_p, as far as they are given.
        repetition_penalty: see ``Sampling``.
        rules: see ``Sampling``.
    """

    stop: frozenset[int] = frozenset()
    drawn: Mapping[str, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    rules: Mapping[str, Any] = field(default_factory=dict)

    def greedy(self, **changes: Any) -> Sampling:
        """Return the settings of transformers' greedy ``generate``, with changes; see ``Sampling``."""
        return Sampling(**{"repetition_penalty": self.repetition_penalty, "rules": self.rules, **changes})


def load_defaults(ref: ModelRef, tokenizer: Any) -> Defaults:
    """Read a model's defaults as transformers does: of generation_config.json, else of config.json.

    Tokens that end an answer are those of the first of generation_config.json, config.json and tokenizer to name any.

    Raises:
        InputError: the file is damaged, or asks for a setting that is not offered here.
    """
    from transformers import GenerationConfig

    revision = ref.revision or "main"
    with reading_model(f"cannot read the generation_config.json of {ref.name!r}"), quiet_transformers():
        try:
            config: Any = GenerationConfig.from_pretrained(ref.path, revision=revision)
        except OSError:  # there is none
            config = GenerationConfig.from_pretrained(
                ref.path, revision=revision, config_file_name="config.json", _from_model_config=True
            )
        given = {name: value for name, value in config.to_dict().items() if value is not None}
    for name, neutral in OTHERS.items():
        if name in given and given[name] not in neutral:
            raise InputError(
                f"the generation_config.json of {ref.name} asks for {name}, which is not offered over nodes; remove it "
                "from that file"
            )
    rules = {name: given[name] for name in RULES if given.get(name)}
    try:
        found = Defaults(
            _ids(given.get("eos_token_id"))
            or _ids(getattr(load_config(ref), "eos_token_id", None))
            or _ids(getattr(tokenizer, "eos_token_id", None)),
            {name: given[name] for name in DRAWN if name in given},
            given.get("repetition_penalty", 1.0),
            rules,
        )
        found.greedy().chooser(1, found.stop)
    except (TypeError, ValueError) as error:  # of transformers' processors
        raise InputError(f"the generation_config.json of {ref.name} is damaged: {error}") from None
    return found


def _ids(value: Any) -> frozenset[int]:
    """Return token ids that a file gives as one, several or none."""
    several = value if isinstance(value, list) else [value]
    return frozenset(token for token in several if isinstance(token, int) and token >= 0)
