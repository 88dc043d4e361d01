"""Name things by their content."""

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """Return sixteen hexadecimal digits that name a JSON value; the order of its keys does not matter."""
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
