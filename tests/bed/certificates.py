"""A certificate authority for tests, by the command openssl."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from supervisor.demo.etcd_cluster import ClientTls


class Authority:
    """Makes certificates below `folder`. Names of files: NAME.crt and NAME.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout=ca.key", "-out=ca.crt", "-days=30", "-subj=/CN=test CA")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def issue(self, name: str, *, host: str = "127.0.0.1", days: int = 30, subject: str = "/O=gpuward") -> ClientTls:
        """For a member on this host and for a client. With -1 day it has expired; an earlier one is replaced."""
        cert, key, request, extra = (self.folder / f"{name}.{end}" for end in ("crt", "key", "csr", "ext"))
        extra.write_text(f"subjectAltName=IP:{host}\nextendedKeyUsage=serverAuth,clientAuth\n")
        new = self.folder / f"{name}.new"
        self._openssl("req", *_NEW_KEY, f"-keyout={new}", f"-out={request}", f"-subj={subject}")
        os.replace(new, key)
        signed = ("-CA=ca.crt", "-CAkey=ca.key", "-CAcreateserial", f"-extfile={extra}", f"-days={days}")
        self._openssl("x509", "-req", f"-in={request}", *signed, f"-out={new}")
        os.replace(new, cert)
        return ClientTls(self.ca, cert, key)

    def with_passphrase(self, name: str) -> Path:
        """The key of that name, locked."""
        locked = self.folder / f"{name}.locked"
        self._openssl("ec", f"-in={name}.key", "-aes256", "-passout=pass:x", f"-out={locked}")
        return locked

    def _openssl(self, command: str, *arguments: str) -> None:
        words = [word for argument in arguments for word in argument.split("=", 1)]
        subprocess.run(["openssl", command, *words], cwd=self.folder, check=True, capture_output=True)


_NEW_KEY = ("-newkey=ec", "-pkeyopt=ec_paramgen_curve:P-256", "-nodes")


def member_arguments(files: ClientTls, *, clients_need_one: bool = True) -> Sequence[str]:
    """What etcd is given to speak TLS with clients."""
    own = [f"--cert-file={files.cert}", f"--key-file={files.key}"]
    return [*own, f"--trusted-ca-file={files.ca}", "--client-cert-auth"] if clients_need_one else own
