# SPDX-License-Identifier: Apache-2.0
"""The way to a cluster that runs on Kubernetes: kubectl, with the kubeconfig and the rights of whoever runs the command."""
