"""The default passes with buckets of another size, or none: the collectives of small models would share one."""

from __future__ import annotations

from dataclasses import fields, replace

import dsgraph


def with_buckets(bucket_bytes: int) -> dsgraph.Pipeline:
    """Buckets of at most so many bytes; however little latency they save."""
    return dsgraph.Pipeline(
        replace(item, bucket_bytes=bucket_bytes, latency_share=0.0)  # type: ignore[call-arg]
        if "latency_share" in {field.name for field in fields(item)}
        else item
        for item in dsgraph.default_pipeline()
    )


def without_buckets() -> dsgraph.Pipeline:
    """No buckets of what is sharded."""
    return dsgraph.Pipeline(
        item for item in dsgraph.default_pipeline() if "latency_share" not in {field.name for field in fields(item)}
    )
