# SPDX-License-Identifier: Apache-2.0
"""Where a client connects and what it sends with each call; the same for both kinds of client."""

from __future__ import annotations

import ipaddress
import json
import numbers
import re
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import grpc

from denoised.health import health_pb2
from denoised.v1 import image_generation_pb2 as pb
from denoised.v1 import model_admin_pb2 as admin_pb

from .errors import DETAILS_KEY, Cancelled, DenoisedError, InvalidArgument, Unavailable, make_error
from .retry import Attempts, RetryBudget, RetryPolicy

Metadata = Mapping[str, Union[str, bytes]]
Headers = List[Tuple[str, Union[str, bytes]]]

_SERVICE = "denoised.v1.ImageGeneration"
_ADMIN = "denoised.v1.ModelAdmin"

METHODS: Dict[str, Tuple[str, Any]] = {
    # name: (path, class of the reply)
    "Generate": (f"/{_SERVICE}/Generate", pb.GenerateResponse),
    "StreamGenerate": (f"/{_SERVICE}/StreamGenerate", pb.StreamGenerateResponse),
    "GetJob": (f"/{_SERVICE}/GetJob", pb.GetJobResponse),
    "ListJobs": (f"/{_SERVICE}/ListJobs", pb.ListJobsResponse),
    "WatchJob": (f"/{_SERVICE}/WatchJob", pb.StreamGenerateResponse),
    "CancelJob": (f"/{_SERVICE}/CancelJob", pb.CancelJobResponse),
    "GetServerInfo": (f"/{_SERVICE}/GetServerInfo", pb.GetServerInfoResponse),
    "ListModels": (f"/{_SERVICE}/ListModels", pb.ListModelsResponse),
    "GetModel": (f"/{_SERVICE}/GetModel", pb.GetModelResponse),
    "LoadModel": (f"/{_ADMIN}/LoadModel", admin_pb.LoadModelResponse),
    "UnloadModel": (f"/{_ADMIN}/UnloadModel", admin_pb.UnloadModelResponse),
    "SetAlias": (f"/{_ADMIN}/SetAlias", admin_pb.SetAliasResponse),
    "DeleteAlias": (f"/{_ADMIN}/DeleteAlias", admin_pb.DeleteAliasResponse),
    # Our copy of the contract has another name; the service has the usual one.
    "Health": ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse),
}
STREAMS = ("StreamGenerate", "WatchJob")


@dataclass(frozen=True)
class TLS:
    """Files in PEM. `TLS()` trusts the authorities of gRPC's own list."""

    ca: Optional[str] = None
    """Trusted authorities."""
    cert: Optional[str] = None
    """Certificate of this client, for mutual TLS; with `key`."""
    key: Optional[str] = None
    server_name: Optional[str] = None
    """In the server's certificate; default: the host of the target, which a list does not have."""


@dataclass(frozen=True)
class _Target:
    uri: str
    authority: str = ""
    listed: bool = False
    replicas: bool = False
    direct: bool = False
    """Never through a proxy of the environment."""


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65535


def _ip_version(address: str) -> int:
    """4 for "10.0.0.1:50051", 6 for "[fd00::1]:50051", else 0."""
    host, _, port = address.rpartition(":")
    bracketed = re.fullmatch(r"\[([^%\]]+)\]", host)  # no zone, as %eth0
    try:
        if bracketed is None:
            ipaddress.IPv4Address(host)
        else:
            ipaddress.IPv6Address(bracketed[1])
    except ValueError:
        return 0
    return 0 if not _is_port(port) else 4 if bracketed is None else 6


def _has_scheme(text: str) -> bool:
    """Whether gRPC reads the part before the first colon as the kind of the address."""
    return text.startswith(("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:"))


def _is_host_and_port(address: str) -> bool:
    """As "host:50051", "10.0.0.1:50051", "[fd00::1]:50051"."""
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return _ip_version(address) == 6
    return _is_port(port) and re.fullmatch(r"[^\x00-\x20\x7f/:@\[\]?#]+", host) is not None


def _parse_list(text: str) -> _Target:
    for scheme in ("ipv4:", "ipv6:"):
        if text.startswith(scheme):
            text = text[len(scheme):]
    addresses = text.split(",")
    versions = set()
    for address in addresses:
        version = _ip_version(address)
        if version == 0:
            raise InvalidArgument(
                f'"{address}" in the list of servers is not an IP address with a port; use '
                "addresses, as in 10.0.0.1:50051,10.0.0.2:50051, or a name that stands for all of "
                "them, as in dns:///replicas:50051")
        versions.add(version)
    if len(versions) > 1:
        raise InvalidArgument("the list of servers mixes IPv4 and IPv6; use one kind")
    escaped = text.replace("[", "%5B").replace("]", "%5D")
    return _Target(f"ipv{versions.pop()}:{escaped}", authority=addresses[0], listed=True,
                   replicas=True, direct=True)


