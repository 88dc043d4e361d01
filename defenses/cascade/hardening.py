"""Harden a Cascade plan: layers of the client, noise, secret coordinates, masked sums, or shares.

A hardening is a spec, such as ``client:first=6,last=1``. It is an option of the plan, and every backend has it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hiddenlab import registry
from hiddenlab.defenses.cascade.secret_maps import Secret
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan


@dataclass(frozen=True)
class Section:
    """The layers of a model that one party runs.

    Attributes:
        first: layers before them, which others run. end: the layer behind the last of them; None is all, with the final
            norm and the head. A section that ends before gives the states after its last layer.
    """

    first: int = 0
    end: int | None = None


WHOLE = Section()
SHARE_NODES = 2
MOST_SPREAD = 64.0
MOST_SLACK = 16.0
MOST_SPREAD_NARROW = 4.0  # of numbers of 16 bits or fewer


@dataclass(frozen=True)
class ClientLayers:
    """Let the client compute the embedding and the first layers, and the last layers with the head.

    Args:
        first: layers of the client before the nodes'. last: layers of the client behind the nodes'.

    Raises:
        InputError: a number below 1. Without first layers nodes get tokens; without last ones they read the answer.
    """

    first: int
    last: int = 1

    def __post_init__(self) -> None:
        if self.first < 1 or self.last < 1:
            raise InputError(
                "the client needs at least 1 first and 1 last layer: without, nodes get tokens or read the answer"
            )

    def sections(self, layers: int) -> tuple[Section, Section, Section]:
        """Return the client's first layers, the nodes' layers, and the client's last layers.

        Args:
            layers: of the whole model.

        Raises:
            InputError: no layer remains for the nodes.
        """
        if self.first + self.last >= layers:
            raise InputError(
                f"the model has {layers} layers; {self.first} first and {self.last} last ones leave none to the nodes"
            )
        end = layers - self.last
        return Section(0, self.first), Section(self.first, end), Section(end)


@dataclass(frozen=True)
class ClientNoise:
    """Let the client add Gaussian noise to his embeddings, before his first layers; answers change with it.

    Each request has noise of its own, which stays the same while tokens are added to it.

    Args:
        sigma: its standard deviation.

    Raises:
        InputError: sigma is not above 0.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise InputError(f"sigma must be a number above 0, not {self.sigma:g}")


@dataclass(frozen=True)
class SecretCoordinates:
    """Send AttnNodes queries, keys and values in secret coordinates, drawn anew for each request, layer and head.

    CompNodes share the secret, so that it hides nothing from them.

    Args:
        spread: largest factor by which a direction is stretched or shrunk; 1 keeps lengths, which then are read.

    Raises:
        InputError: a spread outside of 1 to 64, beyond which rounding shows.
    """

    spread: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.spread <= MOST_SPREAD:
            raise InputError(f"spread must be between 1 and {MOST_SPREAD:g}, not {self.spread:g}")

    def secret(self, *dtypes: torch.dtype) -> Secret:
        """Draw the secret.

        Args:
            dtypes: of the rows, in the model and on the wire.

        Raises:
            InputError: rounding to one of them, which a large spread magnifies, would ruin outputs.
        """
        narrow = [dtype for dtype in dtypes if torch.finfo(dtype).bits < torch.finfo(torch.float32).bits]
        if narrow and self.spread > MOST_SPREAD_NARROW:
            name = str(narrow[0]).removeprefix("torch.")
            raise InputError(
                f"spread must be at most {MOST_SPREAD_NARROW:g} with {name}, not {self.spread:g}: "
                "rounding ruins outputs"
            )
        return Secret(self.spread)


@dataclass(frozen=True)
class MaskedSums:
    """Let CompNodes learn the sum over key shards alone: AttnNodes mask their answers, and masks cancel.

    Args:
        slack: nats by which more a score may lie above that of a row with itself. Each takes 1.4 bits of precision from
            rows that see little but themselves.

    Raises:
        InputError: a slack outside of 0 to 16, beyond which such rows lose precision that shows.
    """

    slack: float = 8.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack <= MOST_SLACK:
            raise InputError(f"slack must be between 0 and {MOST_SLACK:g}, not {self.slack:g}")


@dataclass(frozen=True)
class OnShares:
    """Let two nodes compute the linear layers on additive shares, and the client all else, in place of a plan's nodes.

    A node by itself gets random numbers; both together read everything.
    """


@dataclass(frozen=True)
class Hardening:
    """All that hardens one plan; by default nothing.

    Attributes:
        client: the layers that the client computes. noise: that he adds before them. secret_maps: of what AttnNodes
            get. masked_sums: of what they answer. shares: in place of the plan.

    Raises:
        InputError: noise without layers of the client, who then does not see embeddings; shares joined with others.
    """

    client: ClientLayers | None = None
    noise: ClientNoise | None = None
    secret_maps: SecretCoordinates | None = None
    masked_sums: MaskedSums | None = None
    shares: OnShares | None = None

    def __post_init__(self) -> None:
        others = (self.client, self.noise, self.secret_maps, self.masked_sums)
        if self.shares is not None and any(other is not None for other in others):
            raise InputError("--harden shares stands alone: its nodes learn nothing that others would hide")
        if self.noise is not None and self.client is None:
            raise InputError(
                "noise needs layers of the client, who adds it; write 'client:first=1,last=1+noise:…'"
            )

    @classmethod
    def parse(cls, spec: str | None) -> "Hardening":
        """Build a hardening from its spec: parts that are joined by ``+``; None is none.

        Raises:
            UnknownNameError: unknown part. InputError: unknown, missing or malformed parameter, or a part twice.
        """
        parts: dict[str, Any] = {}
        for text in [] if spec is None else registry.stages_of(spec):
            if not text.strip():
                raise InputError(f"--harden {spec!r} has an empty part; write parts joined by '+'")
            name = registry.parse_spec(text)[0].replace("-", "_")
            if name in parts:
                raise InputError(f"--harden {spec!r} names {text.partition(':')[0]} twice")
            parts[name] = registry.build("hardenings", text)
        return cls(**parts)

    def counts(self, plan: Plan) -> dict[str, int]:
        """Return the number of nodes of each kind that a plan has."""
        if self.shares is not None:
            return {"share_nodes": SHARE_NODES}
        return {"comp_nodes": plan.alpha, "attn_nodes": len(plan.attn_nodes)}

    @property
    def client_layers(self) -> int:
        """The number of layers that the client computes."""
        return 0 if self.client is None else self.client.first + self.client.last

    @property
    def answers(self) -> str:
        """The form of AttnNodes' answers, see ``cost.layer_bytes``."""
        return "paper" if self.masked_sums is None else "masked"

    @property
    def first_layer(self) -> int:
        """The number of layers before the nodes' first one."""
        return 0 if self.client is None else self.client.first

    @property
    def channel(self) -> tuple[str, ...]:
        """What the client does to his embeddings, as specs of defenses."""
        return () if self.noise is None else (f"gaussian:sigma={self.noise.sigma!r}",)

    def node_layers(self, layers: int) -> int:
        """Return how many of a model's layers the nodes compute.

        Raises:
            InputError: no layer remains for them.
        """
        if self.client is not None:
            self.client.sections(layers)
        return layers - self.client_layers


NOT_HARDENED = Hardening()
