"""``python -m rpcdataloader.status``: what node servers are doing."""
