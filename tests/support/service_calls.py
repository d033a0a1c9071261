"""A request to a service, as a script without our client would send it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from pollux.testing.waiting import PATIENCE_SECONDS


def answer_of(url: str, token: str, body: Any = None) -> str:
    """The text of the answer; a request with a `body` is a POST of its JSON."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PATIENCE_SECONDS) as response:
        return str(response.read().decode())
