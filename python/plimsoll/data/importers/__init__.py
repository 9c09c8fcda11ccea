# SPDX-License-Identifier: Apache-2.0
"""Importers: they make token sets and image sets from other programs' files, and read those of torch.save."""
