# SPDX-License-Identifier: Apache-2.0
"""A cluster in virtual time: the router core and the block manager are the real ones, workers are models of their step times."""
