# SPDX-License-Identifier: Apache-2.0
"""Presets by memory size, and the texts that a manager prints at its start and every few epochs.

Threads: pure functions.   Memory: text.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core

if TYPE_CHECKING:
    from ._embeddings import TrainableEmbeddingManager

PRESSURE_PERCENT = 85.0


def _preset(l1: int, l2: int, l3: bool, auto_sync: bool, sync: int, **more: Any) -> dict[str, Any]:
    return {"cache_l1_size_mb": l1, "cache_l2_size_mb": l2, "enable_l3_cache": l3,
            "auto_sync": auto_sync, "sync_batch_size": sync, **more}


PRESETS: dict[str, dict[str, Any]] = {
    "quick_fix": _preset(128, 256, False, False, 1),
    "balanced": _preset(256, 512, True, True, 10),
    "high": _preset(512, 1024, True, True, 20),
    "low": _preset(64, 128, True, True, 5),
    "debug": _preset(128, 256, True, True, 5),
    "small": _preset(32, 64, False, True, 1, chunk_size=50),
    "large": _preset(1024, 2048, True, True, 50),
}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """Returns the constructor arguments of a preset, with `changes`. Errors: ValueError naming all presets."""
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is none of {', '.join(PRESETS)}")
    return {**PRESETS[name], **changes}


def system_memory() -> tuple[float, float]:
    """Returns (percent of the machine's memory in use, GB available)."""
    values = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    total, available = values["MemTotal"], values["MemAvailable"]
    return 100.0 * (total - available) / total, available / 2**30


def memory_line(when: str) -> str:
    """Returns a line such as "Memory usage before training: 38.7% (38.4GB available)"."""
    percent, available = system_memory()
    return f"Memory usage {when}: {percent:.1f}% ({available:.1f}GB available)"


def say_eviction() -> None:
    """Prints the original's lines on an eviction of cached rows."""
    print("⚠️ High memory usage detected - triggering adaptive cache eviction")
    print(memory_line("after cache eviction"), flush=True)


def startup_block(manager: TrainableEmbeddingManager) -> str:
    """Returns lines with the manager's settings."""
    lines = []
    if manager.batch_size is not None:
        lines.append(f"Auto-optimized embedding chunk size: {manager.chunk_size} "
                     f"({manager.chunk_size / manager.batch_size:g}x batch_size)")
    lines += [
        "Initializing optimized TrainableEmbeddingManager...",
        f"  L1 cache: {manager.cache_l1_size_mb:g}MB",
        f"  L2 cache: {manager.cache_l2_size_mb:g}MB",
        f"  L3 cache: {'enabled' if manager.enable_l3_cache else 'disabled'}",
        f"  Sync batch size: {manager.sync_batch_size}",
        f"  Chunk size: {manager.chunk_size}",
        f"  Rows: {manager.rows:,} x {manager.embedding_dim}, "
        f"slab {_core.format_bytes(manager.slab_bytes)}, {manager.storage_mode} mode",
        memory_line("before training")]
    return "\n".join(lines)


def performance_block(manager: TrainableEmbeddingManager, epoch: int) -> str:
    """Returns lines on cache, disk and memory after an epoch, and advice."""
    cache, disk = manager.get_cache_performance(), manager.get_disk_usage_info()
    return "\n".join([
        f"=== Embedding Cache Performance (Epoch {epoch}) ===",
        f"  Cache hit rate: {cache['cache_hit_rate']:.1%}",
        f"  Total cache requests: {cache['total_requests']:,}",
        f"  Disk load ratio: {cache['disk_load_ratio']:.1%}",
        f"  Sync operations: {cache['sync_operations']}",
        f"  L1 cache usage: {cache['l1_usage_percent']:.1f}%",
        f"  L2 cache usage: {cache['l2_usage_percent']:.1f}%",
        f"  Disk usage: {disk['total_size_mb']:.2f}MB",
        f"  {memory_line(f'after epoch {epoch}')}",
        *(f"  Advice: {one}" for one in advice(manager))])


def advice(manager: TrainableEmbeddingManager) -> list[str]:
    """Returns sentences on which settings to change. Empty where no change is known to help."""
    out = []
    cache = manager.get_cache_performance()
    whole_bytes = manager.whole_table_bytes
    if cache["cache_hit_rate"] < 0.95 and cache["total_requests"] >= 1000 and (
            manager.slab_bytes < whole_bytes):
        out.append(f"{1 - cache['cache_hit_rate']:.0%} of the rows were not in memory when asked "
                   f"for; all of them need cache_l1_size_mb + cache_l2_size_mb = "
                   f"{whole_bytes / 2**20:.0f} (now "
                   f"{manager.cache_l1_size_mb + manager.cache_l2_size_mb:g})")
    if manager.auto_sync and manager.sync_batch_size < 5:
        out.append(f"sync_batch_size is {manager.sync_batch_size}: every commit waits for the "
                   "disk; 10 waits a tenth as often, and a crash then loses ten updates at most")
    if not manager.auto_sync and manager.pending_updates_count > 0:
        out.append(f"{manager.pending_updates_count} updates are not durable: call "
                   "force_sync_all_chunks() at the end of the epoch")
    if system_memory()[0] > PRESSURE_PERCENT:
        out.append("the machine is short of memory: call optimize_cache_settings(batch_size), or "
                   "lower cache_l1_size_mb and cache_l2_size_mb")
    return out
