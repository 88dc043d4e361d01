"""Release hidden states without any defense; this is the baseline of every table."""

from hiddenlab.stages import Stage


class Identity(Stage):
    """Release every state unchanged and in order."""

    spec = "identity"

    def __repr__(self) -> str:
        return "identity: the attacker sees every state, in order, and knows the model"