def _parse_target(text: str) -> _Target:
    if not text:
        raise InvalidArgument("the server's address is empty; use host:port")
    if text.startswith(("http://", "https://")):
        raise InvalidArgument(f'the server\'s address "{text}" begins with http; use host:port, and '
                              "TLS by its own options")
    if "," in text:
        return _parse_list(text)
    if ":" not in text and "/" not in text:
        raise InvalidArgument(f'the server\'s address "{text}" has no port; use host:port')
    if not _has_scheme(text) and not _is_host_and_port(text):
        raise InvalidArgument(
            f'the server\'s address "{text}" is not host:port with a port from 1 to 65535; an IPv6 '
            "address stands in brackets, as in [fd00::1]:50051")
    host = re.sub(r"^(dns:///|ipv4:|ipv6:)", "", text)
    loopback = host.startswith(("127.", "localhost", "[::1]", "%5B::1%5D", "unix:"))
    return _Target(text, replicas=text.startswith("dns:"), direct=loopback)


def _read(option: str, path: Optional[str]) -> Optional[bytes]:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InvalidArgument(f'{option}: "{path}" cannot be read: {error.strerror}') from None
    if not content:
        raise InvalidArgument(f'{option}: "{path}" is empty; give the right file')
    return content


def _read_token(path: str) -> str:
    """The token alone: editors end a file with a newline."""
    token = (_read("token_file", path) or b"").decode("latin-1").rstrip(" \t\r\n")
    if not re.fullmatch(r"[!-~]+", token):
        raise InvalidArgument(f'token_file: "{path}" does not hold one token and nothing else')
    return token


# gRPC writes these itself and drops ours, or HTTP/2 forbids them (RFC 9113, 8.2.2).
_RESERVED = ("te", "content-type", "user-agent", "host", "connection", "keep-alive", "proxy-connection",
             "transfer-encoding", "upgrade")


def _checked_metadata(metadata: Any) -> Dict[str, Union[str, bytes]]:
    """With the keys in lower case."""
    if not isinstance(metadata, (Mapping, type(None))):
        raise InvalidArgument(f'metadata is {metadata!r}; use a mapping, as in {{"x-tenant": "blue"}}')
    checked = {}
    for name, value in (metadata or {}).items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise InvalidArgument(f'metadata key {name!r} is not legal; use a string of letters, digits, "-", "_" '
                                  'and "."')
        key = name.lower()
        if key.startswith("grpc-") or key in _RESERVED:
            raise InvalidArgument(f'metadata key "{key}" is reserved for gRPC and HTTP/2; use another name')
        if key.endswith("-bin") and not isinstance(value, bytes):
            raise InvalidArgument(f'metadata "{key}" has the value {value!r}; use bytes, or a key that does not end '
                                  "in -bin")
        if not key.endswith("-bin") and not (isinstance(value, str) and re.fullmatch(r"[ -~]*", value)):
            raise InvalidArgument(f'metadata "{key}" has the value {value!r}; use printable ASCII '
                                  "characters, or a key that ends in -bin, which takes bytes")
        checked[key] = value
    return checked


def _is_traceparent(text: str) -> bool:
    """Version 00, or a later one, which may add fields: https://www.w3.org/TR/trace-context."""
    rest = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    return re.fullmatch(rf"00{rest}|(?!00|ff)[0-9a-f]{{2}}{rest}(-[!-~]*)?", text) is not None


# 31 years. gRPC's time overflows at some eight times as much, and the call ends at once.
_LONGEST_TIMEOUT = 1e9


