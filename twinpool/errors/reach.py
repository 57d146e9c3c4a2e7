# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of errors that are about reaching a cluster: TLS, and Kubernetes in between."""

from __future__ import annotations

from typing import Final

from twinpool.errors.spec import C, ErrorSpec

REACH: Final = (
    ErrorSpec(
        "TLS_EXPECTED",
        C.UNAUTHENTICATED,
        False,
        "the server speaks TLS, and the client does not",
        "Give the CA by --ca-file, and --cert-file and --key-file where the server asks for a certificate; --tls for a public CA.",
    ),
    ErrorSpec(
        "TLS_NOT_SPOKEN",
        C.UNAUTHENTICATED,
        False,
        "the client speaks TLS, and the server does not",
        "Look whether the port is right; leave out the options of TLS if the cluster has none.",
    ),
    ErrorSpec(
        "SERVER_NOT_TRUSTED",
        C.UNAUTHENTICATED,
        False,
        "the server's certificate cannot be trusted",
        "Give the CA that signed it by --ca-file, and by --server-name the name that it holds; `twinpool doctor` checks the files.",
    ),
    ErrorSpec(
        "CERTIFICATE_REQUIRED",
        C.UNAUTHENTICATED,
        False,
        "the server asks for a certificate, and none was shown",
        "Give one that the cluster's CA signed, by --cert-file and --key-file.",
    ),
    ErrorSpec(
        "CERTIFICATE_REFUSED",
        C.UNAUTHENTICATED,
        False,
        "the server does not accept the certificate that was shown",
        "Show one that the cluster's CA signed and that is valid now; `twinpool doctor` checks the files.",
    ),
    ErrorSpec(
        "KUBECTL_MISSING",
        C.UNAVAILABLE,
        False,
        "there is no kubectl in the PATH",
        "Install kubectl, or give the address of the process by --control-address or --endpoint.",
    ),
    ErrorSpec(
        "KUBE_CONTEXT_UNKNOWN",
        C.INVALID_ARGUMENT,
        False,
        "the kubeconfig has no such context",
        "Use a context that `kubectl config get-contexts` shows, or another --kubeconfig.",
    ),
    ErrorSpec(
        "KUBE_FORBIDDEN",
        C.PERMISSION_DENIED,
        False,
        "Kubernetes does not allow it",
        "Ask for the right that the message names; `twinpool doctor --kube` lists those that are needed.",
    ),
    ErrorSpec(
        "KUBE_UNREACHABLE",
        C.UNAVAILABLE,
        True,
        "the API server of Kubernetes does not answer",
        "Look whether `kubectl version` gets an answer, and at the context's server and credentials.",
    ),
    ErrorSpec(
        "KUBE_SERVICE_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "the namespace has no such service of a release",
        "Give the namespace of the release by --namespace; `kubectl get services -A -l app.kubernetes.io/part-of=twinpool` lists all.",
    ),
    ErrorSpec(
        "KUBE_RELEASE_AMBIGUOUS",
        C.INVALID_ARGUMENT,
        False,
        "the namespace has several releases",
        "Say which one by --release.",
    ),
    ErrorSpec(
        "KUBE_FORWARD_FAILED",
        C.UNAVAILABLE,
        True,
        "the port could not be forwarded",
        "Look at the pods of the service: `twinpool doctor --kube` says which are not ready, and why.",
    ),
    ErrorSpec(
        "KUBECTL_FAILED",
        C.UNKNOWN,
        False,
        "kubectl failed",
        "Run the command that the message names by hand.",
    ),
)
