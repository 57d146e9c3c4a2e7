# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP API of a router: the same requests and answers as over gRPC, in another form."""
