# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol of KServe and Triton, over what Generate does.

``tensors`` reads and writes tensors, ``parameters`` says what may be asked, ``request`` makes a request for Generate of both,
``answer`` makes responses of its events, ``stream`` serves the requests of one stream side by side, and ``service`` is the rest.
"""
