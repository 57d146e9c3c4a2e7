# SPDX-License-Identifier: Apache-2.0
"""What commands talk to, and as whom."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import Section
from twinpool.config.sections import TlsConfig


class ClientSection(Section):
    """What the commands of operators and clients talk to, and as whom. Processes of a cluster read nothing of it."""

    endpoint: str = Field(default="", description="A router, host:port; empty: the local cluster's.")
    control: str = Field(
        default="", description="The control process, host:port; empty: the local cluster's."
    )
    api_key_file: str = Field(
        default="",
        description="File that holds the API key to show to routers; empty: the key in the variable TWINPOOL_KEY, or none.",
    )
    tls: bool = Field(
        default=False,
        description="Speak TLS also without the files below: to a server whose certificate a public CA signed.",
    )
    ca_file: str = Field(
        default="",
        description="PEM file of the CA that signed the servers' certificates; empty: the files of section tls, or those of the "
        "local cluster.",
    )
    cert_file: str = Field(
        default="",
        description="PEM file of the certificate chain to show; empty: none, which mutual TLS refuses.",
    )
    key_file: str = Field(default="", description="PEM file of its private key.")
    server_name: str = Field(
        default="",
        description="Name to expect in a server's certificate; empty: ROLE.DOMAIN where tls.role_domain is set, else the host dialled.",
    )
    kube_context: str = Field(
        default="",
        max_length=253,
        description="Context of the kubeconfig by which the cluster is reached, through kubectl; empty: the current one, if one of the "
        "next three is set.",
    )
    namespace: str = Field(
        default="", max_length=63, description="Namespace of the release; empty: the context's."
    )
    kubeconfig: str = Field(default="", description="The kubeconfig; empty: where kubectl looks for it.")
    release: str = Field(
        default="",
        max_length=53,
        description="Helm release, where the namespace has several; empty: the only one.",
    )

    @property
    def kube(self) -> bool:
        """Whether the cluster is to be reached through kubectl."""
        return bool(self.kube_context or self.namespace or self.kubeconfig or self.release)

    @property
    def secured(self) -> bool:
        """Whether it says anything of TLS."""
        return self.tls or bool(self.ca_file or self.cert_file)


class ClientTls(TlsConfig):
    """The side of a client, which needs no certificate of its own where the server asks for none."""

    @property
    def enabled(self) -> bool:
        """Whoever has made one wants TLS."""
        return True


def client_rules(client: ClientSection) -> str:
    """The rule between keys that is broken; "" for none. The message starts with the key at fault."""
    if bool(client.cert_file) != bool(client.key_file):
        missing = "key_file" if client.cert_file else "cert_file"
        return f"client.{missing}: must be set, since its counterpart is"
    return ""
