# SPDX-License-Identifier: Apache-2.0
"""Importers: rows of other programs' files become token sets and image sets."""
