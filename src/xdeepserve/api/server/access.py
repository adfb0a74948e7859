"""Access to a server: names and origins that it accepts, content types, API keys, and CORS.

A web page may send requests to any address that a visitor's computer reaches. It may use the address, or a
name of its own that it has pointed there (DNS rebinding). `guard_middleware` refuses both before a handler
sees the request.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from xdeepserve.api.routes.route import FORM, JSON, PASSED_ON, READING, route_of
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.api.server.options import ServerOptions, host_name
from xdeepserve.errors import abridged

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Max-Age": "600",
}
ADDRESS = web.AppKey("ADDRESS", str)  # where this server listens
JSONS = re.compile(r"application/([!#$%&'*+.^_`|~0-9a-z-]+\+)?json")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(?::\d*)?", re.IGNORECASE)


def guard_middleware(options: ServerOptions) -> Middleware:
    """Refuse requests from foreign web pages: 421 for a name that is not this server's, 403 for an origin
    that may not call, 415 for a body type that browsers send without a preflight."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request, options.allowed_hosts)
        _check_origin(request, options.allowed_origins)
        if request.method not in READING:
            _check_type(request)
        return await handler(request)

    return check


def _check_host(request: web.Request, allowed: Sequence[str]) -> None:
    """Raise ApiError for a request by a name that may have been pointed to this server.

    Connections through a Unix socket may use any name. So may connections to an address that is no loopback
    address, unless `allowed` lists names. A request without a name (HTTP/1.0) is not from a browser.
    """
    local = request.get_extra_info("sockname")
    authority = _authority(request)
    if authority is None or isinstance(local, str | bytes) or "*" in allowed:
        return
    reached = _ip(local[0]) if local else None
    if not allowed and reached is not None and not reached.is_loopback:
        return
    found = _AUTHORITY.fullmatch(authority)
    name = "" if found is None else host_name(found[1])
    listens_on = URL(request.app.get(ADDRESS, "")).host
    if not (is_loopback_name(name) or name in map(host_name, allowed) or name == listens_on):
        add = f": --allowed-hosts {name} serves it" if name else ""
        raise ApiError(421, f"this server is not called {abridged(authority, 80)}{add}", code="unknown_host")


def _authority(request: web.Request) -> str | None:
    """Return the name and port that a request is sent to: those of its target if that is a whole URL, else
    those of `Host`."""
    target = request.raw_path
    return request.headers.get("Host") if target.startswith(("/", "*")) else request.url.authority


def is_loopback_name(name: str) -> bool:
    """Whether a name, in lower case and without a trailing dot, can only mean this computer."""
    address = _ip(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IP address; IPv4 addresses written as IPv6 become IPv4. None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _check_origin(request: web.Request, allowed: Sequence[str]) -> None:
    """Raise ApiError for a request sent by a web page of another origin."""
    origin = request.headers.get("Origin")
    if "*" in allowed or origin in allowed or is_own_origin(request):
        return
    if origin is not None:
        raise ApiError(
            403,
            f"web pages of {abridged(origin, 80)} may not call this server: --allowed-origins lets them",
            code="origin_not_allowed",
        )
    # Browsers name no origin where they let the page read nothing: images, scripts, links that are followed.
    site, is_link = request.headers.get("Sec-Fetch-Site"), request.headers.get("Sec-Fetch-Dest") == "document"
    if site in ("cross-site", "same-site") and not (is_link and request.method in READING):
        raise ApiError(
            403,
            "a web page of another site may not use what this server answers: open it in a tab of its own",
            code="origin_not_allowed",
        )


def is_own_origin(request: web.Request) -> bool:
    """Whether a request's page came from this server, under the name that the request uses."""
    origin, own = request.headers.get("Origin", ""), f"{request.scheme}://{_authority(request)}"
    return _origin(origin) is not None and _origin(origin) == _origin(own)


def _origin(text: str) -> tuple[str, str | None, int | None] | None:
    """Split an origin into scheme, host and port; None without a host, as for `null`."""
    try:
        url = URL(text)
        return (url.scheme, url.host, url.port) if url.host else None
    except ValueError:
        return None


def _check_type(request: web.Request) -> None:
    """Raise ApiError for a body of another type than its path takes. Browsers send a preflight before a page
    of another origin sends JSON."""
    takes = JSON if (route := route_of(request)) is None else route.takes
    if not request.can_read_body and takes != FORM:  # a form without a body is none either
        return
    given = request.headers.getall("Content-Type", [])
    kind = given[0].partition(";")[0].strip().lower() if len(given) == 1 else None
    is_json, is_form = kind is not None and JSONS.fullmatch(kind) is not None, kind == FORM
    if takes == FORM:
        is_right, wanted = is_form, f"a file comes as {FORM}, with the fields file and purpose"
    else:
        is_right = is_json or (is_form and takes == PASSED_ON)
        wanted = "a body must be JSON, and say so (with curl: -H 'Content-Type: application/json')"
    if not is_right:
        found = f"found Content-Type {abridged(', '.join(given), 80)}" if given else "found no Content-Type"
        raise ApiError(415, f"{wanted}; {found}", code="unsupported_media_type")


KEY_HEADERS = ("X-Api-Key", "Api-Key")  # of Anthropic's clients, and of Azure's


def key_middleware(options: ServerOptions) -> Middleware:
    """Answer 401 to requests without one of the keys, but for open routes."""
    keys = [key.encode() for key in options.api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        if keys and not (route is not None and route.is_open):
            scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
            given = [bearer] if scheme.lower() == "bearer" else []
            given += [request.headers[name] for name in KEY_HEADERS if name in request.headers]
            sent = [each.strip().encode("utf-8", "surrogateescape") for each in given]
            # Every key is compared, and each in the same time, whatever was sent.
            matches = [hmac.compare_digest(each, key) for each in sent for key in keys]
            if not any(matches):
                raise ApiError(
                    401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key"
                )
        return await handler(request)

    return check


def cors_middleware(options: ServerOptions) -> Middleware:
    """Answer a browser's preflight. Needs no key, because browsers send none with it."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if options.allowed_origins and is_preflight:
            asked = request.headers.get("Access-Control-Request-Headers")
            more = {} if asked is None else {"Access-Control-Allow-Headers": asked}
            return web.Response(status=204, headers={**_PREFLIGHT, **more})
        return await handler(request)

    return answer


def add_cors_headers(request: web.Request, response: web.StreamResponse, options: ServerOptions) -> None:
    """Let a page of an allowed origin read the answer, streams and errors included."""
    origin = request.headers.get("Origin")
    if origin is not None and ("*" in options.allowed_origins or origin in options.allowed_origins):
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in options.allowed_origins else origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, X-Ignored-Fields"
        response.headers["Vary"] = "Origin"
