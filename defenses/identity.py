"""No defense: the baseline of every table."""

from hiddenlab.channels import Stage


class Identity(Stage):
    """States are released as they are."""

    spec = "identity"

    def __repr__(self) -> str:
        return "identity: the attacker sees every state, in order, and knows the model"