def _checked_timeout(timeout: Any) -> Optional[float]:
    """None: no deadline."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or timeout != timeout:
        raise InvalidArgument(f"timeout is {timeout!r}; use seconds, or None for no deadline")
    return float(timeout) if timeout <= _LONGEST_TIMEOUT else None


def was_closed() -> Cancelled:
    return Cancelled("the client was closed")


class Connection:
    """What a client knows of its server, and the headers of each call."""

    def __init__(self, target: str, *, tls: Optional[TLS], token: Optional[str],
                 token_file: Optional[str], allow_plaintext_token: bool, retry: RetryPolicy,
                 timeout: Optional[float], metadata: Optional[Metadata],
                 max_message_bytes: int) -> None:
        self.name = target
        self.target = _parse_target(target)
        self.retry = retry
        # A health check is asked whether the server is there, and does not wait for its restart.
        self.retry_health = replace(retry, restart_attempts=1)
        self.timeout = _checked_timeout(timeout)
        self.budget = RetryBudget(retry.budget)
        self.closed = False  # by the caller
        self._metadata = _checked_metadata(metadata)
        self._token = token
        self._token_file = token_file
        self._tls = tls
        self._plaintext = tls is None and not allow_plaintext_token
        if token is not None and token_file is not None:
            raise InvalidArgument("token and token_file are both given; give one")
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise InvalidArgument("token must be printable ASCII characters without spaces")
        if self._plaintext and (token is not None or token_file is not None):
            raise self._plaintext_token("token" if token is not None else "token_file")
        if tls is not None and (tls.cert is None) != (tls.key is None):
            raise InvalidArgument("tls.cert and tls.key belong together; give both or none")
        if tls is not None and self.target.listed and not tls.server_name:
            raise InvalidArgument("a list of servers has no name to look for in their certificates; "
                                  "give tls.server_name")
        self.options = self._options(max_message_bytes)
        self.with_token(self.headers(None, None))  # so that what is wrong is said now

    @staticmethod
    def _plaintext_token(what: str) -> InvalidArgument:
        return InvalidArgument(
            f"{what} needs tls: anyone on the network could read the token. If something else "
            "encrypts the connection, such as a service mesh, set allow_plaintext_token=True")

    def _options(self, max_message_bytes: int) -> List[Tuple[str, Any]]:
        """The reasons are in client/denoised/connection.cc, which sets the same."""
        options: List[Tuple[str, Any]] = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 4 << 20),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.primary_user_agent", "denoised-python"),
        ]
        if self._tls is not None and self._tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        elif self.target.authority:
            options.append(("grpc.default_authority", self.target.authority))
        if self.target.replicas:
            options += [
                ("grpc.service_config", json.dumps(
                    {"loadBalancingConfig": [{"round_robin": {}}],
                     "healthCheckConfig": {"serviceName": _SERVICE}})),
                ("grpc.client_idle_timeout_ms", 600_000),
                ("grpc.dns_min_time_between_resolutions_ms", 5_000),
            ]
        if self.target.direct:
            options.append(("grpc.enable_http_proxy", 0))
        return options

    def credentials(self) -> Any:
        """None: plaintext."""
        if self._tls is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls.ca", self._tls.ca),
            private_key=_read("tls.key", self._tls.key),
            certificate_chain=_read("tls.cert", self._tls.cert))

    def headers(self, metadata: Optional[Metadata], traceparent: Optional[str]) -> Headers:
        """The metadata of a call, but for the token."""
        merged = {**self._metadata, **_checked_metadata(metadata)}
        if "authorization" in merged:
            if self._token is not None or self._token_file is not None:
                raise InvalidArgument('metadata "authorization" and a token are both given; give one')
            if self._plaintext:
                raise self._plaintext_token('metadata "authorization"')
        if traceparent is not None:
            if "traceparent" in merged:
                raise InvalidArgument("traceparent is given twice, also as metadata; give one")
            if not isinstance(traceparent, str) or not _is_traceparent(traceparent):
                raise InvalidArgument(
                    f"traceparent is {traceparent!r}; use the form of W3C Trace Context in lower case, "
                    "00-<32 hex digits>-<16 hex digits>-<2 hex digits>, with ids that are not zero")
            merged["traceparent"] = traceparent
        return list(merged.items())

    def with_token(self, headers: Headers) -> Headers:
        """The metadata of an attempt. The token file is read for each, so the token can be replaced."""
        token = self._token if self._token_file is None else _read_token(self._token_file)
        return headers if token is None else [*headers, ("authorization", f"Bearer {token}")]

    def attempts(self, timeout: Optional[float], retry: Optional[RetryPolicy] = None) -> Attempts:
        return Attempts(retry or self.retry, self.budget,
                        self.timeout if timeout is None else _checked_timeout(timeout))

    def error(self, error: Any, *, cancelled: bool = False) -> DenoisedError:
        """`cancelled`: this side cancelled the call."""
        code = error.code().name
        trailing = error.trailing_metadata() or ()
        details = next((value for key, value in trailing if key == DETAILS_KEY), b"")
        result = make_error(code, error.details() or "", details)
        if result.domain or cancelled:
            return result
        if code == "CANCELLED" and self.closed:
            return was_closed()
        if code == "CANCELLED":  # gRPC ends the calls of a server that shuts down with it
            return Unavailable("the server shut down")
        if code == "UNAVAILABLE":  # the transport's
            return Unavailable(f"no server could be reached at {self.name}: {result.message}")
        return result

    def check_single(self, what: str) -> None:
        if self.target.replicas:
            raise InvalidArgument(
                f"{what} one server, but {self.name} stands for several; connect to that server by "
                "its own address, host:port")


JOBS = "a job is known to only"
MODELS = "models are changed on only"
ONCE = RetryPolicy(max_attempts=1)
