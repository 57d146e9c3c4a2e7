# SPDX-License-Identifier: Apache-2.0
"""What ``twinpool doctor`` looks at: this machine, the files that the configuration names, and a release on Kubernetes."""
