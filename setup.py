"""Make the README's links absolute where the repository's address is given; all else is in pyproject.toml.

A package index shows the README alone, so that a relative link leads nowhere there.
"""

import os
import re
from pathlib import Path

from setuptools import setup

RELATIVE = re.compile(r"(!\[[^\]]*)?\]\((?![a-z]+:|#)")

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# A code host's address, as https://host/owner/name; 'make dist REPOSITORY=…' sets it.
address = os.environ.get("HIDDENLAB_URL", "").rstrip("/")
if address:
    # 'raw' gives the file itself, as a picture needs; 'blob' gives the page that shows it.
    readme = RELATIVE.sub(lambda m: f"{m[0]}{address}/{'raw' if m[1] else 'blob'}/HEAD/", readme)

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={"Repository": address, "Issues": f"{address}/issues"} if address else {},
)
