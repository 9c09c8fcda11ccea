# SPDX-License-Identifier: Apache-2.0
"""Recall ranks by counting the gallery rows that are at least as similar as a query's own row. Nothing is sorted."""
from __future__ import annotations

import torch

_ops = torch.ops.plimsoll


def recall_ranks(similarity: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Counts for each query the gallery rows that are at least as similar as its target. 1 is the best rank.

        ranks = recall_ranks(text @ image.T, torch.arange(len(text)))

    similarity: [queries, gallery] float32 or float64.
    target: [queries] int64, from 0 to gallery − 1.
    Returns: [queries] int32.
    """
    return _ops.recall_ranks(similarity, target)


def turned_query_ranks(s: torch.Tensor, p: torch.Tensor, a: torch.Tensor, b: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Counts gallery rows that reach a bound, where several conditions turn each query.

    Under condition k the similarity of query q and gallery row j is a·s + b·p, with s[q, j], p[k, j], a[k, q] and b[k, q]. So
    one product of queries and gallery serves all conditions. Counts of a gallery's parts add up.

    s: [queries, gallery], p: [conditions, gallery], a and b: [conditions, queries], all of one dtype, float32 or float64.
    least: [queries, conditions], the bound; the similarity of the query's own row makes the count its rank.
    Returns: [queries, conditions] int32.
    """
    return _ops.turned_query_ranks(s, p, a, b, least)


def turned_gallery_ranks(s: torch.Tensor, p: torch.Tensor, a: torch.Tensor, b: torch.Tensor, least: torch.Tensor, low: torch.Tensor,
                         high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts gallery rows that reach a bound, where several conditions turn each gallery row.

    Under condition k the similarity of query q and gallery row j is a·s + b·p, with s[q, j], p[q, k], a[k, j] and b[k, j].

    s: [queries, gallery], p: [queries, conditions], a and b: [conditions, gallery], all of one dtype, float32 or float64.
    least: [queries, conditions], the bound.
    low, high: [queries] int64. The query's own rows are low … high − 1, cut to the gallery.
    Returns: (all, own), [queries, conditions] int32 each: the count among all rows, and among the query's own.
    """
    return _ops.turned_gallery_ranks(s, p, a, b, least, low, high)
