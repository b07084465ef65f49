"""Names and pages that a server without keys answers.

A web page from anywhere can send requests to this machine and its network through the browser of whoever looks at it. Where its
own name is made to lead here (DNS rebinding), the browser lets it read the answers too; ``Host`` then has that name. A form that
it sends without that changes things all the same; ``Sec-Fetch-Site`` or ``Origin`` tell. With keys neither matters: a page has
none.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"
"""Among names: every name."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. CORS headers go to known origins alone, so no other page can read their answers."""


def name_of(host: str) -> str:
    """The name or address of a ``Host``, as browsers write it, without port and brackets; '' where it is none."""
    parts = re.fullmatch(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]+))(?::\d*)?", host, re.ASCII)
    if parts is None:
        return ""
    try:
        return str(ip_address(parts[1] or parts[2]))
    except ValueError:
        return (parts[2] or "").lower()


def refusal(scope: Scope, names: Collection[str], origins: Collection[str] = ()) -> str:
    """Why a request is refused; '' where it is not.

    Args:
        names: what the server is called beside loopback's names and the address at which the request arrived. origins: of pages
            that may use it.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if ANY not in names and name_of(host) not in {*LOOPBACK, *names, *(scope["server"] or ())[:1]}:
        return f"Host {host[:100]!r} is not known here: --allowed-hosts adds names; with API keys any will do"
    if scope["method"] in READING:
        return ""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin is not None and not {ANY, origin}.isdisjoint(origins):
        return ""
    if site is not None:  # of newer browsers; pages cannot set it, and proxies leave it as it is
        own = site in ("same-origin", "none")
    else:
        own = origin is None or origin.partition("://")[2] == host
    said = f"Origin {str(origin)[:100]!r}, Host {host[:100]!r}, Sec-Fetch-Site {str(site)[:100]!r}"
    return "" if own else f"a page of another origin asks: {said}"
