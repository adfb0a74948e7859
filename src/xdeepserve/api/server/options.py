"""Options of a server: names, keys, origins, encryption, where it listens, and logging."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Literal

import msgspec

from xdeepserve.errors import InputError
from xdeepserve.reading import unreadable

# A name, an IPv4 address, an IPv6 address with or without brackets, or "*".
_HOST = re.compile(r"\*|[^\s:/?#@*\[\]]+|\[?[0-9a-f.]*:[0-9a-f:.]+\]?", re.IGNORECASE)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server, named as on vLLM's command line.

    served_model_names  what clients may call the model, the first of them in answers; empty: its own name
    api_keys            one of these has to come with every request to the model; empty: none needs to
    allowed_origins     web pages of these origins may call from a browser; "*": of all
    allowed_hosts       names, beside those of loopback, that requests may call this server by; "*": all
    ssl_certfile, ssl_keyfile   PEM files; the key may be in the certificate's
    admin               clients may list, add and remove task executors (api/server/admin.py)
    log_requests        a line of the log for each request
    strict              fields without effect are refused instead of ignored (api/routes/fields.py)
    generation_config   "vllm": sampling defaults of the checkpoint's generation_config.json are not taken
    max_body_bytes      largest body of a request; by default it follows the model's context
    record              file that what the page draws is written to
    state               directory in which files and jobs are kept (jobs/door); without, none are taken
    tools               file with the functions that agents may call (jobs/agent_tools.py)
    member              name under which this server is a member of a cluster (jobs/door/member_beat.py)
    share               path of a Unix socket on which job executors reach the pod (jobs/door/pod_door.py)
    pod                 path of such a socket: this server is a job executor without TEs of its own
    uds                 path of a Unix socket to listen on instead of host and port
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    admin: bool = False
    log_requests: bool = False
    strict: bool = False
    generation_config: Literal["auto", "vllm"] = "auto"
    max_body_bytes: int | None = None
    record: Path | None = None
    state: Path | None = None
    tools: Path | None = None
    member: str | None = None
    share: str | None = None
    pod: str | None = None
    uds: str | None = None

    def __post_init__(self) -> None:
        for flag, values in (
            ("--served-model-name", self.served_model_names),
            ("--api-key", self.api_keys),
            ("--allowed-origins", self.allowed_origins),
            ("--allowed-hosts", self.allowed_hosts),
        ):
            if not all(values):
                raise InputError(f"{flag} must not be empty")
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise InputError(
                    f"--allowed-hosts takes names or addresses, without scheme and port, found {name}"
                )
        if self.max_body_bytes is not None and self.max_body_bytes < 1024:
            raise InputError(f"--max-body-bytes must be 1024 or more, found {self.max_body_bytes}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InputError("--ssl-keyfile needs --ssl-certfile")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Make the context for encrypting connections, or None. Raises InputError for unusable files."""
        if self.ssl_certfile is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=_no_password)
        except ssl.SSLError as error:
            what = "no certificate in PEM with a key that belongs to it"
            raise InputError(f"--ssl-certfile {self.ssl_certfile}: {what}") from error
        except OSError as error:
            raise InputError(f"--ssl-certfile {self.ssl_certfile}: {unreadable(error)}") from None
        except ValueError as error:
            raise InputError(f"--ssl-certfile {self.ssl_certfile}: {error}") from None
        return context


def host_name(name: str) -> str:
    """Normalise a host's name or address: lower case, no trailing dot, no brackets around an IPv6 address."""
    return name.lower().strip("[]").removesuffix(".")


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for the password")
