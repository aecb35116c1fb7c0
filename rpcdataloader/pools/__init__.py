"""Node servers on running clusters: as actors of Ray, or of Dask.

Engines differ in how they start a node server, ask for its address, and end it (``pool.PoolEngine``). Placement, queues
and machines are the engine's business.
"""

from __future__ import annotations

from rpcdataloader.pools.engines import dask_pool, ray_pool

__all__ = ["dask_pool", "ray_pool"]
