"""By what etcd knows us, and by what we know it: certificates, user and password, each in a file of its own.

Files are read when they are needed. Certificates that were renewed on disk are used by the next connection; where the
new ones cannot be used the old ones are kept, and that is reported once. No text from here has a secret in it.
"""

import os
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

LONGEST_PASSWORD = 4096
"""Bytes."""
SOON = 7 * 24 * 3600.0
"""Seconds before the end of a certificate from which on it is told."""

log = structlog.get_logger()

Identity = tuple[tuple[int, int, int, int] | None, ...]


class AccessError(Exception):
    """A file that cannot be used: which, what was found, what to do."""


@dataclass(frozen=True)
class Access:
    """Where the files are. All of it may be left out: etcd without TLS, and without users."""

    ca_file: Path | None = None
    """Who signs the members' certificates; None: the CAs that this machine trusts."""
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Of TLS."""
        return tuple(path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None)

    def context(self) -> ssl.SSLContext:
        """For one or more connections. Raises `AccessError`."""
        with _named(f"{self.ca_file}: as CA"):
            context = ssl.create_default_context(cafile=self.ca_file)
        cert, key = self.cert_file, self.key_file
        if cert is not None and key is not None:
            private(key)
            with _named(f"{cert}: as certificate of the key {key}"):
                context.load_cert_chain(cert, key, password=_no_passphrase)
        return context

    def password(self) -> str:
        """Without the end of its line. Raises `AccessError`."""
        assert self.password_file is not None
        private(self.password_file)
        try:
            text = self.password_file.read_bytes()[: LONGEST_PASSWORD + 1].decode()
        except OSError as error:
            raise AccessError(f"{self.password_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise AccessError(f"{self.password_file}: found bytes that are no UTF-8, expected a password") from None
        text = text.removesuffix("\n").removesuffix("\r")
        if not text or "\n" in text or len(text) > LONGEST_PASSWORD:
            raise AccessError(
                f"{self.password_file}: expected one line with the password, found another number or size"
            )
        return text

    def troubles(self, now: float) -> list[str]:
        """What is wrong or soon will be, as far as the files tell; `now` in seconds since 1970."""
        looks: list[Callable[[], object]] = [self.context] if self.files else []
        if self.password_file is not None:
            looks.append(self.password)
        found = [text for path in (self.ca_file, self.cert_file) if (text := _expiry(path, now))]
        if self.user is not None and (shown := _shown(self.cert_file)) and shown.has_common_name:
            found.append(f"{self.cert_file}: its subject has a CN; etcd with users and --client-cert-auth refuses such")
        for look in looks:
            try:
                look()
            except AccessError as error:
                found.append(str(error))
        return found


class Certificates:
    """The context of `access`, made anew when one of its files has changed."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._context: ssl.SSLContext | None = None
        self._made_of: Identity = ()

    def context(self) -> ssl.SSLContext:
        """Raises `AccessError` where there is none yet."""
        found = tuple(_identity(path) for path in self._access.files)
        if self._context is None or found != self._made_of:
            try:
                self._context = self._access.context()
            except AccessError as error:
                if self._context is None:
                    raise
                log.warning("changed certificates for etcd cannot be used, the earlier ones are kept", cause=str(error))
            self._made_of = found
        return self._context


def private(path: Path) -> None:
    """Raises `AccessError` unless it is a file of root's or ours that no stranger can read and no group can write."""
    try:
        found = path.stat()
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise AccessError(f"{path}: found something else, expected a file")
    if found.st_uid not in (0, os.geteuid()):
        raise AccessError(f"{path}: found a file of uid {found.st_uid}, expected one of uid {os.geteuid()}, or of root")
    if mode := stat.S_IMODE(found.st_mode) & 0o027:
        shown = stat.S_IMODE(found.st_mode)
        who = "others can use it" if mode & 0o007 else "its group can write it"
        raise AccessError(f"{path}: found mode {shown:04o}, expected 0600 or 0640, since {who}; `chmod 600 {path}`")


@dataclass(frozen=True)
class Shown:
    """What a certificate says."""

    until: float
    """Seconds since 1970."""
    has_common_name: bool


def shown_by(pem: str) -> Shown:
    """Of the first certificate in a PEM text. Raises `ValueError` or `IndexError`.

    X.509 (RFC 5280, 4.1): in the part that is signed, the version (left out where it is 1), number, algorithm and
    issuer are followed by the two times and the subject.
    """
    begin, end = pem.index("-----BEGIN CERTIFICATE-----"), "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(end, begin) + len(end)])
    fields = _fields(_fields(_fields(der)[0][1])[0][1])
    times, subject = (content for _, content in fields[4 if fields[0][0] == 0xA0 else 3 :][:2])
    kind, text = _fields(times)[1]
    when = text.decode()
    if kind == 0x17:  # UTCTime: two digits of the year, those below 50 being of this century (RFC 5280, 4.1.2.5.1)
        when = ("20" if when < "5" else "19") + when
    until = datetime.strptime(when, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    return Shown(until, b"\x06\x03\x55\x04\x03" in subject)  # 2.5.4.3, id-at-commonName


def _fields(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value of a DER encoding (X.690, 8.1)."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size]), at + size
        found.append((tag, der[at : at + length]))
        at += length
    return found


def _shown(path: Path | None) -> Shown | None:
    if path is not None:
        try:
            return shown_by(path.read_text())
        except (OSError, ValueError, IndexError):
            pass  # OpenSSL tells of it, or has read it: then it is of a form that is not ours to judge
    return None


def _expiry(path: Path | None, now: float) -> str | None:
    shown = _shown(path)
    if shown is None or shown.until > now + SOON:
        return None
    expires = "has expired" if shown.until <= now else "will expire"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(shown.until))
    return f"{path}: the certificate {expires} at {at}; renew it (or look at this machine's clock)"


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise AccessError(f"{what} it cannot be used: {error.reason or error}") from None
    except OSError as error:
        raise AccessError(f"{what} it cannot be read: {error.strerror or error}") from None


def _no_passphrase() -> str:
    raise OSError("the key has a passphrase, and nobody is there to type it")


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    """Unlike where the file was replaced or written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
