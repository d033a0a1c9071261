"""The operation by which a working folder is sent along with a job."""

from __future__ import annotations

import base64
import binascii

from starlette.responses import Response

from pollux.core.errors import InvalidInput
from pollux.service.http.operations import Call, Operation, foreign, json_response
from pollux.service.http.schemas import only
from pollux.service.http.uploads import MAX_PIECE_BYTES, Packages
from pollux.storage.archive import MAX_PACKED_BYTES

__all__ = ["PACKAGE_OPERATIONS"]

_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_MOST_LETTERS = 4 * ((MAX_PIECE_BYTES + 2) // 3)


async def _send(call: Call) -> Response:
    body = call.body
    if not isinstance(body, dict) or set(body) != {"digest", "size", "offset", "data"}:
        raise InvalidInput('the body must be an object with "digest", "size", "offset" and "data"')
    for name in ("size", "offset"):
        value = body[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PACKED_BYTES:
            raise InvalidInput(f"{name} is {str(value)[:80]}; give a whole number from 0 to {MAX_PACKED_BYTES}")
    if not isinstance(body["digest"], str) or not isinstance(body["data"], str):
        raise InvalidInput("digest and data must be texts")
    try:
        piece = base64.b64decode(body["data"], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("data is not base64; encode the piece of the package so") from None
    packages: Packages = call.request.app.state.packages
    have, folder = await foreign(call).packages.run(
        "the folder of packages",
        "packages",
        lambda: packages.add(body["digest"], body["size"], body["offset"], piece),
    )
    return json_response({"have": have, "folder": folder})


_WHOLE = {"type": "integer", "minimum": 0, "maximum": MAX_PACKED_BYTES}

PACKAGE_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/packages", "send_package", "Send a piece of a working folder; its folder here once all is there.",
        _send, only({"have": _WHOLE, "folder": {"anyOf": [{"type": "string"}, {"type": "null"}]}}),
        takes=only({
            "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "size": {**_WHOLE, "minimum": 1},
            "offset": _WHOLE, "data": {"type": "string", "pattern": _BASE64, "maxLength": _MOST_LETTERS},
        }),
        errors=(409, 413, 503),
    ),
)  # fmt: skip
